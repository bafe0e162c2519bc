import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import models, pre_tokenizers

from torchtitan_mixle.cli.prepare import prepare
from torchtitan_mixle.data import prepare as prepare_module
from torchtitan_mixle.data.corpus import python_stdlib
from torchtitan_mixle.data.prepare import Inputs, Meter, Prepared, prepare_tokens
from torchtitan_mixle.data.store import TokenStore
from torchtitan_mixle.data.tokenizers import JsonTokenizer, load_tokenizer, open_tokenizer, train_bpe
from torchtitan_mixle.errors import ConfigError

LINES = "".join(f"line {i}: the quick brown fox, naïve — 狐狸 🦊\n" for i in range(50))


def documents_of(folder: Path) -> list[list[int]]:
    """The documents of a prepared folder, without their ends."""
    store = TokenStore.open(folder)
    bounds = [int(offset) for offset in store.document_offsets]
    eod = store.index.tokens.eod_id
    documents = []
    for start, end in pairwise(bounds):
        ids = store.read(np.array([start]), end - start)[0].tolist()
        assert ids[-1] == eod
        documents.append(ids[:-1])
    return documents


def texts_of(folder: Path) -> list[str]:
    tokenizer = open_tokenizer(folder)
    return [tokenizer.decode(ids) for ids in documents_of(folder)]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def quiet_meter(total_bytes: int = 1) -> Meter:
    return Meter("reading", total_bytes, Console(stderr=True))


# What is read, in which order


def test_files_and_folders_become_documents_in_order(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "b/inner").mkdir(parents=True)
    (data / ".git").mkdir()
    (data / ".git/config").write_text("hidden")
    (data / "c.txt").write_bytes(b"last \xff\x00")
    (data / "a.txt").write_text("first")
    (data / "b/inner/z.md").write_text("")
    write_jsonl(data / "b/k.jsonl", ["one", "zwei ü"])
    (data / "b/l.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n\n  \n{"text": "lines"}'))
    (data / "b/m.txt.gz").write_bytes(gzip.compress(b"packed text\n"))
    (tmp_path / "before.txt").write_text("given before")

    result = prepare_tokens([tmp_path / "before.txt", data], tmp_path / "out", byte_level=True)

    expected = [b"given before", b"first", b"", b"one", "zwei ü".encode(), b"packed", b"lines", b"packed text\n"]
    expected.append(b"last \xff\x00")
    assert [bytes(ids) for ids in documents_of(tmp_path / "out")] == expected
    assert result.train.documents == 9
    assert result.train.tokens == sum(len(text) + 1 for text in expected) == TokenStore.open(tmp_path / "out").n_tokens
    assert result.vocab_size == 257


def test_another_key_of_json_lines(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "y"], key="content")
    prepare_tokens([source], tmp_path / "out", byte_level=True, text_key="content")
    assert texts_of(tmp_path / "out") == ["x", "y"]


def test_the_same_input_gives_the_same_tokens(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [LINES[i : i + 90] for i in range(0, 1500, 90)])
    for out in ("one", "two"):
        prepare_tokens([source], tmp_path / out, bpe_vocab_size=300, validation_fraction=0.3)
    for split in (".", "validation"):
        one, two = (TokenStore.open(tmp_path / out / split) for out in ("one", "two"))
        assert one.fingerprint == two.fingerprint


# Pieces


def pieces_of(path: Path, *, any_bytes: bool = False) -> list[Any]:
    inputs = Inputs([path], text_key="text")
    meter = quiet_meter()
    pieces = list(inputs.pieces(meter, any_bytes=any_bytes))
    assert meter.bytes_read == inputs.total_bytes == path.stat().st_size
    return pieces


