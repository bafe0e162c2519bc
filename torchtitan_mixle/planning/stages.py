"""Pipeline stages: which blocks stand on which, and what a schedule needs. Plain data, no torch."""

import difflib
import math
from dataclasses import dataclass
from typing import Any

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.metrics.counting import ModelShape
from torchtitan_mixle.planning.check import RunPlan
from torchtitan_mixle.planning.schedule_file import FileSchedule, read_schedule

FIRST_MODULES = ("tok", "pos")
LAST_MODULES = ("ln", "head")
# TorchTitan's names for the same modules, understood in module_fqns_per_model_part.
_ALIASES = {"tok_embeddings": "tok", "norm": "ln", "output": "head"}


@dataclass(frozen=True)
class Schedule:
    """What distinguishes a schedule for the split and for the checks."""

    name: str
    virtual: bool = False
    """Several stages on a rank."""
    v_shaped: bool = False
    """Rank r has stages r and 2 pp - 1 - r: first and last stage are on the first rank."""
    splits_backward: bool = False
    """Computes gradients of inputs and of weights in two passes (zero bubble)."""
    needs_stages_full: bool = False
    """Needs as many microbatches as stages."""
    file: FileSchedule | None = None
    """Where it comes from, if it is not one of torch's."""

    @property
    def splitter_name(self) -> str:
        """The schedule to name to TorchTitan where it asks for one to deal out the stages."""
        if self.file is None:
            return self.name
        return "ZBVZeroBubble" if self.v_shaped else "PipelineScheduleMulti"


SCHEDULES = {
    schedule.name.lower(): schedule
    for schedule in (
        Schedule("GPipe"),
        Schedule("1F1B", needs_stages_full=True),
        Schedule("Interleaved1F1B", virtual=True),
        Schedule("LoopedBFS", virtual=True),
        Schedule("InterleavedZeroBubble", virtual=True, splits_backward=True),
        Schedule("ZBVZeroBubble", virtual=True, v_shaped=True, splits_backward=True),
        Schedule("DualPipeV", virtual=True, v_shaped=True, splits_backward=True, needs_stages_full=True),
    )
}
# TorchTitan's names for "whatever the file says".
_FILE_SCHEDULES = ("PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime")
_SCHEDULE_KEY = "parallelism.pipeline_parallel_schedule"


def find_schedule(name: str) -> Schedule:
    """The schedule of that name, in any case. Raises ConfigError that lists them."""
    if name.lower() not in SCHEDULES:
        known = [schedule.name for schedule in SCHEDULES.values()]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{_SCHEDULE_KEY}={name!r} is unknown; {hint}use one of {', '.join(known)}")
    return SCHEDULES[name.lower()]


def job_schedule(parallelism: Any) -> Schedule:
    """The schedule that a job's `[parallelism]` asks for: by name, or as its file says. Raises ConfigError."""
    name, path = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_schedule_csv
    if not path:
        if name.lower() in map(str.lower, _FILE_SCHEDULES):
            raise ConfigError(
                f"{_SCHEDULE_KEY}={name!r} needs a file, in pipeline_parallel_schedule_csv; there is none"
            )
        return find_schedule(name)
    if name.lower() not in map(str.lower, _FILE_SCHEDULES):
        find_schedule(name)  # the file counts, but a misspelt word is still a mistake
    file = read_schedule(path)
    return Schedule(
        file.name,
        virtual=file.n_stages > len(file.actions),
        v_shaped=file.v_shaped,
        splits_backward=file.splits_backward,
        file=file,
    )


def stage_modules(n_layer: int, parallelism: Any) -> list[list[str]]:
    """Names of the modules on each stage, for TorchTitan's `[parallelism]` keys. Raises ConfigError.

    The blocks are shared out evenly, the first stages taking the rest, after `..._first_stage_less_layers` and
    `..._last_stage_less_layers` blocks were counted for the embeddings and for the head.
    """
    if parallelism.module_fqns_per_model_part is not None:
        stages = [[_own_name(name) for name in stage] for stage in parallelism.module_fqns_per_model_part]
        _check_explicit(stages, n_layer, parallelism)
        return stages
    counts = _blocks_per_stage(n_layer, _count_stages(n_layer, parallelism), parallelism)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    stages = [[f"blocks.{i}" for i in range(start, start + n)] for start, n in zip(starts, counts, strict=True)]
    stages[0][:0] = FIRST_MODULES
    stages[-1].extend(LAST_MODULES)
    return stages


