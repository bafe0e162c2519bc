"""The tokenizer and the data behind a checkpoint, found again through its record."""

from pathlib import Path

from torchtitan_mixle.checkpoint.record import ModelRecord
from torchtitan_mixle.data.corpus import python_stdlib
from torchtitan_mixle.data.datasets import PYTHON_STDLIB, TOKENS
from torchtitan_mixle.data.index import INDEX
from torchtitan_mixle.data.source import TokenSource
from torchtitan_mixle.data.store import TokenStore
from torchtitan_mixle.data.tokenizers import (
    TOKENIZER_JSON,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    open_tokenizer,
)
from torchtitan_mixle.errors import ConfigError


def find_tokenizer(record: ModelRecord, given: str | None) -> Tokenizer:
    """The run's tokenizer, or the `given` one: "bytes", a tokenizer.json, or a folder with one.

    Raises ConfigError if it is not there, is not the one that the model was trained with, or has more ids than it.
    """
    tokenizer = _open(given) if given is not None else _of_run(record)
    trained_with = record.data.tokenizer
    if given is None and trained_with is not None and tokenizer.hash != trained_with:
        raise ConfigError(
            f"the tokenizer of {record.data.dataset_path} is not the one that the model was trained with: the folder "
            f"was prepared again; give that tokenizer with --tokenizer"
        )
    if tokenizer.vocab_size > record.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model has V={record.vocab_size}; give the tokenizer "
            f"that the model was trained with (--tokenizer)"
        )
    return tokenizer


def run_tokenizer(record: ModelRecord) -> tuple[Path | None, int | None]:
    """(tokenizer.json, end-of-document id) of a run whose tokenizer can be found, else Nones."""
    try:
        tokenizer = find_tokenizer(record, None)
    except ConfigError:
        return None, None
    file = Path(record.data.dataset_path or record.data.hf_assets_path or "") / TOKENIZER_JSON
    return (file if isinstance(tokenizer, JsonTokenizer) and file.is_file() else None), tokenizer.eod_id


def open_data(record: ModelRecord, dataset: str | None, path: str | None, split: str) -> TokenSource:
    """The token stream to score; unset: the run's own validation data. Raises ConfigError."""
    if dataset is None and path is not None:
        dataset = TOKENS
    if dataset is None:
        dataset, path = record.data.validation_dataset, record.data.validation_path
        if dataset is None:
            raise ConfigError(
                "the run behind the checkpoint had no validation data; give --dataset python_stdlib, or "
                "--dataset-path with a folder that `torchtitan-mixle prepare` made"
            )
    if dataset == PYTHON_STDLIB:
        source: TokenSource = python_stdlib(split)
    elif dataset == TOKENS:
        if path is None:
            raise ConfigError('--dataset "tokens" needs --dataset-path')
        source = TokenStore.open(path)
    else:
        raise ConfigError(f"--dataset {dataset!r}: use {PYTHON_STDLIB} or {TOKENS}, which have an end")
    trained_with = record.data.tokenizer
    if trained_with not in (None, source.tokenizer):
        raise ConfigError(
            f"{source.name} was not made with the tokenizer that the model was trained with; prepare it with that one"
        )
    source.check_ids(record.vocab_size)
    if source.n_tokens < 2:
        raise ConfigError(f"{source.name} has {source.n_tokens} tokens, and a loss needs 2: an input and its label")
    return source


def _open(given: str) -> Tokenizer:
    if given == ByteTokenizer.kind:
        return ByteTokenizer()
    if (Path(given).expanduser() / INDEX).is_file():
        return open_tokenizer(given)
    return load_tokenizer(given)


def _of_run(record: ModelRecord) -> Tokenizer:
    data = record.data
    if data.dataset == PYTHON_STDLIB:
        return ByteTokenizer()
    if data.dataset == TOKENS and data.dataset_path is not None:
        return open_tokenizer(data.dataset_path)
    if data.dataset is not None and data.hf_assets_path is not None:
        return load_tokenizer(data.hf_assets_path)
    raise ConfigError(
        'nothing beside the checkpoint says what its tokenizer was; give --tokenizer with "bytes", a tokenizer.json or '
        "a prepared folder"
    )
