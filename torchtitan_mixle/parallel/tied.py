"""The tied matrix in a pipeline: the first stage owns it, the last stage holds a mirror.

The mirror (`head.weight`) has a gradient but no optimizer state. After the last backward pass of a step its gradient is
added to the owner's (`tok.weight`) and dropped, so that the norm counts the matrix once and the optimizer skips the
mirror; after the optimizer's step the owner's new value is copied to it. Both then hold the same bits.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_mixle.model.model import CausalLM


class TiedMatrix:
    """This rank's ends of the tie: both in one process (V-shaped schedules), one, or none (middle stages)."""

    def __init__(
        self, parts: list[CausalLM], group: dist.ProcessGroup, *, first_stage_rank: int, last_stage_rank: int
    ) -> None:
        """The tie over the stages `parts` of this rank; the two ranks are those in the pipeline's group."""
        self.parts = parts
        self.group = group
        self.owner_rank = dist.get_global_rank(group, first_stage_rank)
        self.mirror_rank = dist.get_global_rank(group, last_stage_rank)

    # Asked for anew each time: materialising the model replaces its parameters.
    @property
    def owner(self) -> Tensor | None:
        return next((part.tok.weight for part in self.parts if part.tok is not None), None)

    @property
    def mirror(self) -> Tensor | None:
        return next((part.head.weight for part in self.parts if part.head is not None), None)

    @torch.no_grad()
    def add_mirror_gradient(self) -> None:
        """owner.grad += mirror.grad; mirror.grad = None."""
        owner, mirror, received = self.owner, self.mirror, None
        if mirror is not None:
            received = _local_gradient(mirror)
            mirror.grad = None
        if owner is not None:
            gradient = _local_gradient(owner)
            gradient.add_(self._move(received, torch.empty_like(gradient), self.mirror_rank))
        elif received is not None:
            self._send(received, self.owner_rank)

    @torch.no_grad()
    def copy_owner(self) -> None:
        """mirror = owner."""
        owner, mirror = self.owner, self.mirror
        value = None if owner is None else _local(owner)
        if mirror is not None:
            target = _local(mirror)
            target.copy_(self._move(value, torch.empty_like(target), self.owner_rank))
        elif value is not None:
            self._send(value, self.mirror_rank)

    def _move(self, here: Tensor | None, buffer: Tensor, source: int) -> Tensor:
        """The other end's tensor: it is in this process, or comes from `source`. The ends are sharded alike."""
        if here is not None:
            return here
        if buffer.numel():  # a rank can have no row of an unevenly sharded matrix
            dist.recv(buffer, src=source, group=self.group)
        return buffer

    def _send(self, tensor: Tensor, target: int) -> None:
        if tensor.numel():
            dist.send(tensor.contiguous(), dst=target, group=self.group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of the gradient, under the parameter's own placements: a lookup's may arrive under others."""
    gradient = parameter.grad
    if gradient is None:
        raise RuntimeError("one end of the tied matrix has no gradient at the end of a step")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient)
