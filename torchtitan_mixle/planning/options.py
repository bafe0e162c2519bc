"""Options that work only together with others: refused at start-up, in one line, where they cannot."""

from importlib.util import find_spec
from typing import Any

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.metrics.counting import ModelShape
from torchtitan_mixle.planning.check import RunPlan, compiles_model

_FLOAT8_MULTIPLE = 16  # float8 matrix units take operands in multiples of 16


def check_options(job_config: Any, shape: ModelShape, plan: RunPlan, *, on_accelerator: bool) -> None:
    """Raise ConfigError for a combination of TorchTitan's options that this model cannot run."""
    _check_activation_checkpoint(job_config, plan)
    _check_checkpoint(job_config)
    _check_data_parallel(job_config, plan)
    _check_machine(job_config, on_accelerator)
    if on_accelerator and plan.context_parallel_degree > 1:
        _check_head_size(shape, plan)
    if job_config.parallelism.enable_async_tensor_parallel:
        _check_async_tp(job_config, plan, on_accelerator)
    if "float8" in job_config.model.converters:
        _check_float8(job_config, shape, plan, on_accelerator)


def _check_checkpoint(job_config: Any) -> None:
    """What is to be loaded or left behind would not be, without a word. How often to save and the like may stay."""
    checkpoint = job_config.checkpoint
    if checkpoint.enable:
        return
    unused = {"initial_load_path": (None, ""), "load_step": (-1,)}
    unused |= dict.fromkeys(("initial_load_in_hf", "last_save_in_hf", "create_seed_checkpoint"), (False,))
    for name, off in unused.items():
        if (value := getattr(checkpoint, name)) not in off:
            raise ConfigError(
                f"checkpoint.{name}={value!r} does nothing with checkpoint.enable=false; set checkpoint.enable=true, "
                f"or leave {name} out"
            )


def _check_activation_checkpoint(job_config: Any, plan: RunPlan) -> None:
    options = job_config.activation_checkpoint
    every = str(options.selective_ac_option)
    if options.mode == "selective" and every != "op" and not (every.isdigit() and int(every) > 0):
        raise ConfigError(
            f'activation_checkpoint.selective_ac_option={every!r} is unknown; use "op", or a positive number n to '
            f"recompute every n-th block"
        )
    if options.mode == "memory_budget" and not compiles_model(job_config):
        raise ConfigError(
            'activation_checkpoint.mode="memory_budget" is carried out by the compiler; '
            'set compile.enable=true with "model" in compile.components, or use "full" or "selective"'
        )
    if options.mode == "memory_budget" and plan.context_parallel_degree > 1:
        raise ConfigError(
            f'activation_checkpoint.mode="memory_budget" with parallelism.context_parallel_degree='
            f"{plan.context_parallel_degree}: torch's partitioner does not weigh attention over ranks, and would run "
            f'its communication again; use "full" or "selective"'
        )
    if options.mode == "memory_budget" and plan.tensor_parallel_degree > 1:
        raise ConfigError(
            f'activation_checkpoint.mode="memory_budget" with parallelism.tensor_parallel_degree='
            f"{plan.tensor_parallel_degree}: torch's partitioner cannot weigh what tensor parallelism puts into "
            f'the graph; use "full" or "selective"'
        )


def _check_data_parallel(job_config: Any, plan: RunPlan) -> None:
    if job_config.training.enable_cpu_offload and not plan.shards_parameters:
        raise ConfigError(
            "training.enable_cpu_offload needs FSDP, which moves the parameters; "
            "set parallelism.data_parallel_shard_degree to 2 or more, or switch it off"
        )
    if job_config.training.enable_cpu_offload and plan.pipeline_parallel_degree > 1:
        raise ConfigError(
            "training.enable_cpu_offload leaves gradients on the CPU, and a pipeline exchanges the tied matrix's "
            "between GPUs; switch it off, or set parallelism.pipeline_parallel_degree=1"
        )
    if job_config.optimizer.early_step_in_backward:
        raise ConfigError(
            "optimizer.early_step_in_backward updates parameters before the gradient norm is known and before "
            "accumulation ends: clipping, the reported norm and the step would be wrong; set it to false"
        )


def _check_head_size(shape: ModelShape, plan: RunPlan) -> None:
    """The flash kernels themselves, without what torch puts around them, take heads of a multiple of 8."""
    head_size = shape.d_model // shape.n_head
    if head_size % 8:
        raise ConfigError(
            f"heads of d_model={shape.d_model} / n_head={shape.n_head} = {head_size} with "
            f"parallelism.context_parallel_degree={plan.context_parallel_degree}: a GPU's flash attention needs a "
            f"multiple of 8; use another [mixle] n_head, or context_parallel_degree=1"
        )


def _check_async_tp(job_config: Any, plan: RunPlan, on_accelerator: bool) -> None:
    key = "parallelism.enable_async_tensor_parallel"
    if not on_accelerator:
        raise ConfigError(f"{key} needs GPUs with symmetric memory, and there is only a CPU; switch it off")
    if plan.tensor_parallel_degree == 1:
        raise ConfigError(f"{key} needs parallelism.tensor_parallel_degree of 2 or more, which is 1; switch it off")
    if not compiles_model(job_config):
        raise ConfigError(f'{key} is done by the compiler; set compile.enable=true with "model" in compile.components')


def _check_float8(job_config: Any, shape: ModelShape, plan: RunPlan, on_accelerator: bool) -> None:
    if find_spec("torchao") is None:
        raise ConfigError('model.converters=["float8"] needs torchao; pip install "torchtitan-mixle[float8]"')
    options = job_config.quantize.linear.float8
    if not on_accelerator and not options.emulate:
        raise ConfigError(
            'model.converters=["float8"] needs GPUs with float8 units, and there is only a CPU; '
            "remove it, or set quantize.linear.float8.emulate=true to try the arithmetic out"
        )
    if not any(name in "head" for name in options.filter_fqns):
        raise ConfigError(
            'model.converters=["float8"] would convert the head, which is the token embedding too; '
            'set quantize.linear.float8.filter_fqns=["head"]'
        )
    width = shape.d_model // plan.tensor_parallel_degree
    if width % _FLOAT8_MULTIPLE:
        raise ConfigError(
            f'model.converters=["float8"] needs d_model/tp in multiples of {_FLOAT8_MULTIPLE}, which '
            f"{shape.d_model}/{plan.tensor_parallel_degree} is not; lower parallelism.tensor_parallel_degree"
        )


def _check_machine(job_config: Any, on_accelerator: bool) -> None:
    unknown = set(job_config.model.converters) - {"float8"}
    if unknown:
        raise ConfigError(f'model.converters names {", ".join(sorted(unknown))}; "float8" is the one this model takes')
    if on_accelerator:
        return
    if job_config.checkpoint.async_mode == "async_with_pinned_mem":
        raise ConfigError(
            'checkpoint.async_mode="async_with_pinned_mem" needs an accelerator; use "async" or "disabled"'
        )
    if job_config.profiling.enable_memory_snapshot:
        raise ConfigError(
            "profiling.enable_memory_snapshot needs an accelerator: a CPU keeps no history; switch it off"
        )
