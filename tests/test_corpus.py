import os
import sysconfig
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from torchtitan_mixle.data.corpus import FileBytes, python_stdlib
from torchtitan_mixle.errors import ConfigError

LIBRARY = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def train() -> FileBytes:
    return python_stdlib("train")


@pytest.fixture(scope="module")
def validation() -> FileBytes:
    return python_stdlib("validation")


def expected_files() -> list[str]:
    out = {"site-packages", "dist-packages", "__pycache__"}
    files = (path.relative_to(LIBRARY) for path in LIBRARY.rglob("*.py"))
    return sorted(path.as_posix() for path in files if not out & set(path.parts[:-1]))


def test_the_splits_share_out_all_files(train: FileBytes, validation: FileBytes) -> None:
    files = expected_files()
    assert validation.files == [f for f in files if zlib.crc32(f.encode()) % 10 == 0]
    assert train.files == [f for f in files if zlib.crc32(f.encode()) % 10 != 0]
    assert "json/decoder.py" in files


def test_the_stream_is_the_bytes_of_the_files(validation: FileBytes) -> None:
    stream: list[int] = []
    for file in validation.files:
        stream += [*(LIBRARY / file).read_bytes(), 256]
    assert validation.n_tokens == len(stream)
    assert validation.vocab_size == 257
    everything = validation.read(np.array([0]), len(stream))
    np.testing.assert_array_equal(everything[0], stream)
    assert everything.dtype == np.int64


def test_windows_are_slices(train: FileBytes) -> None:
    starts = np.array([0, 17, train.n_tokens - 100])
    windows = train.read(starts, 100)
    for start, window in zip(starts, windows, strict=True):
        np.testing.assert_array_equal(window, train.tokens[start : start + 100])
    assert train.read(np.array([], dtype=np.int64), 5).shape == (0, 5)
    with pytest.raises(IndexError):
        train.read(np.array([train.n_tokens - 99]), 100)
    with pytest.raises(IndexError):
        train.read(np.array([-1]), 100)


def test_locate_names_the_file_and_byte(train: FileBytes) -> None:
    first, second = train.files[:2]
    size = (LIBRARY / first).stat().st_size
    assert train.locate(3) == f"{first}, byte 3"
    assert train.locate(size) == f"{first}, byte {size}"
    assert train.locate(size + 1) == f"{second}, byte 0"


def test_a_model_needs_all_257_ids(train: FileBytes) -> None:
    train.check_ids(257)
    train.check_ids(50_000)
    size = (LIBRARY / train.files[0]).stat().st_size
    with pytest.raises(ConfigError, match=rf"id 256 in {train.files[0]}, byte {size} .*V=256; .*vocab_size = 257"):
        train.check_ids(256)


def test_the_fingerprint_is_of_the_contents(tmp_path: Path, train: FileBytes, validation: FileBytes) -> None:
    assert train.fingerprint != validation.fingerprint
    assert python_stdlib("validation").fingerprint == validation.fingerprint
    (tmp_path / "a.py").write_text("x = 1")
    before = FileBytes("one", tmp_path, ["a.py"]).fingerprint
    os.utime(tmp_path / "a.py", (0, 0))
    assert FileBytes("one", tmp_path, ["a.py"]).fingerprint == before
    (tmp_path / "a.py").write_text("x = 2")
    assert FileBytes("one", tmp_path, ["a.py"]).fingerprint != before


def test_it_loads_in_seconds() -> None:
    start = time.perf_counter()
    python_stdlib("train")
    assert time.perf_counter() - start < 5


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/other.py").write_text("pass")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"no library sources.*torchtitan-mixle prepare"):
        python_stdlib("train")


def test_another_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="'test'"):
        python_stdlib("test")