def _own_name(name: str) -> str:
    return _ALIASES.get(name, f"blocks.{name.removeprefix('layers.')}" if name.startswith("layers.") else name)


def _weights(parallelism: Any) -> tuple[int, int]:
    return (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )


def _count_stages(n_layer: int, parallelism: Any) -> int:
    """Stages over all ranks: one a rank, two for a schedule with virtual stages, or what layers_per_stage gives."""
    pp = parallelism.pipeline_parallel_degree
    schedule = job_schedule(parallelism)
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is None and schedule.file is not None:
        return schedule.file.n_stages
    if per_stage is None:
        return pp * (2 if schedule.virtual else 1)
    key = f"parallelism.pipeline_parallel_layers_per_stage={per_stage}"
    n_stages = math.ceil((n_layer + sum(_weights(parallelism))) / per_stage) if per_stage > 0 else 0
    if n_stages % pp or not n_stages:
        raise ConfigError(f"{key} makes {n_stages} stages, which {pp} pipeline ranks cannot share evenly")
    _check_stages_per_rank(n_stages, pp, schedule, key)
    return n_stages


def _check_stages_per_rank(n_stages: int, pp: int, schedule: Schedule, key: str) -> None:
    per_rank = n_stages // pp
    if not schedule.virtual and per_rank != 1:
        raise ConfigError(f"{key} makes {per_rank} stages a rank, but {schedule.name} runs one; use Interleaved1F1B")
    if schedule.virtual and per_rank < 2:
        raise ConfigError(f"{key} makes one stage a rank, but {schedule.name} needs two or more; use 1F1B")
    if schedule.v_shaped and per_rank != 2:
        raise ConfigError(f"{key} makes {per_rank} stages a rank, but {schedule.name} runs exactly two")


