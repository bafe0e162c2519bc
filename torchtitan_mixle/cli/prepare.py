"""`torchtitan-mixle prepare`: text to tokens, once, before training."""

from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_mixle.cli.options import Flag
from torchtitan_mixle.data.prepare import prepare_tokens
from torchtitan_mixle.data.writer import DEFAULT_SHARD_TOKENS


def prepare(
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    out: Path,
    byte_level: Annotated[Flag, tyro.conf.arg(name="bytes")] = False,
    tokenizer: Path | None = None,
    train_bpe: int | None = None,
    eod_token: str | None = None,
    validation_fraction: float = 0.0,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    overwrite: Flag = False,
    text_key: str = "text",
) -> None:
    """Turn text into a folder of tokens for training.dataset = "tokens".

    The folder appears when it is whole: a stopped run leaves nothing under its name. Memory does not grow with the
    input. A document over 256 KiB reaches the tokenizer in pieces that end at line ends.

    Give one of --bytes, --tokenizer and --train-bpe.

    Args:
        inputs: Files, and folders with all files in them but hidden ones: a line of a .jsonl is a document, any other
            file is one document of UTF-8 text; both may end in .gz.
        out: Folder to make.
        byte_level: Take bytes as tokens: V=257, with 256 as the end of a document.
        tokenizer: A tokenizer.json of Hugging Face's `tokenizers`, or a folder with one.
        train_bpe: Train a byte-level BPE of this many tokens on (at most 2^28 characters of) the inputs.
        eod_token: The token of --tokenizer that ends a document; unset: <|endoftext|>, </s> or <eos>.
        validation_fraction: Share of the documents that goes to OUT/validation, drawn by document number.
        shard_tokens: Tokens in a file of the folder.
        overwrite: Replace OUT if it is a prepared folder, once the new one is whole.
        text_key: Key of the text in .jsonl lines.
    """
    prepared = prepare_tokens(
        inputs,
        out,
        byte_level=byte_level,
        tokenizer=tokenizer,
        bpe_vocab_size=train_bpe,
        eod_token=eod_token,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        overwrite=overwrite,
        text_key=text_key,
    )
    print(prepared.describe())
