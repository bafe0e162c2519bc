"""Parameters and FLOPs of the CausalLM in closed form. Plain integers: no torch here."""

from collections.abc import Sequence
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


def recomputed_blocks(mode: str, option: str, blocks_by_rank: Sequence[int]) -> int | None:
    """Blocks whose forward pass runs again for the backward pass; None where the compiler alone decides which.

    `mode` and `option` are TorchTitan's activation_checkpoint.mode and .selective_ac_option. Every n-th block is
    counted on each pipeline rank by itself, over all the blocks it has. By op ("op") no matrix product runs again.
    """
    if mode == "none" or (mode == "selective" and option == "op"):
        return 0
    if mode == "full":
        return sum(blocks_by_rank)
    if mode == "selective":
        return sum(blocks // int(option) for blocks in blocks_by_rank)
    return None


def recomputed_flops_per_token(
    shape: ModelShape,
    seq_len: int,
    *,
    mode: str,
    option: str = "op",
    without_last_product: bool = False,
    blocks_by_rank: Sequence[int] | None = None,
) -> int | None:
    """FLOPs per trained token that activation checkpointing adds; None where the compiler alone decides.

    A block's forward pass is 24 d^2 for its linear layers and 4 d T for attention. Recomputation can leave out the
    block's last product (8 d^2), whose result no gradient needs. What a fused attention kernel's backward pass computes
    again inside is not counted, as it is not in published figures.
    """
    blocks = recomputed_blocks(mode, option, blocks_by_rank or [shape.n_layer])
    if blocks is None:
        return None
    d = shape.d_model
    return blocks * ((16 if without_last_product else 24) * d * d + 4 * d * seq_len)
