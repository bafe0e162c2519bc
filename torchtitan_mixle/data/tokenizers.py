"""Text to token ids and back: bytes, or a tokenizer.json of the Hugging Face `tokenizers` library, given or trained."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from torchtitan_mixle.data.index import TokenFormat, read_index
from torchtitan_mixle.errors import ConfigError

TOKENIZER_JSON = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
USUAL_EOD_TOKENS = (END_OF_TEXT, "</s>", "<eos>")
MIN_BPE_VOCAB = 257  # the bytes and the end-of-document token

Ids = npt.NDArray[Any]
"""(n,) integers in [0, V)."""


class Tokenizer(ABC):
    """Text of documents to ids; the end-of-document id between documents is added by whoever lays them end to end."""

    kind: ClassVar[str]
    any_bytes: ClassVar[bool] = False
    """Whether it takes `bytes` that are no UTF-8 text too."""
    vocab_size: int
    eod_id: int
    hash: str

    @property
    def format(self) -> TokenFormat:
        return TokenFormat(self.vocab_size, self.eod_id, self.kind, self.hash)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """The ids of each text, with nothing added in front or behind."""

    @abstractmethod
    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids, without special tokens; what is no UTF-8 (cut characters) becomes U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what `open_tokenizer` needs into a prepared folder."""


class ByteTokenizer(Tokenizer):
    """A byte is its own id, 256 ends a document."""

    kind = "bytes"
    any_bytes = True
    vocab_size = 257
    eod_id = 256
    hash = "bytes"

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        return [np.frombuffer(t.encode() if isinstance(t, str) else t, dtype=np.uint8) for t in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        array = np.asarray(ids, dtype=np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to write: the index says "bytes"."""


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. Special tokens spelled out in a text are text, so only true document ends get the eod id."""

    kind = TOKENIZER_JSON

    def __init__(self, content: bytes, eod_id: int) -> None:
        self.content = content
        self.eod_id = eod_id
        self.hash = hashlib.sha256(content).hexdigest()
        self._inner = _load(content)
        # Not their number: ids may have gaps.
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        strings = [t if isinstance(t, str) else t.decode() for t in texts]
        # Without the offsets of each token, which cost a third of the time.
        encodings = self._inner.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._inner.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_JSON).write_bytes(self.content)


def _load(content: bytes) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer.from_buffer(content)
    # Many published files ask for truncation to their model's length, which would cut documents.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return inner


def load_tokenizer(path: str | Path, *, eod_token: str | None = None) -> JsonTokenizer:
    """A tokenizer.json, or the one in a folder. Without `eod_token` the usual names of such a token are tried.

    Raises ConfigError if there is no such file, it is not a tokenizer, or has no end-of-document token.
    """
    file = Path(path).expanduser()
    file = file / TOKENIZER_JSON if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer at {file}; give a tokenizer.json or a folder that holds one")
    content = file.read_bytes()
    try:
        inner = _load(content)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file} is not a tokenizer.json that `tokenizers` can read: {error}") from None
    names = [eod_token] if eod_token is not None else list(USUAL_EOD_TOKENS)
    for name in names:
        eod_id = inner.token_to_id(name)
        if eod_id is not None:
            return JsonTokenizer(content, eod_id)
    special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
    raise ConfigError(
        f"{file} has no token {' or '.join(names)} to end documents with; name one with --eod-token, "
        f"its special tokens are: {', '.join(special[:50]) or 'none, so any token that no text holds'}"
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Byte-level BPE: no text is unknown, "<|endoftext|>" ends documents. Short texts may yield fewer than V ids."""
    if vocab_size < MIN_BPE_VOCAB:
        raise ConfigError(f"a BPE vocabulary of {vocab_size} is too small: its 256 bytes and {END_OF_TEXT} need 257")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return JsonTokenizer(inner.to_str().encode(), eod_id=inner.get_vocab()[END_OF_TEXT])


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that a prepared folder was made with. Raises ConfigError if it is not there any more."""
    path = Path(folder).expanduser()
    tokens = read_index(path).tokens
    if tokens.kind == ByteTokenizer.kind:
        return ByteTokenizer()
    file = path / TOKENIZER_JSON
    if tokens.kind != JsonTokenizer.kind:
        raise ConfigError(f"{path} was made with an unknown kind of tokenizer, {tokens.kind!r}; prepare it again")
    if not file.is_file():
        raise ConfigError(f"{file} is missing; copy the prepared folder again, with its tokenizer")
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != tokens.hash:
        raise ConfigError(f"{file} is not the tokenizer that the tokens were made with; copy the folder again")
    return JsonTokenizer(content, tokens.eod_id)
