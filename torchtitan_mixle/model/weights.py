"""The same weights under three conventions: ours, mixle's and GPT-2's in Hugging Face `transformers`.

                  ours                          mixle                      GPT-2 (behind "transformer.")
    fused qkv     attn.wqkv, head by head       attn.qkv, [q | k | v]      attn.c_attn, [q | k | v], transposed
    linear        weight (out, in)              weight (out, in)           Conv1D's weight (in, out)
    tied matrix   tok.weight and head.weight    the same two               wte.weight alone
    muP           mup_output_multiplier         the same                   folded into ln_f and q

This is the one place that knows both row orders of the fused qkv.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.metrics.counting import ModelShape

MULTIPLIER = "mup_output_multiplier"
GPT2_PREFIX = "transformer."

_MIXLE_QKV = re.compile(r"(blocks\.\d+\.attn)\.qkv\.(weight|bias)")
_OUR_QKV = re.compile(r"(blocks\.\d+\.attn)\.wqkv\.(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_GPT2_MODULES = {
    "ln1": "ln_1",
    "ln2": "ln_2",
    "attn.wqkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.0": "mlp.c_fc",
    "mlp.2": "mlp.c_proj",
}
_GPT2_NAMES = {
    "tok.weight": "wte.weight",
    "pos.weight": "wpe.weight",
    "ln.weight": "ln_f.weight",
    "ln.bias": "ln_f.bias",
    "head.weight": "wte.weight",
}


@dataclass(frozen=True)
class GPT2Form:
    """What a weight's GPT-2 form depends on beside the weight.

    GPT-2 has no muP flags. Their factors go into the weights next to them, so that the logits are the same: the factor
    on the logits into the final LayerNorm, the missing 1/sqrt(head_dim) of the scores into the rows of q.
    """

    n_head: int
    mup_attention: bool = False
    mup_output_multiplier: float = 1.0


def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every entry of our state dict, in the model's order, with its shape."""
    d = shape.d_model
    shapes: dict[str, tuple[int, ...]] = {MULTIPLIER: (), "tok.weight": (shape.vocab_size, d)}
    shapes["pos.weight"] = (shape.block, d)
    for i in range(shape.n_layer):
        block = f"blocks.{i}"
        for norm in ("ln1", "ln2"):
            shapes |= {f"{block}.{norm}.weight": (d,), f"{block}.{norm}.bias": (d,)}
        for linear, out, into in (
            ("attn.wqkv", 3 * d, d),
            ("attn.proj", d, d),
            ("mlp.0", 4 * d, d),
            ("mlp.2", d, 4 * d),
        ):
            shapes |= {f"{block}.{linear}.weight": (out, into), f"{block}.{linear}.bias": (out,)}
    return shapes | {"ln.weight": (d,), "ln.bias": (d,), "head.weight": (shape.vocab_size, d)}


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, where: str, remedy: str
) -> None:
    """Raise ConfigError with the names of what is missing, of what is too much, and of what has another shape."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"lacks {_some(missing)}")
    if extra := [name for name in found if name not in expected]:
        problems.append(f"has {_some(extra)}, which this model does not")
    differing = [
        f"{name} {tuple(found[name])} instead of {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    if differing:
        problems.append(f"has {_some(differing)}")
    if problems:
        raise ConfigError(f"{where} {', and '.join(problems)}; {remedy}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def qkv_to_wqkv(qkv: Tensor, n_head: int) -> Tensor:
    """Rows [all q | all k | all v] -> [head 0: q k v | head 1: q k v | ...]; a weight (3d, d) or a bias (3d,)."""
    head_dim = _head_dim(qkv, n_head)
    return qkv.unflatten(0, (3, n_head, head_dim)).transpose(0, 1).flatten(0, 2).contiguous()


def wqkv_to_qkv(wqkv: Tensor, n_head: int) -> Tensor:
    """The inverse of `qkv_to_wqkv`."""
    head_dim = _head_dim(wqkv, n_head)
    return wqkv.unflatten(0, (n_head, 3, head_dim)).transpose(0, 1).flatten(0, 2).contiguous()


def mixle_name(name: str) -> str:
    """mixle's name of one of our weights."""
    return _OUR_QKV.sub(r"\1.qkv.\2", name)


