"""The index of a prepared folder: what its other files hold.

index.json        what is told here, see `Index`
shard-00000.bin   raw little-endian ids, uint16 if V <= 65536, else uint32; laid end to end the shards are the stream
documents.bin     little-endian uint64: where each document starts, then where the last one ends
tokenizer.json    unless the tokens are bytes
validation/       in some folders: a prepared folder of its own
"""

import json
import reprlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from torchtitan_mixle.errors import ConfigError

FORMAT = "torchtitan-mixle tokens"
VERSION = 1
INDEX = "index.json"
DOCUMENTS = "documents.bin"
AGAIN = "prepare the data again with `torchtitan-mixle prepare`"

_T = TypeVar("_T", str, int, dict, list)


@dataclass(frozen=True)
class TokenFormat:
    """What the ids of a folder mean. hash: sha256 of the tokenizer.json, or "bytes"."""

    vocab_size: int
    eod_id: int
    kind: str
    hash: str

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class Shard:
    file: str
    n_tokens: int
    max_id: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The content of index.json. The shards' checksums make its hash a hash of the tokens."""

    dtype: str
    tokens: TokenFormat
    n_tokens: int
    documents: str
    """The file of document offsets, one more than there are documents."""
    n_documents: int
    shards: tuple[Shard, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1)


def read_index(folder: Path) -> Index:
    """The index of a prepared folder, consistent in itself. Raises ConfigError."""
    path = folder / INDEX
    _require_folder(folder)
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); {AGAIN}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ConfigError(f"{path} is not the index of a prepared folder (its format is not {FORMAT!r}); {AGAIN}")
    if table.get("version") != VERSION:
        raise ConfigError(f"{path} has version {table.get('version')!r}, this release reads {VERSION}; {AGAIN}")
    index = _parse(table, str(path))
    _check_index(index, str(path))
    return index


def _require_folder(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the folder that `torchtitan-mixle prepare` wrote")
    if not folder.exists():
        unfinished = working_folder(folder).exists()
        state = "is not finished: its `prepare` was stopped or still runs" if unfinished else "does not exist"
        raise ConfigError(f"{folder} {state}; make it with `torchtitan-mixle prepare`")
    if not (folder / INDEX).is_file():
        state = "is empty" if not any(folder.iterdir()) else f"has no {INDEX}, so it is not a prepared folder"
        raise ConfigError(f"{folder} {state}; make one with `torchtitan-mixle prepare`")


def _parse(table: dict[str, Any], where: str) -> Index:
    tokens = _get(table, "tokens", dict, where)
    shards = _get(table, "shards", list, where)
    return Index(
        dtype=_get(table, "dtype", str, where),
        tokens=TokenFormat(
            vocab_size=_get(tokens, "vocab_size", int, f"{where}: tokens"),
            eod_id=_get(tokens, "eod_id", int, f"{where}: tokens"),
            kind=_get(tokens, "kind", str, f"{where}: tokens"),
            hash=_get(tokens, "hash", str, f"{where}: tokens"),
        ),
        n_tokens=_get(table, "n_tokens", int, where),
        documents=_get(table, "documents", str, where),
        n_documents=_get(table, "n_documents", int, where),
        shards=tuple(_parse_shard(shard, f"{where}: shards[{i}]") for i, shard in enumerate(shards)),
    )


def _parse_shard(table: Any, where: str) -> Shard:
    return Shard(
        file=_get(table, "file", str, where),
        n_tokens=_get(table, "n_tokens", int, where),
        max_id=_get(table, "max_id", int, where),
        sha256=_get(table, "sha256", str, where),
    )


def _get(table: Any, key: str, kind: type[_T], where: str) -> _T:
    if not isinstance(table, dict) or key not in table:
        raise ConfigError(f"{where}: the key {key!r} is missing; {AGAIN}")
    value = table[key]
    if type(value) is not kind:
        raise ConfigError(f"{where}: {key} = {reprlib.repr(value)} must be of type {kind.__name__}; {AGAIN}")
    return value


def _check_index(index: Index, where: str) -> None:
    def require(holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{where}: {rule}; {AGAIN}")

    vocab_size, eod_id = index.tokens.vocab_size, index.tokens.eod_id
    require(index.dtype in ("uint16", "uint32"), f"dtype = {index.dtype!r} must be uint16 or uint32")
    room = 2 ** (8 * np.dtype(index.dtype).itemsize)
    require(1 <= vocab_size <= room, f"vocab_size = {vocab_size} must lie in 1..{room}, what {index.dtype} holds")
    require(0 <= eod_id < vocab_size, f"eod_id = {eod_id} must be below vocab_size = {vocab_size}")
    require(index.n_tokens > 0, f"n_tokens = {index.n_tokens}: there is nothing to train on")
    require(index.n_documents > 0, f"n_documents = {index.n_documents} must be at least 1")
    for file in [index.documents, *(shard.file for shard in index.shards)]:
        require(file == Path(file).name, f"the file {file!r} must be a name in the folder")
    for shard in index.shards:
        require(shard.n_tokens > 0, f"{shard.file}: n_tokens = {shard.n_tokens} must be at least 1")
        require(0 <= shard.max_id < vocab_size, f"{shard.file}: max_id = {shard.max_id} must be below {vocab_size}")
    total = sum(shard.n_tokens for shard in index.shards)
    require(total == index.n_tokens, f"n_tokens = {index.n_tokens}, but its shards sum to {total}")


def working_folder(target: Path) -> Path:
    if not target.name:
        raise ConfigError(f"{target} cannot be written as a prepared folder; name a folder in it")
    return target.with_name(f".{target.name}.partial")
