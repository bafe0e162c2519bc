import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_mixle.data import store as store_module
from torchtitan_mixle.data.index import TokenFormat
from torchtitan_mixle.data.store import TokenStore
from torchtitan_mixle.data.writer import SplitWriter, StoreWriter
from torchtitan_mixle.errors import ConfigError

BYTES = TokenFormat(vocab_size=257, eod_id=256, kind="bytes", hash="bytes")
EOD = 256


def write_documents(writer: SplitWriter, documents: list[list[int]]) -> None:
    for document in documents:
        half = len(document) // 2
        writer.write(document[:half])
        writer.write(np.array(document[half:], dtype=np.int64))
        writer.end_document()


def make_store(
    target: Path, documents: list[list[int]], *, shard_tokens: int = 10, tokens: TokenFormat = BYTES, **options: bool
) -> TokenStore:
    with StoreWriter(target, **options) as writer:
        write_documents(writer.split(tokens=tokens, shard_tokens=shard_tokens), documents)
    return TokenStore.open(target)


def stream_of(documents: list[list[int]], eod: int = EOD) -> list[int]:
    return [token for document in documents for token in [*document, eod]]


def some_documents(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(0, 30)).tolist() for _ in range(n)]


def hidden_beside(target: Path) -> list[str]:
    return sorted(entry.name for entry in target.parent.iterdir() if entry.name.startswith("."))