@pytest.mark.parametrize("piece_bytes", [5, 64, 1000, 10**6])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_pieces_of_a_document_add_up_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, suffix: str
) -> None:
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", piece_bytes)
    path = tmp_path / f"a.{suffix}"
    path.write_text(LINES if suffix == "txt" else json.dumps({"text": LINES}))
    pieces = pieces_of(path)
    assert "".join(piece.text for piece in pieces) == LINES
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in pieces) <= 2 * piece_bytes
    if piece_bytes == 1000:
        assert all(piece.text.endswith("\n") for piece in pieces)
    if piece_bytes == 10**6:
        assert len(pieces) == 1


def test_a_text_without_line_ends_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é狐🦊a" * 100
    path = tmp_path / "a.txt"
    path.write_text(text)
    for piece_bytes in range(4, 16):
        monkeypatch.setattr(prepare_module, "PIECE_BYTES", piece_bytes)
        pieces = pieces_of(path)
        assert "".join(piece.text for piece in pieces) == text
        assert max(len(piece.text.encode()) for piece in pieces) <= 2 * piece_bytes


@settings(deadline=None)
@given(st.text(min_size=1), st.data())
def test_the_end_of_characters_is_the_longest_prefix_that_decodes(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    part = whole[: data.draw(st.integers(1, len(whole)))]
    longest = next((n for n in range(len(part), 0, -1) if decodes(part[:n])), len(part))
    assert prepare_module._end_of_characters(part) == longest


def decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# Tokenizers


def test_trained_bpe_gives_the_text_back(tmp_path: Path) -> None:
    texts = [LINES, "a<|endoftext|>b", "\x00\ufeff\n\n   tabs\t", ""]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    result = prepare_tokens([source], tmp_path / "out", bpe_vocab_size=400)
    assert texts_of(tmp_path / "out") == texts
    assert 257 < result.vocab_size <= 400
    ids = [token for document in documents_of(tmp_path / "out") for token in document]
    assert open_tokenizer(tmp_path / "out").eod_id not in ids
    assert len(ids) < len("".join(texts).encode()) / 2


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe([LINES], 350)


def test_a_given_tokenizer_encodes_as_its_library_does(tmp_path: Path, bpe: JsonTokenizer) -> None:
    bpe.save(tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", [LINES, "fox"])
    prepare_tokens([source], tmp_path / "out", tokenizer=tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert documents_of(tmp_path / "out") == [inner.encode(LINES).ids, inner.encode("fox").ids]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert open_tokenizer(tmp_path / "out").hash == bpe.hash == TokenStore.open(tmp_path / "out").index.tokens.hash


def test_truncation_and_padding_of_a_tokenizer_file_are_not_applied(tmp_path: Path, bpe: JsonTokenizer) -> None:
    inner = tokenizers.Tokenizer.from_buffer(bpe.content)
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch([LINES, "f"])] == [LINES, "f"]


def save_word_tokenizer(path: Path, vocabulary: dict[str, int], special: list[str]) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(special)
    inner.save(str(path))


def test_the_end_of_document_token_is_found_or_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    save_word_tokenizer(file, {"?": 0, "fox": 1, "</s>": 2, "[SEP]": 70_000}, ["</s>", "[SEP]"])
    assert load_tokenizer(file).eod_id == 2
    named = load_tokenizer(file, eod_token="[SEP]")
    assert named.eod_id == 70_000
    assert named.vocab_size == 70_001  # ids have a gap: V is not the number of tokens
    with pytest.raises(ConfigError, match=r"no token <end> .*--eod-token.*special tokens are: </s>, \[SEP\]"):
        load_tokenizer(file, eod_token="<end>")
    save_word_tokenizer(file, {"?": 0}, [])
    with pytest.raises(ConfigError, match=r"no token <\|endoftext\|> or </s> or <eos>"):
        load_tokenizer(file)


def test_a_prepared_folder_keeps_its_tokenizer(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [LINES])
    prepare_tokens([source], tmp_path / "out", bpe_vocab_size=300)
    file = tmp_path / "out/tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ConfigError, match="is not the tokenizer that the tokens were made with"):
        open_tokenizer(tmp_path / "out")
    file.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        open_tokenizer(tmp_path / "out")


def test_the_bpe_sample_is_spread_over_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "BPE_SAMPLE_CHARACTERS", 4000)
    seen: list[str] = []

    def train(texts: Any, vocab_size: int) -> JsonTokenizer:
        seen.extend(texts)
        return train_bpe(seen, vocab_size)

    monkeypatch.setattr(prepare_module, "train_bpe", train)
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i:03d} " * 25 for i in range(400)])
    prepare_tokens([source], tmp_path / "out", bpe_vocab_size=300)
    numbers = [int(text[:3]) for text in seen]
    assert 25 <= len(numbers) <= 41
    assert numbers[0] < 20
    assert numbers[-1] > 370
    assert max(np.diff(numbers)) < 30


