"""The writer of prepared token folders, which leaves a whole folder or none."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from torchtitan_mixle.data.index import (
    DOCUMENTS,
    INDEX,
    Index,
    Shard,
    TokenFormat,
    read_index,
    working_folder,
)
from torchtitan_mixle.errors import ConfigError

DEFAULT_SHARD_TOKENS = 2**29

_LOCK = "writer.lock"
_REPLACED = "replaced"
_FLUSH_TOKENS = 2**20


class SplitWriter:
    """Writes one prepared folder, index last. Made by `StoreWriter.split`, which also finishes it."""

    def __init__(self, folder: Path, tokens: TokenFormat, shard_tokens: int) -> None:
        if shard_tokens < 1:
            raise ConfigError(f"shard_tokens={shard_tokens} must be at least 1, say {DEFAULT_SHARD_TOKENS}")
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.tokens = tokens
        self.shard_tokens = shard_tokens
        self.n_tokens = 0
        self.n_documents = 0
        self.shards: list[Shard] = []
        self._dtype = np.dtype(tokens.dtype).newbyteorder("<")
        self._eod = np.array([tokens.eod_id], dtype=self._dtype)
        self._in_document = False
        self._pending: list[npt.NDArray[Any]] = []
        self._pending_tokens = 0
        self._shard: _OpenShard | None = None
        self._documents: BinaryIO = (folder / DOCUMENTS).open("wb")
        self._documents.write(struct.pack("<Q", 0))

    def write(self, ids: npt.ArrayLike) -> None:
        """Go on with the current document, or begin one. ids: (n,) integers in [0, V), not changed afterwards."""
        array = np.asarray(ids)
        self._in_document = True
        self._append(array if array.size else array.astype(self._dtype))

    def end_document(self) -> None:
        """Close the current document, which may be empty, with the end-of-document id."""
        self._append(self._eod)
        self._in_document = False
        self.n_documents += 1
        self._documents.write(struct.pack("<Q", self.n_tokens))

    def _append(self, ids: npt.NDArray[Any]) -> None:
        self._pending.append(ids)
        self._pending_tokens += len(ids)
        self.n_tokens += len(ids)
        if self._pending_tokens >= _FLUSH_TOKENS or len(self._pending) >= _FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        """Write what has come together: one call per token batch keeps short documents cheap."""
        if not self._pending_tokens:
            return
        ids = np.concatenate(self._pending)
        self._pending, self._pending_tokens = [], 0
        if ids.min() < 0 or ids.max() >= self.tokens.vocab_size:
            raise ValueError(f"ids {ids.min()}..{ids.max()} leave [0, {self.tokens.vocab_size})")
        ids = ids.astype(self._dtype, copy=False)
        while len(ids):
            if self._shard is None:
                self._shard = _OpenShard(self.folder / f"shard-{len(self.shards):05d}.bin")
            room = self.shard_tokens - self._shard.n_tokens
            self._shard.write(ids[:room])
            ids = ids[room:]
            if self._shard.n_tokens == self.shard_tokens:
                self._close_shard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.shards.append(self._shard.finish())
            self._shard = None

    def finish(self) -> Index:
        """Bring everything to the disk, index last. Raises ConfigError if nothing was written."""
        if self._in_document:
            self.end_document()
        if not self.n_documents:
            raise ConfigError("there is no document to write; give inputs that hold some")
        self._flush()
        self._close_shard()
        _sync_and_close(self._documents)
        index = Index(self.tokens.dtype, self.tokens, self.n_tokens, DOCUMENTS, self.n_documents, tuple(self.shards))
        with (self.folder / INDEX).open("wb") as f:
            f.write(index.to_json().encode())
            _sync_and_close(f)
        _sync_folder(self.folder)
        return index

    def abandon(self) -> None:
        """Close the files, whatever is in them."""
        self._documents.close()
        if self._shard is not None:
            self._shard.file.close()


class _OpenShard:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = path.open("wb")
        self.n_tokens = 0
        self.max_id = 0
        self.sha256 = hashlib.sha256()

    def write(self, ids: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(ids).data
        self.file.write(data)
        self.sha256.update(data)
        self.max_id = max(self.max_id, int(ids.max()))
        self.n_tokens += len(ids)

    def finish(self) -> Shard:
        _sync_and_close(self.file)
        return Shard(self.path.name, self.n_tokens, self.max_id, self.sha256.hexdigest())


class StoreWriter:
    """Makes a prepared folder and its splits, all or nothing: `with StoreWriter(target) as store: store.split(...)`.

    It works in a hidden sibling, `.NAME.partial`, and renames that at the end. The kernel's lock on a file in there
    keeps a second writer of the same target out and falls with the process, so the next writer can tell what a
    killed one left and removes it. A folder to be replaced is moved in there just before; the next writer moves it
    back if this one is killed between the two renames.

    Raises ConfigError if the target exists (unless `overwrite`), is not a prepared folder, or has a writer.
    """

    def __init__(self, target: str | Path, *, overwrite: bool = False) -> None:
        self.target = Path(target).expanduser().resolve()
        self.overwrite = overwrite
        self.folder = working_folder(self.target)
        self._replaced = self.folder / _REPLACED
        self._splits: dict[str, SplitWriter] = {}
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _lock(self.folder, self.target)
        try:
            self._tidy()
            self._check_target()
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def split(self, name: str = "", *, tokens: TokenFormat, shard_tokens: int = DEFAULT_SHARD_TOKENS) -> SplitWriter:
        """A writer for the target itself, or for the folder `name` in it."""
        self._splits[name] = SplitWriter(self.folder / name, tokens, shard_tokens)
        return self._splits[name]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for split in self._splits.values():
                    split.finish()
                self._commit()
        finally:
            self._discard()

    def _tidy(self) -> None:
        """Undo what a killed writer left."""
        if self._replaced.exists() and not self.target.exists():
            self._replaced.rename(self.target)
        for entry in self.folder.iterdir():
            if entry.name != _LOCK:
                _remove(entry)

    def _check_target(self) -> None:
        if not self.target.exists():
            return
        if not self.overwrite:
            raise ConfigError(f"{self.target} exists; choose another folder or replace it with --overwrite")
        try:
            index = read_index(self.target)
        except ConfigError as error:
            raise ConfigError(f"--overwrite replaces prepared folders only: {error}") from None
        known = {INDEX, DOCUMENTS, _LOCK, _REPLACED, "tokenizer.json", "validation"} | {
            shard.file for shard in index.shards
        }
        for entry in sorted(self.target.iterdir()):
            if entry.name not in known:
                raise ConfigError(f"--overwrite would delete {entry}, which `prepare` did not write; move it away")

    def _commit(self) -> None:
        _sync_folder(self.folder)
        try:
            if self.overwrite and self.target.exists():
                self.target.rename(self._replaced)
            self.folder.rename(self.target)
        except BaseException:
            if self._replaced.exists():
                self._replaced.rename(self.target)
            raise
        _sync_folder(self.target.parent)
        # The next writer may be at work already, and may take the target away: nothing here may depend on it.
        (self.target / _LOCK).unlink(missing_ok=True)
        shutil.rmtree(self.target / _REPLACED, ignore_errors=True)

    def _discard(self) -> None:
        """Remove the working folder, the lock file last: whoever sees a folder without one knows it is not ours."""
        for split in self._splits.values():
            split.abandon()
        if self._lock is None:
            return
        if _is_open_at(self._lock, self.folder / _LOCK):  # not after the rename: it could be the next writer's
            for entry in self.folder.iterdir():
                if entry.name != _LOCK:
                    _remove(entry)
            (self.folder / _LOCK).unlink()
            with contextlib.suppress(OSError):  # the next writer is in it already
                self.folder.rmdir()
        os.close(self._lock)
        self._lock = None


def _lock(folder: Path, target: Path) -> int:
    """Make the working folder of `target` and hold its lock: the lock's file descriptor."""
    path = folder / _LOCK
    foreign = 0
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            names = [entry.name for entry in folder.iterdir()]
            if names and _LOCK not in names:
                foreign += 1  # or just renamed by its writer: look again
                if foreign > 5:
                    raise ConfigError(f"{folder} is in the way: `prepare` did not write it and works there; move it")
                time.sleep(0.05)
                continue
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its writer has just finished and renamed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 1000, 0).decode() or "another process"
            os.close(lock)
            raise ConfigError(f"{target} is being written by {holder}; wait for it or choose another folder") from None
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"{folder.parent} has no file locks ({error.strerror}); write to a local disk") from None
        if _is_open_at(lock, path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)
            return lock
        os.close(lock)  # locked the file of a writer that finished in between


def _is_open_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
