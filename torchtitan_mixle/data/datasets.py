"""The values of `training.dataset` and `validation.dataset`, and what opens each."""

import difflib
from functools import lru_cache
from typing import Literal

from torchtitan.hf_datasets.text_datasets import DATASETS as HF_DATASETS

from torchtitan_mixle.data.corpus import python_stdlib
from torchtitan_mixle.data.source import TokenSource
from torchtitan_mixle.data.store import TokenStore
from torchtitan_mixle.errors import ConfigError

PYTHON_STDLIB = "python_stdlib"
TOKENS = "tokens"


def check_dataset_name(dataset: str, *, key: str) -> None:
    """Raise ConfigError unless `dataset` is one of ours or a Hugging Face data set that TorchTitan knows."""
    known = [PYTHON_STDLIB, TOKENS, *HF_DATASETS]
    if dataset not in known:
        near = difflib.get_close_matches(dataset, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{key}={dataset!r} is unknown; {hint}use one of {', '.join(known)}")


def is_token_source(dataset: str) -> bool:
    """Whether the data set is a token stream of ours, not a Hugging Face text data set."""
    return dataset in (PYTHON_STDLIB, TOKENS)


@lru_cache(maxsize=4)
def open_source(dataset: str, path: str | None, split: Literal["train", "validation"]) -> TokenSource:
    """The token stream of `training.dataset` (split "train") or `validation.dataset` (split "validation")."""
    if dataset == PYTHON_STDLIB:
        return python_stdlib(split)
    if path is None:
        section = "training" if split == "train" else "validation"
        raise ConfigError(
            f'{section}.dataset="tokens" needs {section}.dataset_path: a folder that `torchtitan-mixle prepare` made'
        )
    return TokenStore.open(path)