# Validation split


def test_validation_takes_whole_documents_by_number(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(300)]
    result = prepare_tokens(
        [write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "out", byte_level=True, validation_fraction=0.2
    )
    train, validation = texts_of(tmp_path / "out"), texts_of(tmp_path / "out/validation")
    assert sorted(train + validation) == sorted(texts)
    assert result.validation is not None
    assert result.validation.documents == len(validation)
    assert 40 <= len(validation) <= 80
    # Other text of the same number goes the same way, today and in later releases.
    assert [int(text.split()[1]) for text in validation][:5] == FIRST_VALIDATION_DOCUMENTS
    other = write_jsonl(tmp_path / "b.jsonl", [text.upper() for text in texts])
    prepare_tokens([other], tmp_path / "other", byte_level=True, validation_fraction=0.2)
    assert texts_of(tmp_path / "other/validation") == [text.upper() for text in validation]


FIRST_VALIDATION_DOCUMENTS = [12, 19, 22, 39, 44]


def test_an_empty_validation_split_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    for fraction in (0.0, 0.01, 0.99):
        out = tmp_path / str(fraction)
        result = prepare_tokens([tmp_path / "a.txt"], out, byte_level=True, validation_fraction=fraction)
        assert result.validation is None
        assert ("no validation split" in result.describe()) == (fraction > 0)
        assert texts_of(out) == ["one document"]
        assert not (out / "validation").exists()


# Mistakes


def text_file(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "in.txt").write_bytes(content) and None


def json_file(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "in.jsonl").write_bytes(b'{"text": "fine"}\n\n' + content) and None


FINE = text_file(b"fine")
BPE: dict[str, Any] = {"bpe_vocab_size": 300}
BYTES: dict[str, Any] = {"byte_level": True}

MISTAKES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "bad JSON": (json_file(b'{"text": "cut'), BYTES, r"in\.jsonl, line 3 is not JSON"),
    "no key": (json_file(b'{"body": "x", "id": 1}'), BYTES, r"line 3 has no key 'text' \(its keys: 'body', 'id'\)"),
    "no string": (json_file(b'{"text": ["x"]}'), BYTES, r"line 3: 'text' is \[\"x\"\], not a string"),
    "no object": (json_file(b"[1, 2]"), BYTES, r"line 3 is not a JSON object but \[1, 2\]"),
    "half a pair": (json_file(b'{"text": "ab\\ud800"}'), BYTES, r"line 3 holds half a surrogate pair \(character 2\)"),
    "JSON not UTF-8": (json_file(b'{"text": "\xff"}'), BPE, r"line 3 is not JSON .*0xff"),
    "deep JSON": (json_file(b"[" * 100_000), BYTES, r"line 3 is not JSON"),
    "not UTF-8": (text_file(b"ab\n\xffcd"), BPE, r"in\.txt: the byte 0xff at offset 3 is not UTF-8.*--bytes"),
    "cut character": (text_file("ab狐".encode()[:-1]), BPE, r"the byte 0xe7 at offset 2 is not UTF-8"),
    "not UTF-8 far in": (
        text_file(b"word \n" * 100_000 + b"\x80"),
        BPE,
        r"the byte 0x80 at offset 600000 is not UTF-8",
    ),
    "cut gzip": (
        lambda folder: (folder / "in.txt.gz").write_bytes(gzip.compress(bytes(9999))[:-9]) and None,
        BYTES,
        r"in\.txt\.gz is not a whole gzip file",
    ),
    "no gzip": (lambda folder: (folder / "in.gz").write_bytes(b"text") and None, BYTES, r"in\.gz is not a whole gzip"),
    "broken link": (lambda folder: (folder / "in").symlink_to("nowhere"), BYTES, r"neither a file nor a folder"),
    "loop": (lambda folder: (folder / "in").symlink_to(folder), BYTES, r"links to a folder above it"),
    "no files": (lambda folder: None, BYTES, r"no input files in .*data"),
    "no documents": (lambda folder: (folder / "in.jsonl").touch(), BYTES, r"no document"),
    "no tokenizer": (FINE, {}, r"exactly one of --bytes, --tokenizer PATH and --train-bpe V"),
    "two tokenizers": (FINE, BYTES | BPE, r"exactly one of"),
    "small V": (FINE, {"bpe_vocab_size": 256}, r"--train-bpe 256 must be at least 257"),
    "eod of bytes": (FINE, BYTES | {"eod_token": "</s>"}, r"--eod-token </s> names a token of --tokenizer"),
    "fraction": (FINE, BYTES | {"validation_fraction": 1.0}, r"--validation-fraction 1\.0 must be in \[0, 1\)"),
    "nan": (FINE, BYTES | {"validation_fraction": float("nan")}, r"--validation-fraction nan"),
    "shard": (FINE, BYTES | {"shard_tokens": 0}, r"--shard-tokens 0 must be at least 1"),
    "absent tokenizer": (FINE, {"tokenizer": Path("/nowhere/t")}, r"no tokenizer at /nowhere/t"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make, options, message = MISTAKES[name]
    make(data)
    with pytest.raises(ConfigError, match=message) as error:
        prepare_tokens([data], tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_line_too_long_to_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "MAX_LINE_BYTES", 100)
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "y" * 90])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 is over 100 bytes"):
        prepare_tokens([source], tmp_path / "out", byte_level=True)


