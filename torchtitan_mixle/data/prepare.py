"""The work behind `torchtitan-mixle prepare`: files of text to a prepared folder, in constant memory.

A tokenizer sees a document in one piece up to 256 KiB. Longer ones reach it in pieces that end at line ends (at
character ends where a line is longer), so a token never spans such an end, and a tokenizer that puts a space in front
of its input does so for each piece. Bytes do not depend on pieces.
"""

import gzip
import hashlib
import io
import json
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchtitan_mixle.data.tokenizers import MIN_BPE_VOCAB, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from torchtitan_mixle.data.writer import DEFAULT_SHARD_TOKENS, SplitWriter, StoreWriter
from torchtitan_mixle.errors import ConfigError

PIECE_BYTES = 2**18
BATCH_BYTES = 2**22  # what is tokenized at once, on all cores; `tokenizers` needs about 100 bytes for each token of it
MAX_LINE_BYTES = 2**26
BPE_SAMPLE_CHARACTERS = 2**28  # more text hardly changes the merges, and the words of this much fit in memory
VALIDATION = "validation"


@dataclass(frozen=True)
class Piece:
    """Text of one document, or the bytes of it for a tokenizer that takes any; `last` ends the document."""

    text: str | bytes
    last: bool


class Inputs:
    """Files in the order given, folders as all the files below them by name; hidden ones are left out.

    Listed anew on each pass instead of kept, so that millions of files cost no memory.
    Raises ConfigError for what does not exist, and where there is no file at all.
    """

    def __init__(self, paths: Sequence[Path], *, text_key: str) -> None:
        self.paths = [Path(path).expanduser() for path in paths]
        self.text_key = text_key
        for path in self.paths:
            if not path.exists():
                raise ConfigError(f"input {path} does not exist; give files or folders of text or .jsonl")
        self.total_bytes = 0
        n_files = 0
        for file in self.files():
            self.total_bytes += file.stat().st_size
            n_files += 1
        if not n_files:
            given = ", ".join(map(str, self.paths)) or "nothing"
            raise ConfigError(f"no input files in {given}; give files or folders of text or .jsonl")

    def files(self) -> Iterator[Path]:
        for path in self.paths:
            yield from _walk(path, above=())

    def pieces(self, meter: "Meter", *, any_bytes: bool) -> Iterator[Piece]:
        """Every document, piece by piece. Raises ConfigError for what cannot be read, naming file and place."""
        done = 0
        for path in self.files():
            with _reading(path) as (raw, file):
                if path.name.removesuffix(".gz").endswith(".jsonl"):
                    pieces = _jsonl_pieces(file, path, self.text_key)
                else:
                    pieces = _text_pieces(file, path, any_bytes=any_bytes)
                for piece in pieces:
                    meter.bytes_read = done + raw.tell()
                    yield piece
                done += raw.tell()


