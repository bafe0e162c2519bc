"""`torchtitan-mixle generate`: text from a checkpoint."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from torchtitan_mixle.cli.options import NOTHING_SAID, AboutModel, Flag
from torchtitan_mixle.errors import ConfigError


def generate(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    /,
    prompt: str,
    n: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    no_cache: Flag = False,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    about: AboutModel = NOTHING_SAID,
) -> None:
    """Continue a text with a trained model, in one process; stdout gets the prompt and what follows.

    Args:
        checkpoint: The step-N folder of a run of any layout, or an imported checkpoint.
        prompt: Text to continue; "" begins a document.
        n: Tokens to add; the end of the document ends it earlier.
        temperature: Of the draw; 0 takes the likeliest token.
        top_k: Draw among the likeliest k tokens alone.
        seed: Of the draws.
        no_cache: Compute every token's keys and values anew for each token: the same text, slower.
        tokenizer: "bytes", a tokenizer.json or a prepared folder; unset: the run's.
        about: What the weights do not say.
        device: Where to compute; unset: the accelerator if there is one, else the CPU.
        dtype: What to hold the weights and compute in.
    """
    _check(n, temperature, top_k, seed)
    from torchtitan_mixle.checkpoint.load import load_model, open_checkpoint
    from torchtitan_mixle.checkpoint.texts import find_tokenizer
    from torchtitan_mixle.model.generate import generate as continue_ids

    weights, record = open_checkpoint(checkpoint, **vars(about))
    tokens = find_tokenizer(record, tokenizer)
    ids = tokens.encode_batch([_text(prompt, any_bytes=tokens.any_bytes)])[0].tolist() or [tokens.eod_id]
    model = load_model(weights, record, device=device, dtype=dtype)
    made: list[int] = []
    shown = tokens.decode(ids)
    print(shown, end="", flush=True)
    for token in continue_ids(
        model,
        ids,
        n,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        n_ids=tokens.vocab_size,
        cache=not no_cache,
    ):
        if token == tokens.eod_id:
            break
        made.append(token)
        text = tokens.decode(ids + made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character of which a part is still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokens.decode(ids + made)[len(shown) :])
    sys.stdout.flush()


def _text(prompt: str, *, any_bytes: bool) -> str | bytes:
    """The prompt, or the bytes behind it where the shell's words were no UTF-8 (Python keeps them as surrogates)."""
    try:
        prompt.encode()
        return prompt
    except UnicodeEncodeError:
        pass
    try:
        raw = os.fsencode(prompt)
    except UnicodeEncodeError:
        any_bytes = False
    if not any_bytes:
        raise ConfigError("--prompt is not UTF-8, and the tokenizer takes text alone; convert the prompt to UTF-8")
    return raw


def _check(n: int, temperature: float, top_k: int | None, seed: int) -> None:
    if n < 1:
        raise ConfigError(f"--n {n}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature}: must be a number of at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"--top-k {top_k}: must be at least 1")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {seed}: must be between 0 and 2^63 - 1")