def test_input_and_output_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("x")
    for out in ("data", "data/out", "data/../data/out"):
        with pytest.raises(ConfigError, match="lie in one another"):
            prepare_tokens([tmp_path / "data"], tmp_path / out, byte_level=True)
    with pytest.raises(ConfigError, match="lie in one another"):
        prepare_tokens([tmp_path / "data/a.txt"], tmp_path / "data", byte_level=True)
    with pytest.raises(ConfigError, match=r"input .*absent does not exist"):
        prepare_tokens([tmp_path / "absent"], tmp_path / "out", byte_level=True)


def test_a_disk_that_refuses_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot prepare .*file/out"):
        prepare_tokens([tmp_path / "a.txt"], tmp_path / "file/out", byte_level=True)


# The command


def run_command(arguments: list[object]) -> None:
    tyro.cli(prepare, args=[str(argument) for argument in arguments])


def test_the_command_prints_what_to_write_into_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / 'o "quoted" ü'
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(40)])
    run_command([source, "--out", out, "--bytes", "--validation-fraction", "0.3", "--shard-tokens", 100])
    printed = capsys.readouterr()
    summary, toml = printed.out.split("To train on it:")
    table = tomllib.loads(toml)
    store = TokenStore.open(table["training"]["dataset_path"])
    validation = TokenStore.open(table["validation"]["dataset_path"])
    assert table["training"]["dataset"] == table["validation"]["dataset"] == "tokens"
    assert store.n_tokens + validation.n_tokens == sum(len(f"text {i}") + 1 for i in range(40))
    assert f"{store.index.n_documents} documents, {store.n_tokens} tokens, {len(store.index.shards)} shards" in summary
    assert "V=257" in summary
    assert "\x1b" not in printed.err


