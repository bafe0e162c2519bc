"""Everything that must divide what, in one place. Plain numbers: no torch, no process group."""

import math
from dataclasses import dataclass
from typing import Any

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.metrics.counting import ModelShape
from torchtitan_mixle.planning.sequence import chunks_per_rank, sequence_order


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
    context_parallel_method: str = "allgather"
    context_parallel_order: str = "headtail"

    @property
    def data_parallel_degree(self) -> int:
        """Ranks that see different samples."""
        model_ranks = self.tensor_parallel_degree * self.pipeline_parallel_degree * self.context_parallel_degree
        if self.data_parallel_shard_degree == -1:
            return self.world_size // model_ranks  # replicas included
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def shards_parameters(self) -> bool:
        """Whether there is FSDP: over ranks with other samples, or over those that share a sequence."""
        return self.context_parallel_degree > 1 or self.data_parallel_degree > self.data_parallel_replicate_degree

    @property
    def samples_per_step(self) -> int:
        if self.global_batch_size < 0:
            return self.local_batch_size * self.data_parallel_degree
        return self.global_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes an optimizer step."""
        return self.samples_per_step // (self.local_batch_size * self.data_parallel_degree)


def run_plan(job_config: Any, world_size: int) -> RunPlan:
    """The job's sizes as the plan check wants them."""
    training, parallelism = job_config.training, job_config.parallelism
    return RunPlan(
        world_size=world_size,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=training.global_batch_size,
        data_parallel_replicate_degree=parallelism.data_parallel_replicate_degree,
        data_parallel_shard_degree=parallelism.data_parallel_shard_degree,
        tensor_parallel_degree=parallelism.tensor_parallel_degree,
        pipeline_parallel_degree=parallelism.pipeline_parallel_degree,
        context_parallel_degree=parallelism.context_parallel_degree,
        expert_parallel_degree=parallelism.expert_parallel_degree,
        context_parallel_method=job_config.mixle.context_parallel_method,
        context_parallel_order=sequence_order(job_config),
    )


def compiles_model(job_config: Any) -> bool:
    """Whether the job's blocks are compiled."""
    return bool(job_config.compile.enable) and "model" in job_config.compile.components


DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


def check_plan(shape: ModelShape, plan: RunPlan) -> None:
    """Raise ConfigError unless `plan` can run a model of `shape`."""
    check_degrees(plan)
    check_heads(shape.n_head, plan.tensor_parallel_degree, key="parallelism.tensor_parallel_degree")
    _check_exchanged_heads(shape.n_head, plan)
    _check_vocabulary(shape, plan)
    check_seq_len(shape, plan, plan.seq_len, key="training.seq_len")
    _check_batch(plan)


def check_heads(n_head: int, tp: int, *, key: str) -> None:
    """Raise ConfigError unless `tp` ranks can share the heads evenly; `key` is what the caller calls tp."""
    if tp < 1 or n_head % tp:
        raise ConfigError(
            f"{key}={tp} must divide n_head={n_head}, since a head is never split; use {_or(divisors(n_head))}"
        )


def check_seq_len(shape: ModelShape, plan: RunPlan, seq_len: int, *, key: str) -> None:
    """Raise ConfigError unless sequences fit the position table and the ranks; `key` is the TOML key of seq_len."""
    if not 1 <= seq_len <= shape.block:
        raise ConfigError(
            f"{key}={seq_len}: must be between 1 and the {shape.block} rows of the position table"
            + (f"; lower {key} or set [mixle] block={seq_len}" if seq_len > 0 else "")
        )
    tp, cp = plan.tensor_parallel_degree, plan.context_parallel_degree
    chunks = cp * chunks_per_rank(plan.context_parallel_order) if cp > 1 else 1
    factor = math.lcm(chunks, cp * tp)
    if seq_len % factor == 0:
        return
    shared = {"tensor_parallel_degree": tp, "context_parallel_degree": cp}
    degrees = " and ".join(f"{name}={degree}" for name, degree in shared.items() if degree > 1)
    needs = f"{chunks} chunks" + (f" over {cp} ranks, each again shared by {tp}" if tp > 1 else "")
    why = f"head-tail order makes {needs}" if chunks > cp else "the ranks share the tokens of a sequence between them"
    remedies = _or(_multiples_near(seq_len, factor, highest=shape.block))
    if chunks > cp and seq_len % (cp * tp) == 0:
        remedies += ', or set [mixle] context_parallel_order="contiguous"'
    raise ConfigError(f"{key}={seq_len} must be a multiple of {factor} for {degrees}, since {why}; use {remedies}")