def _walk(path: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise ConfigError(f"input {path} is neither a file nor a folder (a broken link?); remove it")
    real = path.resolve()
    if real in above:
        raise ConfigError(f"input {path} links to a folder above it, which has no end; remove the link")
    for entry in sorted(path.iterdir()):
        if not entry.name.startswith("."):
            yield from _walk(entry, (*above, real))


@contextmanager
def _reading(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file, and its content: another one if it is compressed."""
    with path.open("rb") as raw:
        if path.suffix != ".gz":
            yield raw, raw
            return
        try:
            with gzip.open(raw) as content:
                yield raw, cast(BinaryIO, content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} is not a whole gzip file ({error}); compress it again") from None


def _text_pieces(file: BinaryIO, path: Path, *, any_bytes: bool) -> Iterator[Piece]:
    """One document, at most two pieces of it in memory."""
    offset = 0
    data = file.read(PIECE_BYTES)
    while more := file.read(PIECE_BYTES):
        cut = data.rfind(b"\n") + 1 or _end_of_characters(data)
        yield Piece(data[:cut] if any_bytes else _decode(data[:cut], path, offset), last=False)
        offset += cut
        data = data[cut:] + more
    yield Piece(data if any_bytes else _decode(data, path, offset), last=True)


def _end_of_characters(data: bytes) -> int:
    """Where the last whole UTF-8 character of `data` ends."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0b11000000:  # begins a character of 2, 3 or 4 bytes
            size = 2 + (byte >= 0b11100000) + (byte >= 0b11110000)
            return len(data) - back if size > back and back < len(data) else len(data)
        if byte < 0b10000000:
            break
    return len(data)


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: the byte 0x{data[error.start]:02x} at offset {offset + error.start} is not UTF-8; convert the "
            f"file or take its bytes with --bytes"
        ) from None


def _jsonl_pieces(file: BinaryIO, path: Path, text_key: str) -> Iterator[Piece]:
    """A document per line; blank lines are none."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{path}, line {number} is over {MAX_LINE_BYTES} bytes; make that text a file of its own")
        if line.isspace():
            continue
        text = _text_of(line, text_key, f"{path}, line {number}")
        if len(text) <= PIECE_BYTES // 4:  # a character has up to 4 bytes
            yield Piece(text, last=True)
        else:
            yield from _text_pieces(io.BytesIO(text.encode()), path, any_bytes=False)


def _text_of(line: bytes, text_key: str, where: str) -> str:
    try:
        table = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); repair or remove the line") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a JSON object but {_shown(table)}; write {{{json.dumps(text_key)}: ...}}")
    if text_key not in table:
        keys = ", ".join(map(repr, list(table)[:20])) or "none"
        raise ConfigError(f"{where} has no key {text_key!r} (its keys: {keys}); name the text's key with --text-key")
    text = table[text_key]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {text_key!r} is {_shown(text)}, not a string; name the text's key with --text-key")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds half a surrogate pair (character {error.start}); repair the line") from None
    return text


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


class Meter:
    """Where the work stands: a moving bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, what: str, total_bytes: int, console: Console) -> None:
        self.what = what
        self.total_bytes = total_bytes
        self.bytes_read = 0
        self.tokens = 0
        self.console = console
        self._start = self._shown_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total_bytes, tokens=0)

    def __enter__(self) -> "Meter":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.update(self._task, completed=self.bytes_read, tokens=self.tokens)
        self._bar.stop()

    def tick(self) -> None:
        now = time.monotonic()
        if self.console.is_terminal:
            self._bar.update(self._task, completed=self.bytes_read, tokens=self.tokens)
        elif now - self._shown_at >= 30:
            self._shown_at = now
            left = (now - self._start) * (self.total_bytes / max(1, self.bytes_read) - 1)
            share = f"{self.bytes_read / 2**20:,.0f} of {self.total_bytes / 2**20:,.0f} MiB"
            print(
                f"{self.what}: {share}, {self.tokens:,} tokens, {max(0, left):,.0f} s left",
                file=self.console.file,
                flush=True,
            )


@dataclass(frozen=True)
class Split:
    folder: Path
    documents: int
    tokens: int
    shards: int
    size_bytes: int


@dataclass(frozen=True)
class Prepared:
    """What came out, for the summary."""

    vocab_size: int
    train: Split
    validation: Split | None
    validation_fraction: float

    def describe(self) -> str:
        lines = [_describe("train", self.train)]
        if self.validation is not None:
            lines.append(_describe(VALIDATION, self.validation))
        elif self.validation_fraction > 0:
            lines.append(
                f"no {VALIDATION} split: whole documents are drawn for it, and none of {self.train.documents:,} was at "
                f"--validation-fraction {self.validation_fraction}; give more documents, not one large one"
            )
        lines += [f"vocabulary: V={self.vocab_size}", "", "To train on it:", *_toml("training", self.train)]
        if self.validation is not None:
            lines += _toml(VALIDATION, self.validation)
        return "\n".join(lines)


def _describe(name: str, split: Split) -> str:
    size = f"{split.shards} shard{'s' * (split.shards != 1)}, {split.size_bytes / 2**20:,.1f} MiB"
    return f"{name}: {split.documents:,} documents, {split.tokens:,} tokens, {size} in {split.folder}"


def _toml(section: str, split: Split) -> list[str]:
    path = json.dumps(str(split.folder), ensure_ascii=False)  # a TOML string has the same escapes
    return [f"[{section}]", 'dataset = "tokens"', f"dataset_path = {path}"]


def prepare_tokens(
    inputs: Sequence[Path],
    out: Path,
    *,
    byte_level: bool = False,
    tokenizer: Path | None = None,
    bpe_vocab_size: int | None = None,
    eod_token: str | None = None,
    validation_fraction: float = 0.0,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    overwrite: bool = False,
    text_key: str = "text",
    console: Console | None = None,
) -> Prepared:
    """Tokenize `inputs` into the prepared folder `out`, which is there afterwards as a whole or not at all.

    Exactly one of byte_level, tokenizer (a tokenizer.json or its folder) and bpe_vocab_size (train one on the inputs).
    Raises ConfigError for every mistake in the request or the inputs, and where the disk refuses.
    """
    _check_request(byte_level, tokenizer, bpe_vocab_size, eod_token, validation_fraction, shard_tokens)
    console = console or Console(stderr=True)
    try:
        sources = Inputs(inputs, text_key=text_key)
        _keep_apart(sources.paths, out)
        with StoreWriter(out, overwrite=overwrite) as store:
            encoder: Tokenizer
            if tokenizer is not None:
                encoder = load_tokenizer(tokenizer, eod_token=eod_token)
            elif bpe_vocab_size is not None:
                encoder = _train(sources, bpe_vocab_size, console)
            else:
                encoder = ByteTokenizer()
            splits = _Splits(store, encoder, shard_tokens, validation_fraction)
            _encode(sources, encoder, splits, console)
            folder = store.target
    except OSError as error:
        raise ConfigError(f"cannot prepare {out}: {error}; see to it and start again") from error
    validation = _measured(splits.validation, folder / VALIDATION) if splits.validation is not None else None
    return Prepared(encoder.vocab_size, _measured(splits.train, folder), validation, validation_fraction)