def test_progress_is_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_meter(total_bytes=4 * 2**20) as meter:
        meter.bytes_read, meter.tokens = 2**20, 12345
        meter.tick()
        meter._start -= 40
        meter._shown_at -= 40
        meter.tick()
    assert capsys.readouterr().err == "reading: 1 of 4 MiB, 12,345 tokens, 120 s left\n"


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Meter("reading", 2**20, Console(stderr=True, force_terminal=True, width=120)) as meter:
        meter.bytes_read, meter.tokens = 2**19, 12345
        meter.tick()
    assert "12,345 tokens" in capsys.readouterr().err


# Other processes


CHILD = """
import signal, sys
from pathlib import Path
import tyro
from torchtitan_mixle.cli.prepare import prepare

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

assert "torch" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
before = peak_kib()
tyro.cli(prepare)
print("grown by", peak_kib() - before)
"""


def start_command(tmp_path: Path, arguments: list[object]) -> subprocess.Popen[str]:
    # Under the name of the command line tool the package loads without torch, in a fraction of a second.
    script = tmp_path / "torchtitan-mixle"
    script.write_text(CHILD)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """200 MB in one file without a line end, 20 MB of long JSON lines, and peaks of the process itself."""
    big = tmp_path / "big.txt"
    with big.open("wb") as f:
        f.truncate(200_000_000)
    lines = tmp_path / "lines.jsonl"
    lines.write_text((json.dumps({"text": "x" * 1000}) + "\n") * 20_000)
    process = start_command(tmp_path, [big, lines, "--out", tmp_path / "out", "--bytes"])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert TokenStore.open(tmp_path / "out").n_tokens == 200_000_001 + 20_000 * 1001
    assert int(out.split("grown by")[1]) < 64 * 1024


@pytest.fixture(scope="module")
def library_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "library.txt"
    stream = python_stdlib("train").tokens
    path.write_text(stream[stream < 128].astype(np.uint8).tobytes().decode())
    return path


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def interrupt_when(
    tmp_path: Path, arguments: list[object], condition: Callable[[], bool], number: signal.Signals
) -> int:
    process = start_command(tmp_path, arguments)
    try:
        wait_for(condition, process)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path, library_text: Path, bpe: JsonTokenizer) -> None:
    bpe.save(tmp_path)
    data = tmp_path / "data"
    working = data / ".out.partial"
    arguments = [library_text, "--out", data / "out"]
    tokenizing = lambda: any(working.glob("shard-*"))  # noqa: E731
    training = lambda: (working / "writer.lock").exists()  # noqa: E731
    for options, condition in ((["--tokenizer", tmp_path], tokenizing), (["--train-bpe", 300], training)):
        assert interrupt_when(tmp_path, [*arguments, *options], condition, signal.SIGINT) != 0
        assert list(data.iterdir()) == []


def test_a_killed_run_is_simply_started_again(tmp_path: Path, library_text: Path, bpe: JsonTokenizer) -> None:
    bpe.save(tmp_path)
    data = tmp_path / "data"
    arguments = [library_text, "--out", data / "out", "--tokenizer", tmp_path, "--shard-tokens", 1_000_000]
    half_way = (data / ".out.partial/shard-00001.bin").exists
    assert interrupt_when(tmp_path, arguments, half_way, signal.SIGKILL) == -signal.SIGKILL
    assert [entry.name for entry in data.iterdir()] == [".out.partial"]
    short = tmp_path / "short.txt"
    short.write_text(LINES)
    result: Prepared = prepare_tokens([short], data / "out", tokenizer=tmp_path)
    assert [entry.name for entry in data.iterdir()] == ["out"]
    assert texts_of(data / "out") == [LINES]
    assert result.train.shards == 1
