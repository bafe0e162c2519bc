"""The model's hyperparameters, and the flavors as TorchTitan wants them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.nn as nn
from torchtitan.protocols.model import BaseModelArgs

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import FLAVORS, SIZES, Flavor
from torchtitan_mixle.metrics.counting import count_parameters, flops_per_token


@dataclass
class CausalLMArgs(BaseModelArgs):
    """What builds a CausalLM; defaults are the debug flavor's."""

    vocab_size: int = FLAVORS["debugmodel"].vocab_size
    d_model: int = FLAVORS["debugmodel"].d_model
    n_layer: int = FLAVORS["debugmodel"].n_layer
    n_head: int = FLAVORS["debugmodel"].n_head
    block: int = FLAVORS["debugmodel"].block
    mup_attention: bool = False
    """Scale attention scores by 1/head_dim instead of 1/sqrt(head_dim) (Tensor Programs V, table 3)."""
    mup_output_multiplier: float = 1.0
    """Factor on the logits (mixle's buffer of the same name)."""
    seed: int = 0
    """The initial weights are a function of this and of each parameter's name."""

    @classmethod
    def from_flavor(cls, flavor: Flavor) -> "CausalLMArgs":
        return cls(**asdict(flavor))

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Take over what the TOML says about the model (TorchTitan calls this before it builds the model)."""
        mixle = job_config.mixle
        for name in SIZES:
            if (value := getattr(mixle, name)) is not None:
                setattr(self, name, value)
        self.mup_attention = mixle.mup_attention
        self.mup_output_multiplier = mixle.mup_output_multiplier
        self.seed = job_config.debug.seed or 0
        self.validate()

    def validate(self) -> None:
        """Raise ConfigError unless these numbers build a model."""
        for name in SIZES:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.d_model % self.n_head:
            small = [h for h in range(1, math.isqrt(self.d_model) + 1) if self.d_model % h == 0]
            divisors = {*small, *(self.d_model // h for h in small)}
            nearest = sorted(sorted(divisors, key=lambda h: abs(h - self.n_head))[:4])
            raise ConfigError(
                f"n_head={self.n_head} must divide d_model={self.d_model}; "
                f"near it, {', '.join(map(str, nearest))} would"
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters of the whole model (tied matrix once) and FLOPs per token, attention in full."""
        return count_parameters(self), flops_per_token(self, seq_len).total


def args_of(job_config: Any) -> CausalLMArgs:
    """The model that a job's config asks for, checked."""
    args = FlavorArgs()[job_config.model.flavor]
    args.update_from_config(job_config)
    return args


class FlavorArgs(Mapping[str, CausalLMArgs]):
    """Flavor name -> fresh args: TorchTitan's trainer changes the args it is given."""

    def __init__(self, flavors: Mapping[str, Flavor] = FLAVORS) -> None:
        self._flavors = flavors

    def __getitem__(self, name: str) -> CausalLMArgs:
        if name not in self._flavors:
            raise ConfigError(f"model.flavor={name!r} is unknown; use one of {', '.join(self._flavors)}")
        return CausalLMArgs.from_flavor(self._flavors[name])

    def __contains__(self, name: object) -> bool:
        return name in self._flavors

    def __iter__(self) -> Iterator[str]:
        return iter(self._flavors)

    def __len__(self) -> int:
        return len(self._flavors)