def _check_request(
    byte_level: bool,
    tokenizer: Path | None,
    bpe_vocab_size: int | None,
    eod_token: str | None,
    validation_fraction: float,
    shard_tokens: int,
) -> None:
    if [byte_level, tokenizer is not None, bpe_vocab_size is not None].count(True) != 1:
        raise ConfigError("give exactly one of --bytes, --tokenizer PATH and --train-bpe V")
    if eod_token is not None and tokenizer is None:
        raise ConfigError(f"--eod-token {eod_token} names a token of --tokenizer, which is not given; leave it out")
    if bpe_vocab_size is not None and bpe_vocab_size < MIN_BPE_VOCAB:
        raise ConfigError(
            f"--train-bpe {bpe_vocab_size} must be at least {MIN_BPE_VOCAB}: the bytes and a document end"
        )
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"--validation-fraction {validation_fraction} must be in [0, 1), for example 0.01")
    if shard_tokens < 1:
        raise ConfigError(f"--shard-tokens {shard_tokens} must be at least 1, for example {DEFAULT_SHARD_TOKENS}")


def _keep_apart(inputs: list[Path], out: Path) -> None:
    target = Path(out).expanduser().resolve()
    for path in inputs:
        real = path.resolve()
        if target.is_relative_to(real) or real.is_relative_to(target):
            raise ConfigError(f"input {path} and output {out} lie in one another; write to a folder outside the input")


def _train(inputs: Inputs, vocab_size: int, console: Console) -> Tokenizer:
    """BPE on the inputs, or on pieces spread evenly over them that make up 2^28 characters."""
    share = min(1.0, BPE_SAMPLE_CHARACTERS / max(1, inputs.total_bytes))

    def sample() -> Iterator[str]:
        seen = kept = 0
        for piece in inputs.pieces(meter, any_bytes=False):
            meter.tick()
            seen += len(piece.text)
            if kept <= share * seen and kept < BPE_SAMPLE_CHARACTERS:
                kept += len(piece.text)
                yield cast(str, piece.text)

    with Meter("training BPE", inputs.total_bytes, console) as meter:
        return train_bpe(sample(), vocab_size)


class _Splits:
    """Sends each document to the training or the validation split."""

    def __init__(self, store: StoreWriter, encoder: Tokenizer, shard_tokens: int, fraction: float) -> None:
        self.store = store
        self.encoder = encoder
        self.shard_tokens = shard_tokens
        self.fraction = fraction
        self.train = self._writer("")
        self.validation: SplitWriter | None = None

    def _writer(self, name: str) -> SplitWriter:
        writer = self.store.split(name, tokens=self.encoder.format, shard_tokens=self.shard_tokens)
        self.encoder.save(writer.folder)
        return writer

    def writer(self, document: int) -> SplitWriter:
        """By a hash of the document's number, the same in every run. The first one trains: there is always one to."""
        digest = hashlib.blake2b(document.to_bytes(8, "little"), digest_size=8).digest()
        if document == 0 or int.from_bytes(digest, "little") >= math.ldexp(self.fraction, 64):
            return self.train
        if self.validation is None:  # not before it has a document: an empty split cannot be opened
            self.validation = self._writer(VALIDATION)
        return self.validation


def _encode(inputs: Inputs, encoder: Tokenizer, splits: _Splits, console: Console) -> None:
    writer: SplitWriter | None = None
    document = 0
    with Meter("tokenizing", inputs.total_bytes, console) as meter:
        for batch in _batches(inputs.pieces(meter, any_bytes=encoder.any_bytes)):
            for piece, ids in zip(batch, encoder.encode_batch([piece.text for piece in batch]), strict=True):
                writer = writer or splits.writer(document)
                writer.write(ids)
                meter.tokens += len(ids) + piece.last
                if piece.last:
                    writer.end_document()
                    document, writer = document + 1, None
            meter.tick()


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 100  # what an empty document costs
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _measured(writer: SplitWriter, folder: Path) -> Split:
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Split(folder, writer.n_documents, writer.n_tokens, len(writer.shards), size)
