"""Everything that must divide what, in one place. Plain numbers: no torch, no process group."""

from dataclasses import dataclass

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.metrics.counting import ModelShape


@dataclass(frozen=True)
class RunPlan:
    """The sizes of a run, named after their TOML keys."""

    world_size: int
    seq_len: int
    local_batch_size: int
    global_batch_size: int = -1
    """Samples an optimizer step; -1: local_batch_size * data_parallel_degree."""
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    """-1: the ranks that the other degrees leave over."""
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1

    @property
    def data_parallel_degree(self) -> int:
        """Ranks that see different samples."""
        model_ranks = self.tensor_parallel_degree * self.pipeline_parallel_degree * self.context_parallel_degree
        if self.data_parallel_shard_degree == -1:
            return self.world_size // model_ranks
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def samples_per_step(self) -> int:
        if self.global_batch_size > 0:
            return self.global_batch_size
        return self.local_batch_size * self.data_parallel_degree


# Axis -> (TOML key's field, what it is called).
_NOT_THERE_YET = {
    "tensor_parallel_degree": "tensor parallelism",
    "pipeline_parallel_degree": "pipeline parallelism",
    "context_parallel_degree": "context parallelism",
}


def check_plan(shape: ModelShape, plan: RunPlan) -> None:
    """Raise ConfigError unless `plan` can run a model of `shape`."""
    _check_degrees(plan)
    check_seq_len(shape, plan.seq_len, key="training.seq_len")
    _check_batch(plan)


def check_seq_len(shape: ModelShape, seq_len: int, *, key: str) -> None:
    """Raise ConfigError unless a sequence fits the position table; `key` is the TOML key it came from."""
    if not 1 <= seq_len <= shape.block:
        raise ConfigError(
            f"{key}={seq_len}: must be between 1 and the {shape.block} rows of the position table; "
            f"lower {key} or set [mixle] block={max(seq_len, 1)}"
        )


def _check_degrees(plan: RunPlan) -> None:
    for field, what in _NOT_THERE_YET.items():
        degree = getattr(plan, field)
        if degree != 1:
            raise ConfigError(
                f"parallelism.{field}={degree}: {what} is not there yet; "
                f"use 1, and data_parallel_shard_degree to spread the model over ranks"
            )
    if plan.expert_parallel_degree != 1:
        raise ConfigError(
            f"parallelism.expert_parallel_degree={plan.expert_parallel_degree}: the model has no experts; use 1"
        )


def _check_batch(plan: RunPlan) -> None:
    if plan.local_batch_size < 1:
        raise ConfigError(f"training.local_batch_size={plan.local_batch_size}: must be at least 1")
    per_pass = plan.local_batch_size * plan.data_parallel_degree
    if plan.samples_per_step % per_pass:
        below = plan.samples_per_step // per_pass * per_pass
        remedies = " or ".join(str(n) for n in (below, below + per_pass) if n)
        raise ConfigError(
            f"training.global_batch_size={plan.global_batch_size} must be a multiple of local_batch_size="
            f"{plan.local_batch_size} times the data-parallel degree {plan.data_parallel_degree}; use {remedies}"
        )
