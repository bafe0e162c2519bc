"""Parameters and FLOPs of the CausalLM in closed form. Plain integers: no torch here."""

from dataclasses import dataclass
from typing import Protocol


class ModelShape(Protocol):
    """Anything with the five numbers: a Flavor, the model's args."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def block(self) -> int: ...


def count_parameters(shape: ModelShape) -> int:
    """Trainable parameters, the tied matrix once.

    Per block 12 d^2 (qkv 3, proj 1, MLP 8) and 13 d of biases and norms (qkv 3, proj 1, MLP 4 + 1, two LayerNorms 4);
    then the final LayerNorm, the token matrix V d and the position table P d.
    """
    d = shape.d_model
    per_block = 12 * d * d + 13 * d
    return shape.n_layer * per_block + 2 * d + (shape.vocab_size + shape.block) * d


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward and backward FLOPs per token by part; a multiply-add is two, the backward pass twice the forward."""

    blocks: int
    """Matrix products of qkv, proj and the MLP: 6 * 12 L d^2."""
    head: int
    """The tied head, once: 6 V d. The embedding lookup costs nothing."""
    attention: int
    """Scores and weighted sum over the whole T x T square: 12 L d T (PaLM, appendix B; causality not credited)."""

    @property
    def total(self) -> int:
        """The convention of published MFU figures."""
        return self.blocks + self.head + self.attention

    @property
    def causal_total(self) -> float:
        """With only the (T + 1) / 2 keys that a causal query sees on average, rounded to half the square."""
        return self.blocks + self.head + self.attention / 2


def flops_per_token(shape: ModelShape, seq_len: int) -> FlopsPerToken:
    """FLOPs per trained token at sequence length `seq_len`."""
    d, layers = shape.d_model, shape.n_layer
    return FlopsPerToken(
        blocks=72 * layers * d * d,
        head=6 * shape.vocab_size * d,
        attention=12 * layers * d * seq_len,
    )
