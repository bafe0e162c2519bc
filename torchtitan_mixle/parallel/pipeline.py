"""Pipeline parallelism: stages, schedules, exact gradients, the tied matrix between first and last stage."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule, pipeline_module_split

from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.parallel.replicated import reduce_partial_gradients
from torchtitan_mixle.parallel.tied import TiedMatrix
from torchtitan_mixle.planning.check import run_plan
from torchtitan_mixle.planning.order import rank_of_stage
from torchtitan_mixle.planning.stages import job_schedule, stage_modules

logger = logging.getLogger(__name__)

_BACKWARD = {
    schedules.FULL_BACKWARD,
    schedules.BACKWARD_INPUT,
    schedules.BACKWARD_WEIGHT,
    schedules.SEND_B,
    schedules.RECV_B,
    schedules.REDUCE_GRAD,
}


@dataclass
class Pipeline:
    """This rank's part of a pipeline."""

    schedule: "ExactSchedule"
    parts: list[CausalLM]
    tied: TiedMatrix
    has_first_stage: bool
    has_last_stage: bool


def build_pipeline(
    model: CausalLM,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    parallelize: Callable[..., CausalLM],
    loss_fn: LossFunction,
    note: Callable[[Tensor, Tensor], None],
) -> Pipeline:
    """Split `model` (on the meta device) into stages, make this rank's parallel, and give them their schedule.

    `note` is as in `ExactSchedule`.
    """
    parallelism = job_config.parallelism
    mesh = parallel_dims.get_mesh("pp")
    asked_for = job_schedule(parallelism)
    names = stage_modules(model.model_args.n_layer, parallelism)
    if dist.get_rank() == 0:
        for number, stage in enumerate(names):
            logger.info("Pipeline stage %s of %s: %s", number, len(names), ", ".join(stage))
        if asked_for.splits_backward and job_config.activation_checkpoint.mode != "none":
            logger.warning(
                "The schedule computes the gradients of inputs and of weights apart, and recomputes a block for each "
                "part of them: several times as much as with 1F1B or Interleaved1F1B"
            )
    # There are no experts to overlap; TorchTitan would run forward and backward in two threads all the same.
    parallelism.pipeline_parallel_expert_parallel_overlap = False
    stages, parts = pipeline_module_split(model, mesh, asked_for.splitter_name, device, names)
    for i, part in enumerate(parts):
        parts[i] = stages[i].submod = parallelize(part, parallel_dims, job_config)
    last_rank = rank_of_stage(len(names) - 1, mesh.size(), v_shaped=asked_for.v_shaped)
    tied = TiedMatrix(parts, mesh.get_group(), first_stage_rank=0, last_stage_rank=last_rank)
    schedule = ExactSchedule(
        build_pipeline_schedule(job_config, stages, loss_fn),
        parts,
        tied,
        passes_a_step=run_plan(job_config, parallel_dims.world_size).accumulation_steps,
        copies_of_labels=parallel_dims.tp,
        device=device,
        note=note,
    )
    return Pipeline(
        schedule,
        parts,
        tied,
        has_first_stage=any(stage.is_first for stage in stages),
        has_last_stage=any(stage.is_last for stage in stages),
    )


def _forward_part(order: list[Any]) -> list[Any]:
    """The actions of `order` without its backward ones, and without those halves of overlapped pairs."""
    single = (part for action in order for part in (action.sub_actions or (action,)))
    return [action for action in single if action.computation_type not in _BACKWARD]


class ExactSchedule:
    """A schedule of torch's whose gradients, at the end of an optimizer step, are those of loss / valid tokens.

    Inside the schedule the sum of the losses is differentiated, and the trainer divides only the figure it logs. Here
    the gradients are divided too, by the valid labels of the whole step over all ranks, and brought to where they
    belong: partial sums are added up, the mirror's goes to the owner.
    """

    def __init__(
        self,
        schedule: Any,
        parts: list[CausalLM],
        tied: TiedMatrix,
        *,
        passes_a_step: int,
        copies_of_labels: int,
        device: torch.device,
        note: Callable[[Tensor, Tensor], None],
    ) -> None:
        """`note(loss sum, valid labels)` is called for each pass on ranks with the last stage."""
        self.schedule = schedule
        self.parts = parts
        self.tied = tied
        self.passes_a_step = passes_a_step
        self.copies_of_labels = copies_of_labels
        self.note = note
        self.passes = 0
        self.valid_tokens = torch.zeros((), dtype=torch.float64, device=device)

    def step(self, *args: Any, target: Tensor | None = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """One forward and backward pass over a local batch; `target` and `losses` are given where the last stage is."""
        result = self.schedule.step(*args, target=target, losses=losses, **kwargs)
        if target is not None:
            labels = (target != IGNORE_INDEX).sum()
            self.valid_tokens += labels
            if losses:
                # Taken here: to learn what will be sent, torch 2.13 also runs the loss function on data that is none.
                self.note(torch.stack(losses).detach().sum(), labels)
        self.passes += 1
        if self.passes % self.passes_a_step == 0:
            self._finish_gradients()
        return result

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass alone."""
        orders = getattr(self.schedule, "pipeline_order_with_comms", None)
        if orders is None:
            return self.schedule.eval(*args, **kwargs)
        # torch's V-shaped schedules run into their backward actions here (2.13), so none are left in the order.
        self.schedule.pipeline_order_with_comms = {rank: _forward_part(order) for rank, order in orders.items()}
        try:
            return self.schedule.eval(*args, **kwargs)
        finally:
            self.schedule.pipeline_order_with_comms = orders

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        # Only ranks with the last stage have counted, and those that share its model have counted the same labels.
        dist.all_reduce(self.valid_tokens)
        total = (self.valid_tokens / self.copies_of_labels).float()
        for part in self.parts:
            reduce_partial_gradients(part.parameters())
        self.tied.add_mirror_gradient()
        gradients = [p.grad for part in self.parts for p in part.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch._foreach_div_(local, total)
        self.valid_tokens.zero_()
