"""What the worst rank reports: the loss of each data-parallel rank by itself, and measures of every rank."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.distributed import ParallelDims


class NotedLoss:
    """A loss function that adds up its results (sums over valid labels) and those labels, while training.

    Nothing leaves the device, and the function itself may be compiled: what is noted is its result.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        self._loss_sum: Tensor | None = None
        self._labels: Tensor | None = None

    def __call__(self, pred: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss_fn(pred, labels)
        if torch.is_grad_enabled():
            self.note(loss.detach(), (labels != IGNORE_INDEX).sum())
        return loss

    def note(self, loss_sum: Tensor, labels: Tensor) -> None:
        """Add the loss of one pass or microbatch; under loss parallelism every rank holds it whole."""
        if isinstance(loss_sum, DTensor):
            loss_sum = loss_sum.full_tensor()
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        self._labels = labels if self._labels is None else self._labels + labels

    def forget(self) -> None:
        self._loss_sum = self._labels = None

    def take(self, device: torch.device) -> Tensor:
        """(loss sum, labels) since the last time, float64 (2,). A pipeline over FSDP leaves its loss on the CPU."""
        nothing = torch.zeros((), device=device)
        noted = [nothing if value is None else value.to(device) for value in (self._loss_sum, self._labels)]
        self.forget()
        return torch.stack([value.double() for value in noted])


def worst_of_ranks(noted: Tensor, measures: Sequence[float], parallel_dims: ParallelDims) -> tuple[float, list[float]]:
    """The largest mean loss of a data-parallel rank over a step, and the largest of each measure over all ranks.

    `noted` is this rank's (loss sum, labels). The ranks that share a sequence have a part of both each; a rank without
    a valid label, such as one whose pipeline stage has no loss, has no mean. Where none has one, the loss is -inf. All
    goes in one exchange, for which the host waits once; every rank must take part.
    """
    if (shares := parallel_dims.get_optional_mesh("cp")) is not None:
        dist.all_reduce(noted, group=shares.get_group())
    loss_sum, labels = noted
    mean = torch.where(labels > 0, loss_sum / labels, -math.inf)
    worst = torch.cat([mean[None], torch.tensor(measures, dtype=mean.dtype, device=mean.device)])
    if parallel_dims.world_size > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    loss, *rest = worst.tolist()
    return loss, rest


def max_loss(worst: float, average: float) -> float:
    """The largest loss to report: never below `average`, the mean over all, nor finite where that is not."""
    return max(average, worst) if math.isfinite(average) else average