def _blocks_per_stage(n_layer: int, n_stages: int, parallelism: Any) -> list[int]:
    first_less, last_less = _weights(parallelism)
    each, rest = divmod(n_layer + first_less + last_less, n_stages)
    counts = [each + (i < rest) for i in range(n_stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    if min(counts) < 1:
        raise ConfigError(
            f"{n_layer} blocks on {n_stages} pipeline stages (first_stage_less_layers={first_less}, "
            f"last_stage_less_layers={last_less}) would make {counts} blocks a stage, and every stage needs one; "
            f"lower parallelism.pipeline_parallel_degree or the two less_layers keys"
        )
    return counts


def _check_explicit(stages: list[list[str]], n_layer: int, parallelism: Any) -> None:
    key = "parallelism.module_fqns_per_model_part"
    names = [name for stage in stages for name in stage]
    wanted = [*FIRST_MODULES, *(f"blocks.{i}" for i in range(n_layer)), *LAST_MODULES]
    if unknown := sorted(set(names) - set(wanted)):
        raise ConfigError(
            f"{key} names {', '.join(unknown)}; the modules are tok, pos, blocks.0 to blocks.{n_layer - 1}, ln, head"
        )
    if missing := [name for name in wanted if name not in names]:
        raise ConfigError(f"{key} leaves out {', '.join(missing)}; every module must be on one stage")
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{key} gives {', '.join(doubled)} more than once; every module must be on one stage")
    blocks = [name for name in names if name.startswith("blocks.")]
    if blocks != wanted[2:-2] or not set(FIRST_MODULES) <= set(stages[0]) or not set(LAST_MODULES) <= set(stages[-1]):
        raise ConfigError(f"{key} must keep tok and pos on the first stage, ln and head on the last, blocks in order")
    if empty := [i for i, stage in enumerate(stages) if not any(name.startswith("blocks.") for name in stage)]:
        raise ConfigError(f"{key}: stage {empty[0]} has no block, and every stage needs one")
    pp = parallelism.pipeline_parallel_degree
    if len(stages) % pp:
        raise ConfigError(f"{key} lists {len(stages)} stages, which {pp} pipeline ranks cannot share evenly")
    schedule = job_schedule(parallelism)
    _check_stages_per_rank(len(stages), pp, schedule, f"{key} of {len(stages)} stages")


def check_pipeline(job_config: Any, shape: ModelShape, plan: RunPlan) -> None:
    """Raise ConfigError unless the job's pipeline can be built and gives exact gradients."""
    parallelism = job_config.parallelism
    schedule = job_schedule(parallelism)
    batch, microbatch = plan.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    file = schedule.file
    if file is not None:
        check_microbatch_size(batch, microbatch)
        file.check(pp=plan.pipeline_parallel_degree, microbatches=batch // microbatch)
    n_stages = len(stage_modules(shape.n_layer, parallelism))
    if file is None:
        pp = plan.pipeline_parallel_degree
        check_microbatches(schedule, n_stages=n_stages, pp=pp, batch=batch, microbatch=microbatch)
    elif n_stages != file.n_stages:
        raise ConfigError(
            f"{file.name} runs {file.n_stages} stages, and the other keys make {n_stages}; change one of them"
        )
    if schedule.splits_backward:
        name = f"{_SCHEDULE_KEY}={schedule.name!r}" if file is None else file.name
        _check_split_backward(name, job_config, plan)
    _check_validation_shape(job_config)


def _check_split_backward(name: str, job_config: Any, plan: RunPlan) -> None:
    """Refuse what cannot go through a graph twice: compiled code, blocks recomputed by op, parameters gathered anew."""
    checkpoint = job_config.activation_checkpoint
    if checkpoint.mode == "selective" and checkpoint.selective_ac_option == "op":
        what, remedy = 'activation_checkpoint.selective_ac_option="op"', 'activation_checkpoint.mode="full"'
    elif job_config.compile.enable:
        what, remedy = "compile.enable=true", "compile.enable=false"
    elif plan.shards_parameters and job_config.parallelism.fsdp_reshard_after_forward == "always":
        what, remedy = 'parallelism.fsdp_reshard_after_forward="always"', '"default"'
    else:
        return
    whole = [s.name for s in SCHEDULES.values() if not s.splits_backward]
    raise ConfigError(
        f"{name} computes the gradients of inputs and weights apart, which {what} does not allow; "
        f"use {remedy}, or the schedule {', '.join(whole)}"
    )


def _check_validation_shape(job_config: Any) -> None:
    if not job_config.validation.enable:
        return
    for key in ("local_batch_size", "seq_len"):
        here, there = getattr(job_config.validation, key), getattr(job_config.training, key)
        if here != there:
            raise ConfigError(
                f"validation.{key}={here} must be training.{key}={there} in a pipeline, whose stages agree on one size"
            )


def check_microbatches(schedule: Schedule, *, n_stages: int, pp: int, batch: int, microbatch: int) -> None:
    """Raise ConfigError unless a rank's batch makes microbatches that the schedule can run."""
    keys = check_microbatch_size(batch, microbatch)
    n = batch // microbatch
    if schedule.needs_stages_full and n < n_stages:
        raise ConfigError(
            f"{keys} makes {n} microbatches, but {schedule.name} needs one for each of its {n_stages} stages; "
            f"use local_batch_size={n_stages * microbatch} or more, or GPipe"
        )
    rounds = max(1, n // pp)
    if schedule.name.startswith("Interleaved") and n % rounds:
        raise ConfigError(
            f"{keys} makes {n} microbatches, but {schedule.name} runs them in {rounds} rounds of equal length; "
            f"use a multiple of pipeline_parallel_degree={pp}"
        )


def check_microbatch_size(batch: int, microbatch: int) -> str:
    """Raise ConfigError unless the microbatch size divides a rank's batch; the two keys with their values."""
    keys = f"training.local_batch_size={batch} with parallelism.pipeline_parallel_microbatch_size={microbatch}"
    if microbatch < 1 or batch % microbatch:
        raise ConfigError(f"{keys}: the microbatch size must divide the batch")
    return keys
