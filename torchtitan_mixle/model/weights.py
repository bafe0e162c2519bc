"""mixle's state dict <-> ours: the one place that knows both row orders of the fused qkv."""

import re
from collections.abc import Mapping

from torch import Tensor

from torchtitan_mixle.errors import ConfigError

_MIXLE_QKV = re.compile(r"(blocks\.\d+\.attn)\.qkv\.(weight|bias)")
_OUR_QKV = re.compile(r"(blocks\.\d+\.attn)\.wqkv\.(weight|bias)")


def qkv_to_wqkv(qkv: Tensor, n_head: int) -> Tensor:
    """Rows [all q | all k | all v] -> [head 0: q k v | head 1: q k v | ...]; a weight (3d, d) or a bias (3d,)."""
    head_dim = _head_dim(qkv, n_head)
    return qkv.unflatten(0, (3, n_head, head_dim)).transpose(0, 1).flatten(0, 2).contiguous()


def wqkv_to_qkv(wqkv: Tensor, n_head: int) -> Tensor:
    """The inverse of `qkv_to_wqkv`."""
    head_dim = _head_dim(wqkv, n_head)
    return wqkv.unflatten(0, (n_head, 3, head_dim)).transpose(0, 1).flatten(0, 2).contiguous()


def from_mixle(state_dict: Mapping[str, Tensor], n_head: int) -> dict[str, Tensor]:
    """A mixle CausalLM's state dict under our names and row order."""
    return {
        _MIXLE_QKV.sub(r"\1.wqkv.\2", name): qkv_to_wqkv(value, n_head) if _MIXLE_QKV.fullmatch(name) else value
        for name, value in state_dict.items()
    }


def to_mixle(state_dict: Mapping[str, Tensor], n_head: int) -> dict[str, Tensor]:
    """Our state dict under mixle's names and row order."""
    return {
        _OUR_QKV.sub(r"\1.qkv.\2", name): wqkv_to_qkv(value, n_head) if _OUR_QKV.fullmatch(name) else value
        for name, value in state_dict.items()
    }


def _head_dim(fused: Tensor, n_head: int) -> int:
    head_dim, rest = divmod(fused.shape[0], 3 * n_head)
    if rest:
        raise ConfigError(f"a fused qkv of {fused.shape[0]} rows does not hold q, k and v of n_head={n_head} heads")
    return head_dim