def mixle_tensor(name: str, value: Tensor, n_head: int) -> Tensor:
    """Our weight `name` in mixle's row order."""
    return wqkv_to_qkv(value, n_head) if _OUR_QKV.fullmatch(name) else value


def tensor_of_mixle(name: str, value: Tensor, n_head: int) -> Tensor:
    """The inverse of `mixle_tensor`; `name` is ours."""
    return qkv_to_wqkv(value, n_head) if _OUR_QKV.fullmatch(name) else value


def from_mixle(state_dict: Mapping[str, Tensor], n_head: int) -> dict[str, Tensor]:
    """A mixle CausalLM's state dict under our names and row order."""
    ours = {_MIXLE_QKV.sub(r"\1.wqkv.\2", name): value for name, value in state_dict.items()}
    return {name: tensor_of_mixle(name, value, n_head) for name, value in ours.items()}


def to_mixle(state_dict: Mapping[str, Tensor], n_head: int) -> dict[str, Tensor]:
    """Our state dict under mixle's names and row order."""
    return {mixle_name(name): mixle_tensor(name, value, n_head) for name, value in state_dict.items()}


def gpt2_name(name: str) -> str | None:
    """GPT-2's name of one of our weights, without "transformer."; None for the multiplier, which GPT-2 lacks."""
    if name in _GPT2_NAMES or name == MULTIPLIER:
        return _GPT2_NAMES.get(name)
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _GPT2_MODULES:
        raise KeyError(f"{name!r} is not a weight of the CausalLM")
    return f"h.{block[1]}.{_GPT2_MODULES[block[2]]}.{block[3]}"


def gpt2_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a GPT-2 of this size by its name without "transformer.", in the model's order."""
    shapes = {gpt2_name(name): s[::-1] if is_turned(name) else s for name, s in weight_shapes(shape).items()}
    return {name: s for name, s in shapes.items() if name is not None}


def is_turned(name: str) -> bool:
    """Whether GPT-2 has our weight `name` transposed: all matrices but the two tables (and the head, which is one)."""
    return name.startswith("blocks.") and name.endswith(".weight") and ".ln" not in name


def gpt2_tensor(name: str, value: Tensor, form: GPT2Form) -> Tensor:
    """Our weight `name` as GPT-2 has it."""
    if _OUR_QKV.fullmatch(name):
        value = wqkv_to_qkv(value, form.n_head)
        if form.mup_attention:
            value = _with_scaled_q(value, 1 / math.sqrt(_head_dim(value, form.n_head)))
    elif name.startswith("ln.") and form.mup_output_multiplier != 1:
        value = value * form.mup_output_multiplier
    return value.t().contiguous() if is_turned(name) else value


def tensor_of_gpt2(name: str, value: Tensor, form: GPT2Form) -> Tensor:
    """The inverse of `gpt2_tensor`; `name` is ours."""
    if is_turned(name):
        value = value.t().contiguous()
    if _OUR_QKV.fullmatch(name):
        if form.mup_attention:
            value = _with_scaled_q(value, math.sqrt(_head_dim(value, form.n_head)))
        return qkv_to_wqkv(value, form.n_head)
    if name.startswith("ln.") and form.mup_output_multiplier != 1:
        return value / form.mup_output_multiplier
    return value


def _with_scaled_q(qkv: Tensor, factor: float) -> Tensor:
    """The first third of the rows times `factor`."""
    q, kv = qkv.tensor_split([qkv.shape[0] // 3])
    return torch.cat([q * factor, kv])


def _head_dim(fused: Tensor, n_head: int) -> int:
    head_dim, rest = divmod(fused.shape[0], 3 * n_head)
    if rest:
        raise ConfigError(f"a fused qkv of {fused.shape[0]} rows does not hold q, k and v of n_head={n_head} heads")
    return head_dim
