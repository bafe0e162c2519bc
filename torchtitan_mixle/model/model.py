"""The mixle CausalLM on one device: learned positions, pre-LayerNorm, exact GELU, head tied to the embedding.

Parameter names are mixle's, with one exception: `attn.wqkv` holds the rows of mixle's `attn.qkv` in another order (see
`CausalAttention`), so it must not share the name; `model/weights.py` maps one to the other.

Nothing here knows of ranks. Tensors may be DTensors and heads may be a rank's share: sizes that a shard changes are
inferred (-1), never computed from the arguments.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchtitan.protocols.model import ModelProtocol

from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.init import init_parameters


def causal_attention(qkv: Tensor, scale: float | None) -> Tensor:
    """Each token attends to itself and to those before it: qkv (B, T, H, 3, D) -> (B, T, H, D)."""
    # Transposed one by one, so that their gradients are written once, straight into that of qkv.
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=3))  # each (B, H, T, D)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)  # (B, H, T, D)
    return o.transpose(1, 2)


class CausalAttention(nn.Module):
    """Causal multi-head attention.

    The rows of `wqkv` lie head by head, [head 0: q k v | head 1: q k v | ...], so that any contiguous share of the
    rows is whole heads and a checkpoint does not depend on how many ranks shared them.
    """

    def __init__(self, args: CausalLMArgs) -> None:
        super().__init__()
        self.head_dim = args.d_model // args.n_head
        self.scale = 1.0 / self.head_dim if args.mup_attention else None
        self.wqkv = nn.Linear(args.d_model, 3 * args.d_model)
        self.proj = nn.Linear(args.d_model, args.d_model)
        # What attends to tokens that are not all here takes this function's place.
        self.attend: Callable[[Tensor, float | None], Tensor] = causal_attention

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_len, _ = x.shape
        qkv = self.wqkv(x).view(batch, seq_len, -1, 3, self.head_dim)  # (B, T, H, 3, D)
        o = self.attend(qkv, self.scale)  # (B, T, H, D)
        return self.proj(o.reshape(batch, seq_len, -1))


class Block(nn.Module):
    """Pre-norm residual block: attention, then an MLP of four times the width."""

    def __init__(self, args: CausalLMArgs) -> None:
        super().__init__()
        d = args.d_model
        self.ln1 = nn.LayerNorm(d)
        self.ln2 = nn.LayerNorm(d)
        self.attn = CausalAttention(args)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class CausalLM(ModelProtocol):
    """Token ids (B, T) -> logits (B, T, V) at every position."""

    mup_output_multiplier: Tensor

    def __init__(self, args: CausalLMArgs) -> None:
        super().__init__(args)
        args.validate()
        self.model_args = args
        self.tok = nn.Embedding(args.vocab_size, args.d_model)
        self.pos = nn.Embedding(args.block, args.d_model)
        # A dict, not a list: a pipeline stage that keeps blocks 2 and 3 must still call them 2 and 3.
        self.blocks = nn.ModuleDict({str(i): Block(args) for i in range(args.n_layer)})
        self.ln = nn.LayerNorm(args.d_model)
        self.head = nn.Linear(args.d_model, args.vocab_size, bias=False)
        # Persistent, as in mixle: it travels with the weights through every checkpoint and conversion.
        self.register_buffer("mup_output_multiplier", torch.tensor(args.mup_output_multiplier))
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter (again): materialising or sharding replaces each by itself."""
        if self.tok is not None and self.head is not None:  # both are there unless this is a pipeline stage
            self.head.weight = self.tok.weight

    @property
    def layers(self) -> nn.ModuleDict:
        """TorchTitan's name for the blocks (its activation checkpointing looks for it)."""
        return self.blocks

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of `tokens` (B, T); `positions` (T,) or (B, T) default to 0..T-1.

        A pipeline stage lacks modules (they are None): it takes hidden states (B, T, d) where it has no embeddings and
        gives hidden states where it has no head.
        """
        x = tokens if self.tok is None else self.embed(tokens, positions)  # (B, T, d)
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return x
        # mixle scales the logits; the same factor on the head's input costs d instead of V multiplications a token.
        return self.head(self.ln(x) * self.mup_output_multiplier)

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Token and position embeddings, (B, T, d)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tok(tokens) + self.pos(positions)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill freshly materialised parameters and buffers; the result does not depend on how they are sharded."""
        self.tie_weights()
        init_parameters(self, n_layer=self.model_args.n_layer, seed=self.model_args.seed)
        device = buffer_device or self.mup_output_multiplier.device
        self.mup_output_multiplier = torch.tensor(self.model_args.mup_output_multiplier, device=device)
