"""Prepared token folders, read through memory maps."""

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_mixle.data.index import AGAIN, INDEX, Index, read_index
from torchtitan_mixle.errors import ConfigError

_SCAN_LIMIT = 2**30  # tokens that a start-up may read through: seconds; beyond that the index is trusted
_SCAN_CHUNK = 2**22
_MAX_MAPS = 256  # each open map holds a file descriptor, and 1024 is a common limit for those


class TokenStore:
    """A prepared folder as a token stream (`TokenSource`). Maps are opened when first read and not pickled."""

    def __init__(self, folder: Path, index: Index, identity: tuple[int, int] | None) -> None:
        self.folder = folder
        self.index = index
        self._identity = identity
        self.name = str(folder)
        self.vocab_size = index.tokens.vocab_size
        self.tokenizer = index.tokens.hash
        self.n_tokens = index.n_tokens
        self.fingerprint = hashlib.sha256(index.to_json().encode()).hexdigest()
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._bounds = np.cumsum([0] + [shard.n_tokens for shard in index.shards], dtype=np.int64)
        self._maps: dict[str, npt.NDArray[Any]] = {}

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """The store in a prepared folder. Raises ConfigError for any other folder, and if index and files disagree."""
        folder = Path(path).expanduser()
        try:
            identity = _identity(folder)  # before the index is read, so that none can slip in between unnoticed
            store = cls(folder, read_index(folder), identity)
            store._check_files()
        except OSError as error:
            raise ConfigError(f"cannot read {folder}: {error}; see to it or {AGAIN}") from error
        return store

    def _check_files(self) -> None:
        offsets = self.folder / self.index.documents
        for shard in self.index.shards:
            _require_size(self.folder / shard.file, shard.n_tokens * self._dtype.itemsize)
        _require_size(offsets, (self.index.n_documents + 1) * 8)
        first, last = int(self.document_offsets[0]), int(self.document_offsets[-1])
        if (first, last) != (0, self.n_tokens):
            raise ConfigError(f"{offsets} spans {first}..{last}, {INDEX} says 0..{self.n_tokens}; {AGAIN}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    @property
    def document_offsets(self) -> npt.NDArray[np.uint64]:
        """(n_documents + 1,): document i is the tokens [offsets[i], offsets[i + 1]). Memory-mapped."""
        return self._map(self.index.documents, np.dtype("<u8"), self.index.n_documents + 1)

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) for each start: (n,) -> (n, length). Raises IndexError outside the stream."""
        starts = np.asarray(starts, dtype=np.int64)
        windows = np.empty((len(starts), length), dtype=np.int64)
        if windows.size == 0:
            return windows
        if starts.min() < 0 or starts.max() + length > self.n_tokens:
            raise IndexError(f"windows of {length} from {starts.min()}..{starts.max()} leave [0, {self.n_tokens})")
        shards = np.searchsorted(self._bounds, starts, side="right") - 1
        inside = starts + length <= self._bounds[shards + 1]
        for shard in np.unique(shards[inside]):
            rows = np.flatnonzero(inside & (shards == shard))
            views = np.lib.stride_tricks.sliding_window_view(self._shard(shard), length)
            windows[rows] = views[starts[rows] - self._bounds[shard]]
        for row in np.flatnonzero(~inside):
            self._read_across(int(shards[row]), int(starts[row]), windows[row])
        return windows

    def _read_across(self, shard: int, start: int, window: npt.NDArray[np.int64]) -> None:
        done = 0
        while done < len(window):
            first = start + done - int(self._bounds[shard])
            part = self._shard(shard)[first : first + len(window) - done]
            window[done : done + len(part)] = part
            done += len(part)
            shard += 1

    def locate(self, position: int) -> str:
        """The shard, and the place in it, of a token of the stream."""
        shard = int(np.searchsorted(self._bounds, position, side="right")) - 1
        return f"{self.folder / self.index.shards[shard].file}, token {position - int(self._bounds[shard])}"

    def check_ids(self, vocab_size: int) -> None:
        """Raise ConfigError if the shards hold, or the index declares, an id >= vocab_size.

        Up to 2^30 tokens are read through, which also finds shards that are not those of the index. Beyond that the
        index is believed: the loader looks at the ids of each batch anyway.
        """
        for i, shard in enumerate(self.index.shards):
            highest = self._highest(i) if self.n_tokens <= _SCAN_LIMIT else shard.max_id
            if highest != shard.max_id:
                raise ConfigError(
                    f"index and shard disagree: the highest id is {highest} in {self._find(i, highest)} and "
                    f"{shard.max_id} in the index (the model has V={vocab_size}); {AGAIN}"
                )
            if highest >= vocab_size:
                raise ConfigError(
                    f"token id {highest} in {self._find(i, highest)} is not below the model's vocabulary size "
                    f"V={vocab_size}; set [mixle] vocab_size = {self.vocab_size} or prepare the data with a smaller one"
                )
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"{self.name} was prepared with a vocabulary of {self.vocab_size} and the model has V={vocab_size}, "
                f"which must not be smaller; set [mixle] vocab_size = {self.vocab_size}"
            )

    def _chunks(self, shard: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        tokens = self._shard(shard)
        return ((at, tokens[at : at + _SCAN_CHUNK]) for at in range(0, len(tokens), _SCAN_CHUNK))

    def _highest(self, shard: int) -> int:
        return max(int(chunk.max()) for _, chunk in self._chunks(shard))

    def _find(self, shard: int, token: int) -> str:
        for at, chunk in self._chunks(shard):
            if (hits := np.flatnonzero(chunk == token)).size:
                return self.locate(int(self._bounds[shard]) + at + int(hits[0]))
        return str(self.folder / self.index.shards[shard].file)

    def _shard(self, number: int) -> npt.NDArray[Any]:
        shard = self.index.shards[number]
        return self._map(shard.file, self._dtype, shard.n_tokens)

    def _map(self, file: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        mapped = self._maps.get(file)
        if mapped is None:
            try:
                mapped = self._open_map(self.folder / file, dtype, count)
            except OSError as error:
                raise ConfigError(f"cannot read {self.folder / file}: {error}; see to it and start again") from error
            if len(self._maps) >= _MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[file] = mapped
        return mapped

    def _open_map(self, path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        _require_size(path, count * dtype.itemsize)
        with path.open("rb") as f:
            # `prepare --overwrite` may have put another folder here before this: its shard would go unnoticed.
            if _identity(self.folder) != self._identity:
                raise ConfigError(f"{self.folder} was replaced while it was being read; start again")
            return np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Of the index file. Its inode alone would not do: numbers are given again once a file is gone."""
    try:
        status = (folder / INDEX).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _require_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise ConfigError(f"{path} is missing, which {INDEX} names; copy the folder again or {AGAIN}")
    actual = path.stat().st_size
    if actual != expected:
        raise ConfigError(f"{path} has {actual} bytes where {INDEX} says {expected}; copy the folder again or {AGAIN}")
