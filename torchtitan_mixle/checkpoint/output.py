"""Outputs that are there whole or not at all, and never in the place of something else unless asked."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_mixle.checkpoint.reader import first_line
from torchtitan_mixle.errors import ConfigError


def check_target(target: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    """Raise ConfigError if something is at `target` that may not be replaced."""
    if not target.name:
        raise ConfigError(f"{target} cannot be written; name a file or folder in it")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ConfigError(f"{target} exists; give --overwrite to replace it, or another --out")
    if not is_ours(target):
        raise ConfigError(f"{target} is nothing that this command writes, so it is not replaced; give another --out")


@contextlib.contextmanager
def whole(target: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A path beside `target` to write a file or folder at; it takes the target's name when the block ends well.

    What was at the target stays until then. A block that fails leaves nothing behind.
    """
    check_target(target, overwrite=overwrite, is_ours=is_ours)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            yield partial
            _sync(partial)
            # Another process may have made the target in the meantime.
            check_target(target, overwrite=overwrite, is_ours=is_ours)
            _replace(partial, target)
        finally:
            _remove(partial)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    except (RuntimeError, SafetensorError, CheckpointException) as error:  # what a full disk is to torch and the others
        raise ConfigError(f"cannot write {target}: {first_line(error)}") from error


def _replace(partial: Path, target: Path) -> None:
    """Give `partial` the target's name; a folder cannot replace one in one step, so the old one steps aside first."""
    if not (target.is_dir() and not target.is_symlink()) and not partial.is_dir():
        partial.replace(target)
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}.replaced")
    if os.path.lexists(target):
        target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        if os.path.lexists(aside):
            aside.rename(target)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring what was written to the disk before the name says that it is whole."""
    for file in [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
