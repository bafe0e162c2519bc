"""Context-parallel attention as one operator to autograd, to the compiler and to recomputation.

None of them looks into it, so none can run its communication in another order on another rank, or once more where the
result was saved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.parallel.blockwise import sum_dtype
from torchtitan_mixle.parallel.context import METHODS, Attended, ContextParallel
from torchtitan_mixle.planning.sequence import sequence_order

# Operators take tensors, numbers and words: this finds the rest.
_IN_USE: dict[str, ContextParallel] = {}


@torch.library.custom_op("torchtitan_mixle::context_attention", mutates_args=())
def context_attention(qkv: Tensor, scale: float | None, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and what is kept (see `Attended`) of the context-parallel attention `name`."""
    return tuple(_IN_USE[name].forward(qkv, scale))  # type: ignore[return-value]


@torch.library.custom_op("torchtitan_mixle::context_attention_backward", mutates_args=())
def context_attention_backward(
    upstream: Tensor,
    qkv: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    kept: Tensor,
    scale: float | None,
    name: str,
) -> Tensor:
    return _IN_USE[name].backward(upstream, qkv, Attended(output, log_sum_exp, kept), scale)


@context_attention.register_fake
def _(qkv: Tensor, scale: float | None, name: str) -> tuple[Tensor, Tensor, Tensor]:
    part = _IN_USE[name]
    batch, length, heads, _, size = qkv.shape
    return (
        qkv.new_empty(batch, length, heads, size),
        qkv.new_empty(part.log_sum_exp_shape(qkv.shape), dtype=sum_dtype(qkv.dtype)),
        qkv.new_empty(part.kept_shape(qkv.shape)),
    )


@context_attention_backward.register_fake
def _(
    upstream: Tensor,
    qkv: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    kept: Tensor,
    scale: float | None,
    name: str,
) -> Tensor:
    *outer, size = upstream.shape
    return upstream.new_empty(*outer, 3, size)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, float | None, str], output: tuple[Tensor, ...]) -> None:
    qkv, ctx.scale, ctx.name = inputs
    ctx.save_for_backward(qkv if _IN_USE[ctx.name].needs_qkv else None, *output)


def _differentiate(ctx: Any, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor, None, None]:
    qkv, output, log_sum_exp, kept = ctx.saved_tensors
    gradient = torch.ops.torchtitan_mixle.context_attention_backward(
        upstream, qkv, output, log_sum_exp, kept, ctx.scale, ctx.name
    )
    return gradient, None, None


context_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.torchtitan_mixle.context_attention)
def _flops(qkv: torch.Size, scale: float | None, name: str, *_: Any, **__: Any) -> int:
    batch, length, heads, _three, size = qkv
    return 2 * _product_flops((batch, length, heads, size), name)


@register_flop_formula(torch.ops.torchtitan_mixle.context_attention_backward)
def _backward_flops(upstream: torch.Size, *others: Any, **_: Any) -> int:
    return 5 * _product_flops(upstream, others[-1])  # the scores are computed again


def _product_flops(output: Sequence[int], name: str) -> int:
    """FLOPs of one product of queries and keys, or of weights and values; a multiply-add is two."""
    batch, length, heads, size = output
    return 2 * batch * heads * size * _IN_USE[name].pairs(length)


def context_attend(method: str, order: str, group: dist.ProcessGroup) -> Callable[[Tensor, float | None], Tensor]:
    """Attention over the tokens of all ranks of `group`: (qkv (B, t, H, 3, D), scale) -> (B, t, H, D)."""
    # The compiler's cache knows an operator by its arguments, so all that its results' shapes depend on is in the name.
    name = f"{method}, {order}, {group.size()} ranks, {group.group_name}"
    _IN_USE[name] = METHODS[method](group, order)

    def attend_across(qkv: Tensor, scale: float | None) -> Tensor:
        output: Tensor = torch.ops.torchtitan_mixle.context_attention(qkv, scale, name)[0]
        return output

    return attend_across


def apply_cp(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Let the blocks of `model` attend to the tokens of all ranks of the context-parallel mesh."""
    order = sequence_order(job_config)
    # By this the trainer deals out the tokens; a TOML file has no word for None.
    job_config.parallelism.context_parallel_load_balancer = None if order == "contiguous" else order
    attend_across = context_attend(
        job_config.mixle.context_parallel_method, order, parallel_dims.get_mesh("cp").get_group()
    )
    for block in model.blocks.values():
        block.attn.attend = attend_across  # type: ignore[union-attr]
