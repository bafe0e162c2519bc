"""Rules for single values, as a table: the config's types are not enforced on a TOML file, and its ranges nowhere."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import SIZES
from torchtitan_mixle.planning.sequence import METHODS, ORDERS

Rule = tuple[Callable[[Any], bool], str]


def _whole(value: Any) -> bool:
    return type(value) is int


def _real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def one_of(*values: str) -> Rule:
    return (lambda value: value in values, f"one of {', '.join(repr(value) for value in values)}")


AT_LEAST_ONE: Rule = (lambda value: _whole(value) and value >= 1, "a whole number of at least 1")
AT_LEAST_ZERO: Rule = (lambda value: _whole(value) and value >= 0, "a whole number of at least 0")
ALL_OR_SOME: Rule = (lambda value: _whole(value) and (value == -1 or value >= 1), "-1 for all, or at least 1")
POSITIVE: Rule = (lambda value: _real(value) and value > 0, "a positive number")
NOT_NEGATIVE: Rule = (lambda value: _real(value) and value >= 0, "a number of at least 0")
NUMBER: Rule = (_real, "a finite number")
SHARE: Rule = (lambda value: _real(value) and 0 <= value <= 1, "between 0 and 1")
FLAG: Rule = (lambda value: type(value) is bool, "true or false, without quotes")


def or_unset(rule: Rule) -> Rule:
    return (lambda value: value is None or rule[0](value), f"{rule[1]}, or not set")


def members_of(*values: str) -> Rule:
    return (
        lambda value: isinstance(value, list) and set(value) <= set(values),
        f"a list of {', '.join(repr(value) for value in values)}",
    )


_DTYPES = one_of("float32", "bfloat16")

RULES: dict[str, Rule] = {
    **{f"mixle.{name}": or_unset(AT_LEAST_ONE) for name in SIZES},
    "mixle.mup_attention": FLAG,
    "mixle.mup_output_multiplier": NUMBER,
    "mixle.peak_tflops": or_unset(POSITIVE),
    "mixle.context_parallel_method": one_of(*METHODS),
    "mixle.context_parallel_order": or_unset(one_of(*ORDERS)),
    "parallelism.context_parallel_load_balancer": or_unset(one_of("headtail")),
    "training.seq_len": AT_LEAST_ONE,
    "training.local_batch_size": AT_LEAST_ONE,
    "training.global_batch_size": ALL_OR_SOME,
    "training.steps": AT_LEAST_ONE,
    "training.max_norm": POSITIVE,
    "training.dtype": _DTYPES,
    "training.mixed_precision_param": _DTYPES,
    "training.mixed_precision_reduce": one_of("float32"),
    "training.gc_freq": AT_LEAST_ONE,
    "training.dataloader.num_workers": AT_LEAST_ZERO,
    "validation.local_batch_size": AT_LEAST_ONE,
    "validation.seq_len": AT_LEAST_ONE,
    "validation.freq": AT_LEAST_ONE,
    "validation.steps": ALL_OR_SOME,
    "validation.dataloader.num_workers": AT_LEAST_ZERO,
    "optimizer.name": one_of("AdamW", "Adam"),
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.implementation": one_of("fused", "foreach", "for-loop"),
    "lr_scheduler.warmup_steps": AT_LEAST_ZERO,
    "metrics.log_freq": AT_LEAST_ONE,
    "checkpoint.interval": AT_LEAST_ONE,
    "checkpoint.keep_latest_k": (
        lambda value: _whole(value) and (value == 0 or value >= 2),
        "0 to keep all, or at least 2: the newest may still be in the making",
    ),
    "checkpoint.exclude_from_loading": members_of("optimizer", "lr_scheduler", "dataloader", "train_state"),
    "activation_checkpoint.mode": one_of("none", "full", "selective", "memory_budget"),
    "activation_checkpoint.memory_budget": SHARE,
    "compile.components": members_of("model", "loss"),
    "parallelism.fsdp_reshard_after_forward": one_of("default", "always", "never"),
    "parallelism.pipeline_parallel_microbatch_size": AT_LEAST_ONE,
    "parallelism.pipeline_parallel_layers_per_stage": or_unset(AT_LEAST_ONE),
    "parallelism.pipeline_parallel_first_stage_less_layers": AT_LEAST_ZERO,
    "parallelism.pipeline_parallel_last_stage_less_layers": AT_LEAST_ZERO,
    "parallelism.module_fqns_per_model_part": or_unset(
        (
            lambda value: (
                isinstance(value, list)
                and all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in value)
            ),
            "a list of lists of module names",
        )
    ),
    "parallelism.expert_tensor_parallel_degree": (lambda value: value == 1, "1: the model has no experts"),
    "debug.seed": or_unset(AT_LEAST_ZERO),
}


def check_values(job_config: Any) -> None:
    """Raise ConfigError for the first value that breaks its rule, and for what this model or machine does not have."""
    for key, (holds, rule) in RULES.items():
        value = job_config
        for name in key.split("."):
            value = getattr(value, name)
        if not holds(value):
            raise ConfigError(f"{key}={value!r}: must be {rule}")
    _check_checkpoint(job_config.checkpoint)
    _check_dtypes(job_config.training)
    if (rotate := job_config.parallelism.context_parallel_rotate_method) != "allgather":
        raise ConfigError(
            f"parallelism.context_parallel_rotate_method={rotate!r} belongs to torch's own context parallelism, which "
            f'this model does not use; unset it, and set [mixle] context_parallel_method="ring" for the same effect'
        )
    folder = Path(job_config.job.dump_folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"job.dump_folder={str(folder)!r} is a file; give a folder")


def _check_checkpoint(checkpoint: Any) -> None:
    for key, needed in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if getattr(checkpoint, key) and not getattr(checkpoint, needed):
            raise ConfigError(
                f"checkpoint.{key}=true: Hugging Face files hold the weights alone; set checkpoint.{needed}=true too"
            )
    if checkpoint.initial_load_in_hf_quantized:
        raise ConfigError("checkpoint.initial_load_in_hf_quantized=true: GPT-2 has no quantized form; set it to false")
    path = checkpoint.initial_load_path
    if path and not Path(path).is_dir():
        raise ConfigError(
            f"checkpoint.initial_load_path={path!r} is not a folder; give the step-N folder of a checkpoint"
        )
    if checkpoint.create_seed_checkpoint and not checkpoint.enable:
        raise ConfigError("checkpoint.create_seed_checkpoint=true needs checkpoint.enable=true to write it")


def _check_dtypes(training: Any) -> None:
    """Parameters in bfloat16 are computed with in bfloat16 everywhere but under FSDP, which would cast them up."""
    if training.dtype == "bfloat16" and training.mixed_precision_param != "bfloat16":
        raise ConfigError(
            'training.dtype="bfloat16" with training.mixed_precision_param="float32" would compute in another dtype '
            'from layout to layout; set mixed_precision_param="bfloat16"'
        )