# Reading


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_windows_equal_slices_of_the_stream(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    ids = st.lists(st.integers(0, 255), max_size=12)
    documents = data.draw(st.lists(ids, min_size=1, max_size=12))
    shard_tokens = data.draw(st.integers(1, 20))
    stream = np.array(stream_of(documents))
    length = data.draw(st.integers(0, len(stream)))
    starts = data.draw(st.lists(st.integers(0, len(stream) - length), max_size=6))

    store = make_store(tmp_path_factory.mktemp("data") / "out", documents, shard_tokens=shard_tokens)
    windows = store.read(np.array(starts, dtype=np.int64), length)

    assert windows.dtype == np.int64
    expected = np.array([stream[s : s + length] for s in starts], dtype=np.int64).reshape(len(starts), length)
    np.testing.assert_array_equal(windows, expected)


def test_every_window_of_a_stream_in_four_shards(tmp_path: Path) -> None:
    documents = some_documents(4, seed=3)
    stream = np.array(stream_of(documents))
    store = make_store(tmp_path / "out", documents, shard_tokens=len(stream) // 3)
    assert len(store.index.shards) == 4
    for length in range(1, len(stream) + 1):
        starts = np.arange(len(stream) - length + 1)
        np.testing.assert_array_equal(store.read(starts, length), stream[starts[:, None] + np.arange(length)])


def test_the_files_are_the_stream(tmp_path: Path) -> None:
    documents = some_documents(40)
    stream = stream_of(documents)
    make_store(tmp_path / "out", documents, shard_tokens=100)
    shards = sorted((tmp_path / "out").glob("shard-*.bin"))
    parts = [np.fromfile(shard, dtype="<u2") for shard in shards]
    assert np.concatenate(parts).tolist() == stream
    assert [len(part) for part in parts[:-1]] == [100] * (len(parts) - 1)
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert index["n_tokens"] == len(stream)
    assert index["n_documents"] == 40
    assert [shard["max_id"] for shard in index["shards"]] == [part.max() for part in parts]


def test_document_offsets_bound_the_documents(tmp_path: Path) -> None:
    documents = some_documents(25)
    store = make_store(tmp_path / "out", documents)
    offsets = store.document_offsets
    assert len(offsets) == 26
    for document, start, end in zip(documents, offsets, offsets[1:], strict=False):
        window = store.read(np.array([start], dtype=np.int64), int(end - start))
        assert window[0].tolist() == [*document, EOD]


def test_a_large_vocabulary_is_kept_in_four_bytes(tmp_path: Path) -> None:
    tokens = TokenFormat(vocab_size=65_537, eod_id=0, kind="tokenizer.json", hash="x")
    store = make_store(tmp_path / "out", [[65_536, 1]], tokens=tokens)
    assert store.read(np.array([0]), 3).tolist() == [[65_536, 1, 0]]
    assert (tmp_path / "out/shard-00000.bin").stat().st_size == 12


def test_a_window_outside_the_stream_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", [[1, 2, 3]])
    for start in (-1, 2):
        with pytest.raises(IndexError, match=r"leave \[0, 4\)"):
            store.read(np.array([start]), 3)


def test_many_shards_need_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_MAPS", 3)
    documents = some_documents(40)
    stream = np.array(stream_of(documents))
    store = make_store(tmp_path / "out", documents)
    before = len(list(Path("/proc/self/fd").iterdir()))
    starts = np.random.default_rng(1).integers(0, len(stream) - 35, 50)
    np.testing.assert_array_equal(store.read(starts, 35), np.stack([stream[s : s + 35] for s in starts]))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3


def test_a_pickled_store_reopens_its_files(tmp_path: Path) -> None:
    documents = some_documents(1000)
    store = make_store(tmp_path / "out", documents, shard_tokens=10_000)
    store.read(np.array([0]), 20)
    pickled = pickle.dumps(store)
    assert len(pickled) < 4000
    assert pickle.loads(pickled).read(np.array([5]), 20).tolist() == [stream_of(documents)[5:25]]


def test_reading_keeps_up_with_training(tmp_path: Path) -> None:
    """Batches of 8 windows of 1025 tokens, at over ten million tokens a second."""
    store = make_store(tmp_path / "out", [list(range(256)) * 8000], shard_tokens=500_000)
    batches = np.random.default_rng(0).integers(0, store.n_tokens - 1025, (500, 8))
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for starts in batches:
            store.read(starts, 1025)
        best = max(best, batches.size * 1025 / (time.perf_counter() - start))
    assert best > 10e6


def test_locate_names_shard_and_token(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", [[7] * 24])
    assert store.locate(0) == f"{tmp_path}/out/shard-00000.bin, token 0"
    assert store.locate(9).endswith("shard-00000.bin, token 9")
    assert store.locate(10).endswith("shard-00001.bin, token 0")
    assert store.locate(24).endswith("shard-00002.bin, token 4")


# Ids and fingerprint


def test_a_model_with_the_vocabulary_of_the_data_or_more_is_fine(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", some_documents(5))
    store.check_ids(257)
    store.check_ids(50_000)


@pytest.mark.parametrize("trust_index", [False, True])
def test_an_id_beyond_the_model_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust_index: bool
) -> None:
    if trust_index:
        monkeypatch.setattr(store_module, "_SCAN_LIMIT", 5)
    tokens = TokenFormat(vocab_size=300, eod_id=0, kind="bytes", hash="bytes")
    store = make_store(tmp_path / "out", [[1] * 13 + [299]], tokens=tokens)
    with pytest.raises(ConfigError, match=r"id 299 in .*shard-00001.bin, token 3 .* V=299; .*vocab_size = 300"):
        store.check_ids(299)


def test_a_declared_vocabulary_beyond_the_model_is_named(tmp_path: Path) -> None:
    tokens = TokenFormat(vocab_size=300, eod_id=0, kind="bytes", hash="bytes")
    store = make_store(tmp_path / "out", [[1, 2]], tokens=tokens)
    with pytest.raises(ConfigError, match=r"vocabulary of 300 and the model has V=100"):
        store.check_ids(100)


def test_ids_that_the_index_does_not_know_are_found(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", [[1] * 30])
    with (tmp_path / "out/shard-00001.bin").open("r+b") as f:
        f.seek(8)
        f.write((60_000).to_bytes(2, "little"))
    with pytest.raises(ConfigError, match=r"index and shard disagree.* 60000 in .*shard-00001.bin, token 4 .*V=257"):
        store.check_ids(257)


def test_the_fingerprint_is_of_the_tokens(tmp_path: Path) -> None:
    one = make_store(tmp_path / "a", [[1, 2, 3, 4]])
    same = make_store(tmp_path / "b", [[1, 2, 3, 4]])
    swapped = make_store(tmp_path / "c", [[2, 1, 3, 4]])  # same counts, same highest id
    os.utime(tmp_path / "b/index.json", (0, 0))
    assert one.fingerprint == same.fingerprint == TokenStore.open(tmp_path / "b").fingerprint
    assert swapped.fingerprint != one.fingerprint


# Folders that cannot be opened


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    table = json.loads((folder / "index.json").read_text())
    change(table)
    (folder / "index.json").write_text(json.dumps(table))


def truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / "index.json").unlink(), r"has no index\.json"),
    "not JSON": (lambda f: (f / "index.json").write_text("{"), r"is not JSON"),
    "another JSON": (lambda f: (f / "index.json").write_text('{"metadata": 1}'), r"not the index of a prepared folder"),
    "a list": (lambda f: (f / "index.json").write_text("[]"), r"not the index of a prepared folder"),
    "version": (lambda f: edit_index(f, lambda t: t.update(version=9)), r"has version 9.* reads 1"),
    "missing key": (lambda f: edit_index(f, lambda t: t.pop("n_tokens")), r"key 'n_tokens' is missing"),
    "missing tokenizer key": (lambda f: edit_index(f, lambda t: t["tokens"].pop("eod_id")), r"key 'eod_id' is missing"),
    "missing shard key": (
        lambda f: edit_index(f, lambda t: t["shards"][1].pop("max_id")),
        r"shards\[1\]: the key 'max_id'",
    ),
    "type": (lambda f: edit_index(f, lambda t: t.update(n_tokens="12")), r"n_tokens = '12' must be of type int"),
    "bool": (lambda f: edit_index(f, lambda t: t.update(n_tokens=True)), r"n_tokens = True must be of type int"),
    "dtype": (lambda f: edit_index(f, lambda t: t.update(dtype="int8")), r"dtype = 'int8' must be uint16 or uint32"),
    "dtype and V": (
        lambda f: edit_index(f, lambda t: t["tokens"].update(vocab_size=70_000)),
        r"vocab_size = 70000 must lie in 1\.\.65536",
    ),
    "eod": (lambda f: edit_index(f, lambda t: t["tokens"].update(eod_id=257)), r"eod_id = 257 must be below"),
    "no tokens": (lambda f: edit_index(f, lambda t: t.update(n_tokens=0, shards=[])), r"nothing to train on"),
    "sum": (lambda f: edit_index(f, lambda t: t.update(n_tokens=7)), r"n_tokens = 7, but its shards sum to 31"),
    "max id": (lambda f: edit_index(f, lambda t: t["shards"][0].update(max_id=257)), r"max_id = 257 must be below 257"),
    "escape": (lambda f: edit_index(f, lambda t: t["shards"][0].update(file="../x")), r"'\.\./x' must be a name"),
    "shard missing": (lambda f: (f / "shard-00002.bin").unlink(), r"shard-00002\.bin is missing"),
    "shard cut": (lambda f: truncate(f / "shard-00003.bin", 1), r"shard-00003\.bin has 1 bytes where .* says 2"),
    "shard long": (lambda f: os.truncate(f / "shard-00000.bin", 22), r"shard-00000\.bin has 22 bytes where .* says 20"),
    "offsets missing": (lambda f: (f / "documents.bin").unlink(), r"documents\.bin is missing"),
    "offsets cut": (lambda f: truncate(f / "documents.bin", 8), r"documents\.bin has 8 bytes where .* says 16"),
    "offsets wrong": (
        lambda f: (f / "documents.bin").write_bytes(bytes(16)),
        r"spans 0\.\.0, index\.json says 0\.\.31",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out"
    make_store(folder, [[1] * 30])
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(ConfigError, match=message) as error:
        TokenStore.open(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert "prepare" in str(error.value)


def test_what_is_no_folder_of_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (("absent", "does not exist"), ("file", "is a file"), ("empty", "is empty")):
        with pytest.raises(ConfigError, match=f"{name} {message}"):
            TokenStore.open(tmp_path / name)


def test_a_folder_replaced_under_a_reader_is_noticed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", [[1] * 30])
    make_store(tmp_path / "out", [[2] * 30], overwrite=True)
    with pytest.raises(ConfigError, match="was replaced"):
        store.read(np.array([0]), 5)


def test_a_shard_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", [[1] * 30])
    truncate(tmp_path / "out/shard-00001.bin", 2)
    with pytest.raises(ConfigError, match=r"shard-00001\.bin has 18 bytes"):
        store.read(np.array([8]), 5)


# Writing


def test_an_existing_target_is_kept_unless_told(tmp_path: Path) -> None:
    target = tmp_path / "out"
    make_store(target, [[1]])
    with pytest.raises(ConfigError, match=r"out exists; .*--overwrite"):
        make_store(target, [[2]])
    assert TokenStore.open(target).read(np.array([0]), 1) == 1
    make_store(target, [[2]], overwrite=True)
    assert TokenStore.open(target).read(np.array([0]), 1) == 2
    assert hidden_beside(target) == []
    assert sorted(f.name for f in target.iterdir()) == ["documents.bin", "index.json", "shard-00000.bin"]


def test_overwrite_deletes_nothing_of_others(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="prepared folders only"):
        make_store(foreign, [[1]], overwrite=True)
    target = tmp_path / "out"
    make_store(target, [[1]])
    (target / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"would delete .*notes\.txt"):
        make_store(target, [[1]], overwrite=True)
    assert (foreign / "thesis.txt").exists()
    assert (target / "notes.txt").exists()
    assert hidden_beside(target) == []


def test_a_failed_writer_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    make_store(target, [[1]])
    with pytest.raises(ZeroDivisionError), StoreWriter(target, overwrite=True) as writer:
        split = writer.split(tokens=BYTES, shard_tokens=2)
        write_documents(split, [[3] * 100])
        split._flush()
        1 / 0  # noqa: B018
    assert TokenStore.open(target).read(np.array([0]), 1) == 1
    assert hidden_beside(target) == []


def test_nothing_written_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no document"), StoreWriter(tmp_path / "out") as writer:
        writer.split(tokens=BYTES)
    assert list(tmp_path.iterdir()) == []


def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path) -> None:
    for wrong in (257, -1):
        with pytest.raises(ValueError, match=r"leave \[0, 257\)"):
            make_store(tmp_path / "out", [[1, wrong]])
    assert list(tmp_path.iterdir()) == []


def test_splits_are_prepared_folders_in_the_folder(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "out") as writer:
        write_documents(writer.split(tokens=BYTES), [[1, 2]])
        write_documents(writer.split("validation", tokens=BYTES), [[3]])
    assert TokenStore.open(tmp_path / "out").read(np.array([0]), 3).tolist() == [[1, 2, EOD]]
    assert TokenStore.open(tmp_path / "out/validation").read(np.array([0]), 2).tolist() == [[3, EOD]]


# Other processes, and killed ones


CHILD = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from torchtitan_mixle.data.index import TokenFormat
from torchtitan_mixle.data.writer import StoreWriter

assert "torch" not in sys.modules
target, what = sys.argv[1:]
if what == "die between the renames":
    rename = Path.rename
    def die(self, to):
        if self.name.endswith(".partial"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, to)
    Path.rename = die
with StoreWriter(target, overwrite=True) as writer:
    split = writer.split(tokens=TokenFormat(257, 256, "bytes", "bytes"), shard_tokens=1_000_000)
    while what == "write on":
        split.write(np.full(100_000, 9))
    split.write([9])
    split.end_document()
    print("writing", flush=True)
    if what == "wait":
        time.sleep(60)
"""


def start_writer(tmp_path: Path, target: Path, what: str) -> subprocess.Popen[bytes]:
    # Under the name of the command line tool the package loads without torch, in a fraction of a second.
    script = tmp_path / "torchtitan-mixle"
    script.write_text(CHILD)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, str(script), str(target), what], env=environment, stdout=subprocess.PIPE)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_writer_learns_who_holds_the_target(tmp_path: Path) -> None:
    target = tmp_path / "data/out"
    first = start_writer(tmp_path, target, "wait")
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"writing\n"
        with pytest.raises(ConfigError, match=f"is being written by process {first.pid} on host {os.uname().nodename}"):
            StoreWriter(target)
        assert first.poll() is None
        assert (target.parent / ".out.partial/writer.lock").exists()
    finally:
        kill(first)
    assert not target.exists()
    assert make_store(target, [[1]]).n_tokens == 2
    assert hidden_beside(target) == []


def test_a_writer_killed_at_work_leaves_no_target_and_the_next_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "data/out"
    process = start_writer(tmp_path, target, "write on")
    try:
        wait_for((target.parent / ".out.partial/shard-00002.bin").exists, process)
    finally:
        kill(process)
    assert hidden_beside(target) == [".out.partial"]
    with pytest.raises(ConfigError, match="is not finished"):
        TokenStore.open(target)
    assert make_store(target, [[1]]).n_tokens == 2
    assert hidden_beside(target) == []
    assert sorted(f.name for f in target.iterdir()) == ["documents.bin", "index.json", "shard-00000.bin"]


def test_a_writer_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    target = tmp_path / "data/out"
    old = make_store(target, [[1, 2, 3]])
    process = start_writer(tmp_path, target, "die between the renames")
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert hidden_beside(target) == [".out.partial"]
    with pytest.raises(ConfigError, match="is not finished"):
        TokenStore.open(target)
    with pytest.raises(ConfigError, match="exists"):  # the next writer has put it back
        StoreWriter(target)
    assert TokenStore.open(target).fingerprint == old.fingerprint
    assert hidden_beside(target) == []


def test_a_foreign_working_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/mine").touch()
    with pytest.raises(ConfigError, match="is in the way"):
        StoreWriter(tmp_path / "out")
    assert (tmp_path / ".out.partial/mine").exists()
