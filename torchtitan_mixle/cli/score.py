"""`torchtitan-mixle score`: loss and perplexity of a data set under a checkpoint."""

import json
import math
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import track

from torchtitan_mixle.cli.options import NOTHING_SAID, AboutModel, Flag
from torchtitan_mixle.errors import ConfigError


def score(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    /,
    dataset: str | None = None,
    dataset_path: str | None = None,
    split: Literal["train", "validation"] = "validation",
    seq_len: int | None = None,
    batch_size: int = 8,
    samples: int | None = None,
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    about: AboutModel = NOTHING_SAID,
) -> None:
    """Mean loss over all tokens of a data set, what the trainer reports with validation.steps = -1.

    Every token but the first is predicted once, from those before it in its window of SEQ_LEN tokens.

    Args:
        checkpoint: The step-N folder of a run of any layout, or an imported checkpoint.
        dataset: "python_stdlib" or "tokens"; unset: the run's validation data.
        dataset_path: A folder made by prepare.
        split: Which part of python_stdlib.
        seq_len: Tokens in a window; unset: as in the run's validation, else the longest the model takes.
        batch_size: Windows at once.
        samples: Stop after that many windows; unset: all.
        as_json: Print one JSON object instead of a sentence.
        about: What the weights do not say.
        device: Where to compute; unset: the accelerator if there is one, else the CPU.
        dtype: What to hold the weights and compute in.
    """
    for name, value in {"--batch-size": batch_size, "--samples": samples, "--seq-len": seq_len}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    from torchtitan_mixle.checkpoint.load import load_model, open_checkpoint
    from torchtitan_mixle.checkpoint.texts import open_data
    from torchtitan_mixle.data.loader import ValidationSamples
    from torchtitan_mixle.model.score import mean_loss

    weights, record = open_checkpoint(checkpoint, **vars(about))
    length = seq_len or min(record.data.seq_len or record.block, record.block)
    if length > record.block:
        raise ConfigError(f"--seq-len {length}: must be at most the {record.block} rows of the position table")
    source = open_data(record, dataset, dataset_path, split)
    windows = ValidationSamples(source, seq_len=length, vocab_size=record.vocab_size)
    count = windows.n if samples is None else min(samples, windows.n)
    model = load_model(weights, record, device=device, dtype=dtype)
    starts = track(range(0, count, batch_size), description="scoring", console=Console(stderr=True))
    loss, tokens = mean_loss(model, (windows.__getitems__(list(range(i, min(i + batch_size, count)))) for i in starts))
    if not math.isfinite(loss):
        raise ConfigError(
            f"the loss of {source.name} is {loss}: weights of {checkpoint} are not finite, or too large for the dtype; "
            f"use an earlier step, or --dtype float32"
        )
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if as_json:
        print(json.dumps({"loss": loss, "perplexity": perplexity, "tokens": tokens, "seq_len": length}))
    else:
        print(f"{source.name}: loss {loss:.6f}, perplexity {perplexity:.4f}, over {tokens} tokens (seq_len {length})")
