"""Gradients of parameters that every tensor-parallel rank holds whole.

Under sequence parallelism each rank sees some of the tokens, so its gradients of the norms and of the position table
are parts of a sum. DTensor leaves them so, and would add them up anew in every operation that needs the whole: once
for the norm, once for the optimizer, one small all-reduce a parameter. Here they are added up once a step in one
all-reduce. (FSDP2 and DDP add them up themselves when they reduce.)
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Replicate


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients that are partial sums, all in one collective; they become replicated."""
    partial = [
        (parameter, gradient)
        for parameter in parameters
        if isinstance(gradient := parameter.grad, DTensor) and gradient.placements[0].is_partial()
    ]
    if not partial:
        return
    mesh = partial[0][1].device_mesh
    local = [gradient.to_local() for _, gradient in partial]
    total = torch.cat([part.flatten().float() for part in local])  # summed in fp32 whatever the gradients' dtype
    dist.all_reduce(total, group=mesh.get_group())
    for (parameter, _), part, whole in zip(partial, local, total.split([x.numel() for x in local]), strict=True):
        parameter.grad = DTensor.from_local(whole.view_as(part).to(part.dtype), mesh, [Replicate()], run_check=False)


def reduce_after_backward(model: nn.Module, *, every: int) -> None:
    """Call `reduce_partial_gradients` at the end of every `every`-th backward pass: the last of an optimizer step."""
    passes = 0

    def count_pass() -> None:
        nonlocal passes
        passes += 1
        if passes % every == 0:
            reduce_partial_gradients(model.parameters())

    def at_backward(gradient: Any) -> None:
        # The engine calls back when all gradients of this pass are accumulated.
        Variable._execution_engine.queue_callback(count_pass)

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(at_backward)

    model.register_forward_hook(watch)