def _check_exchanged_heads(n_head: int, plan: RunPlan) -> None:
    """The ulysses method gives every rank some heads, of those that tensor parallelism has left it."""
    tp, cp = plan.tensor_parallel_degree, plan.context_parallel_degree
    if cp > 1 and plan.context_parallel_method == "ulysses" and n_head % (tp * cp):
        raise ConfigError(
            f'[mixle] context_parallel_method="ulysses" shares n_head={n_head} heads between '
            f"parallelism.tensor_parallel_degree={tp} times context_parallel_degree={cp} ranks, which does not go; "
            f'use context_parallel_degree={_or(divisors(n_head // tp))}, or the method "ring" or "allgather"'
        )


def _check_vocabulary(shape: ModelShape, plan: RunPlan) -> None:
    """A token matrix whose rows tp shares unevenly is sharded by columns over FSDP's ranks, and these evenly."""
    tp, cp = plan.tensor_parallel_degree, plan.context_parallel_degree
    fsdp = plan.data_parallel_degree // plan.data_parallel_replicate_degree * cp
    if shape.vocab_size % tp and shape.d_model % fsdp:
        raise ConfigError(
            f"vocabulary size V={shape.vocab_size} is no multiple of parallelism.tensor_parallel_degree={tp}, and then "
            f"data_parallel_shard_degree * context_parallel_degree={fsdp} must divide d_model={shape.d_model}; "
            f"set [mixle] vocab_size={_multiples_near(shape.vocab_size, tp)[-1]}, or change the degrees"
        )


def divisors(n: int) -> list[int]:
    """1, ..., n."""
    return [k for k in range(1, n + 1) if n % k == 0]


def _multiples_near(value: int, factor: int, *, highest: int | None = None) -> list[int]:
    """The multiples of `factor` below and above `value`, those of them in [1, highest]."""
    below = value // factor * factor
    return [n for n in (below, below + factor) if n > 0 and (highest is None or n <= highest)]


def _or(values: list[int]) -> str:
    """Values that would work, in words; where there is none, a word for that."""
    if not values:
        return "another degree"
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def check_degrees(plan: RunPlan) -> None:
    """Raise ConfigError unless the degrees are whole numbers of at least 1 that multiply to the number of ranks."""
    for field in DEGREES:
        degree = getattr(plan, field)
        lowest = "1, or -1 for the ranks that are left" if field == "data_parallel_shard_degree" else "1"
        if type(degree) is not int or (degree < 1 and not (degree == -1 and lowest != "1")):
            raise ConfigError(f"parallelism.{field}={degree!r}: must be a whole number of at least {lowest}")
    if plan.expert_parallel_degree != 1:
        raise ConfigError(
            f"parallelism.expert_parallel_degree={plan.expert_parallel_degree}: the model has no experts; use 1"
        )
    _check_product(plan)


def _check_product(plan: RunPlan) -> None:
    given = {field: getattr(plan, field) for field in DEGREES if getattr(plan, field) not in (1, -1)}
    product, ranks = math.prod(given.values()), plan.world_size
    named = ", ".join(f"{field}={degree}" for field, degree in given.items()) or "all 1"
    if plan.data_parallel_shard_degree == -1 and ranks % product:
        raise ConfigError(
            f"the degrees of [parallelism] ({named}) need a multiple of {product} ranks, and there are {ranks}; "
            f"start {ranks // product * product or product}, or change the degrees"
        )
    if plan.data_parallel_shard_degree != -1 and ranks != product:
        raise ConfigError(
            f"the degrees of [parallelism] ({named}) need {product} ranks, and there are {ranks}; start {product}, "
            f"change the degrees, or set data_parallel_shard_degree=-1 to use what is left"
        )


def _check_batch(plan: RunPlan) -> None:
    if plan.local_batch_size < 1:
        raise ConfigError(f"training.local_batch_size={plan.local_batch_size}: must be at least 1")
    per_pass = plan.local_batch_size * plan.data_parallel_degree
    if plan.samples_per_step < 1 or plan.samples_per_step % per_pass:
        raise ConfigError(
            f"training.global_batch_size={plan.global_batch_size} must be a multiple of local_batch_size="
            f"{plan.local_batch_size} times the data-parallel degree {plan.data_parallel_degree}; "
            f"use {_or(_multiples_near(plan.samples_per_step, per_pass))}"
        )


def validate_tp_pp_cp_plan(model: Any, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1) -> None:
    """Raise ConfigError (a ValueError) unless the three degrees fit a CausalLM: mixle's, or ours.

    Tensor parallelism needs whole heads, a pipeline at least one block a stage, and context parallelism chunks of equal
    length of the longest sequence.
    """
    args = getattr(model, "model_args", model)
    check_heads(args.n_head, tp_size, key="tp_size")
    if not 1 <= pp_size <= args.n_layer:
        raise ConfigError(
            f"pp_size={pp_size}: every stage needs a block of n_layer={args.n_layer}; use 1 to {args.n_layer}"
        )
    if cp_size < 1 or args.block % cp_size:
        raise ConfigError(
            f"cp_size={cp_size} must divide the longest sequence, block={args.block}; use {_or(divisors(args.block))}"
        )
