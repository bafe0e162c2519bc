"""Validation with the true token-weighted loss."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, ValidationContext
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools import utils

from torchtitan_mixle.data.datasets import is_token_source, open_source
from torchtitan_mixle.data.loader import Batch, GlobalBatches, ValidationSamples, torch_loader
from torchtitan_mixle.metrics.processor import CausalLMMetrics


def build_validator(
    *,
    job_config: JobConfig,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    parallel_dims: ParallelDims,
    loss_fn: LossFunction,
    validation_context: ValidationContext,
    maybe_enable_amp: AbstractContextManager[None],
    metrics_processor: CausalLMMetrics,
    pp_schedule: Any = None,
    pp_has_first_stage: bool | None = None,
    pp_has_last_stage: bool | None = None,
) -> "CausalLMValidator":
    """TorchTitan's `build_validator_fn`."""
    return CausalLMValidator(
        job_config,
        batches=partial(_batches, job_config, dp_rank, dp_world_size, tokenizer),
        parallel_dims=parallel_dims,
        loss_fn=loss_fn,
        validation_context=validation_context,
        maybe_enable_amp=maybe_enable_amp,
        metrics_processor=metrics_processor,
        pipeline=None if pp_schedule is None else (pp_schedule, bool(pp_has_first_stage), bool(pp_has_last_stage)),
    )


def _batches(job_config: JobConfig, dp_rank: int, dp_world_size: int, tokenizer: BaseTokenizer) -> Iterable[Batch]:
    """One pass over the validation data, the same number of batches on every rank."""
    validation = job_config.validation
    if not is_token_source(validation.dataset):
        return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite=True)
    source = open_source(validation.dataset, validation.dataset_path, "validation")
    # The ids were checked against the model's vocabulary at start-up; here the data's own bound is enough.
    samples = ValidationSamples(source, seq_len=validation.seq_len, vocab_size=source.vocab_size)
    batches = GlobalBatches(
        start=0,
        stop=samples.n,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        local_batch_size=validation.local_batch_size,
    )
    return torch_loader(samples, batches, validation.dataloader)


class CausalLMValidator(BaseValidator):
    """Mean loss over the validation tokens: one sum and one count over all steps and ranks, divided once."""

    def __init__(
        self,
        job_config: JobConfig,
        *,
        batches: Callable[[], Iterable[Batch]],
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        validation_context: ValidationContext,
        maybe_enable_amp: AbstractContextManager[None],
        metrics_processor: CausalLMMetrics,
        pipeline: tuple[Any, bool, bool] | None = None,
    ) -> None:
        super().__init__(job_config)
        self.batches = batches
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.pipeline = pipeline
        """(schedule, has the first stage, has the last stage) of this rank, or None without a pipeline."""

    def should_validate(self, step: int) -> bool:
        """At TorchTitan's steps (the first, and every `validation.freq`), and after the last one."""
        return bool(super().should_validate(step)) or step == self.job_config.training.steps

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        began = time.perf_counter()
        for part in model_parts:
            part.eval()
        device = torch.device(utils.device_type)
        totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, tokens
        steps = self.job_config.validation.steps
        for inputs, labels in islice(self.batches(), None if steps == -1 else steps):
            totals += self._sum_loss(model_parts[0], inputs["input"].to(device), labels.to(device))
        for axis in ("loss", "pp"):
            if (mesh := self.parallel_dims.get_optional_mesh(axis)) is not None:
                dist.all_reduce(totals, group=mesh.get_group())
        loss_sum, tokens = totals.tolist()
        for part in model_parts:
            part.train()
        self.metrics_processor.log_validation(loss_sum / tokens, step, {"tokens": int(tokens)})
        self.metrics_processor.leave_out(time.perf_counter() - began)

    def _sum_loss(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        """(loss sum, token count) of one local batch, float64 (2,); zeros on a pipeline's earlier stages."""
        tokens, labels, where = self._own_tokens(tokens, labels)
        if self.pipeline is None:
            with self.validation_context(), self.maybe_enable_amp:
                loss = self.loss_fn(model(tokens, **where), labels)
        else:
            schedule, has_first_stage, has_last_stage = self.pipeline
            losses: list[Tensor] | None = [] if has_last_stage else None
            with self.validation_context():
                schedule.eval(
                    *([tokens] if has_first_stage else []),
                    **where,
                    target=labels if has_last_stage else None,
                    losses=losses,
                )
            if losses is None:
                return torch.zeros(2, dtype=torch.float64, device=tokens.device)
            loss = torch.stack(losses).sum().to(tokens.device)
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        return torch.stack([loss.double(), (labels != IGNORE_INDEX).sum().double()])

    def _own_tokens(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What this rank has of the sequences, dealt out as the trainer does it, and the positions if not all."""
        if not self.parallel_dims.cp_enabled:
            return tokens, labels, {}
        return prepare_context_parallel_input(
            tokens,
            labels,
            {},
            self.parallel_dims.get_mesh("cp"),
            tokens.device,
            self.job_config.parallelism.context_parallel_load_balancer,
        )
