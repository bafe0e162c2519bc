"""The embedded corpus: the running Python's standard library, real text that every machine has."""

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_mixle.data.tokenizers import ByteTokenizer
from torchtitan_mixle.errors import ConfigError

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_VALIDATION_SHARE = 10  # one file in ten


def python_stdlib(split: str) -> "FileBytes":
    """The `.py` files of the standard library in the order of their paths, byte by byte, each closed by id 256.

    A file belongs to the split "validation" if the CRC-32 of its relative path is a multiple of 10, else to "train".
    Raises ConfigError for a Python that comes without its sources, and for another split.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f'python_stdlib has no split {split!r}; use "train" or "validation"')
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(_sources(root)) if _is_validation(file) == (split == "validation")]
    if not files:
        raise ConfigError(
            f"this Python has no library sources in {root} (zipped or stripped); use a Python that has, or prepare "
            f"your own text with `torchtitan-mixle prepare`"
        )
    return FileBytes(f"python_stdlib ({split})", root, files)


def _sources(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        for name in files:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_validation(file: str) -> bool:
    return zlib.crc32(os.fsencode(file)) % _VALIDATION_SHARE == 0


class FileBytes:
    """Files as one stream of bytes in memory (`TokenSource`), 2 bytes a token."""

    def __init__(self, name: str, root: Path, files: list[str]) -> None:
        contents = [(root / file).read_bytes() for file in files]
        self.name = name
        self.vocab_size = ByteTokenizer.vocab_size
        self.tokenizer = ByteTokenizer.hash
        self.files = files
        self.bounds = np.cumsum([0] + [len(content) + 1 for content in contents], dtype=np.int64)
        self.n_tokens = int(self.bounds[-1])
        self.tokens = np.full(self.n_tokens, ByteTokenizer.eod_id, dtype=np.uint16)
        digest = hashlib.sha256()
        for file, content, start in zip(files, contents, self.bounds, strict=False):
            self.tokens[start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
            digest.update(os.fsencode(file) + b"\0" + len(content).to_bytes(8, "little") + content)
        self.fingerprint = digest.hexdigest()

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) for each start: (n,) -> (n, length). Raises IndexError outside the stream."""
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size == 0 or length == 0:
            return np.empty((len(starts), length), dtype=np.int64)
        if starts.min() < 0 or starts.max() + length > self.n_tokens:
            raise IndexError(f"windows of {length} from {starts.min()}..{starts.max()} leave [0, {self.n_tokens})")
        return np.lib.stride_tricks.sliding_window_view(self.tokens, length)[starts].astype(np.int64)

    def locate(self, position: int) -> str:
        """The file, and the byte of it, of a token of the stream; the id 256 counts as the byte after the last."""
        file = int(np.searchsorted(self.bounds, position, side="right")) - 1
        return f"{self.files[file]}, byte {position - int(self.bounds[file])}"

    def check_ids(self, vocab_size: int) -> None:
        """Raise ConfigError for a model that does not have all 257 ids."""
        if vocab_size >= self.vocab_size:
            return
        highest = int(self.tokens.max())
        position = int(np.argmax(self.tokens == highest))
        raise ConfigError(
            f"token id {highest} in {self.locate(position)} is not below the model's vocabulary size V={vocab_size}; "
            f"{self.name} needs [mixle] vocab_size = {self.vocab_size} or more"
        )
