"""TorchTitan's `parallelize_fn`: tensor and context parallelism, recomputation, compile, data parallelism."""

import logging
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac

from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.parallel.context_operator import apply_cp
from torchtitan_mixle.parallel.precision import apply_precision, policy
from torchtitan_mixle.parallel.replicated import reduce_after_backward
from torchtitan_mixle.parallel.tensor import apply_tp
from torchtitan_mixle.planning.check import compiles_model, run_plan

logger = logging.getLogger(__name__)

# Selective checkpointing by op keeps what is dear to compute again and recomputes the rest.
_SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,  # a linear layer with a bias
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.torchtitan_mixle.context_attention.default,
}


def parallelize(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> CausalLM:
    """Prepare `model` (on the meta device) for this rank. The order matters: each step wraps what the last one left."""
    if parallel_dims.tp_enabled:
        apply_tp(model, parallel_dims.get_mesh("tp"), loss_parallel=not job_config.parallelism.disable_loss_parallel)
        _keep_compiled_code_apart(parallel_dims)
    if parallel_dims.cp_enabled:
        apply_cp(model, parallel_dims, job_config)
    if _recomputes_compiled_blocks(parallel_dims, job_config):
        apply_compile(model, job_config)
        apply_recomputation(model, job_config)
    else:
        apply_recomputation(model, job_config)
        apply_compile(model, job_config)
    if parallel_dims.fsdp_enabled:
        apply_fsdp(model, parallel_dims, job_config)
    elif parallel_dims.dp_replicate_enabled:
        apply_ddp(model, parallel_dims, job_config)
    elif parallel_dims.tp_enabled and not parallel_dims.pp_enabled:  # a pipeline does it at the end of its schedule
        reduce_after_backward(model, every=run_plan(job_config, parallel_dims.world_size).accumulation_steps)
    apply_precision(model, parallel_dims, job_config)
    return model


def _recomputes_compiled_blocks(parallel_dims: ParallelDims, job_config: JobConfig) -> bool:
    """Whether recomputation runs a compiled block once more, instead of being compiled into it.

    As a rule the compiler sees the recomputation and fuses it with the backward pass. With tensor parallelism
    torch 2.13's partitioner then has to carry the device mesh over to the recomputed reduce-scatters, and fails an
    assertion about saved tensors. It does not where they are saved, as recomputation by op saves them.
    """
    options = job_config.activation_checkpoint
    by_op = options.mode == "selective" and options.selective_ac_option == "op"
    return parallel_dims.tp_enabled and not by_op


def _keep_compiled_code_apart(parallel_dims: ParallelDims) -> None:
    """Give this rank its own entries in the compiler's cache, which the ranks of a machine share.

    Under tensor parallelism ranks run different code: with different process groups, and with different sizes where
    they share the vocabulary unevenly. The cache tells neither apart (torch 2.13), so that one rank would be given
    another's code, in this run or in a later one of another layout.
    """
    dims = parallel_dims
    layout = f"{dims.pp}x{dims.dp_replicate}x{dims.dp_shard}x{dims.cp}x{dims.tp}"
    torch.compiler.config.cache_key_tag = f"rank {dist.get_rank()} of {layout}"


def apply_recomputation(model: CausalLM, job_config: JobConfig) -> None:
    """TorchTitan's activation checkpointing: whole blocks, every n-th block, or what is cheap to compute again."""
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiles_model(job_config),
            op_sac_save_list=_SAVED_OPS,
            base_folder=job_config.job.dump_folder,
        )


def apply_compile(model: CausalLM, job_config: JobConfig) -> None:
    """Compile block by block: the blocks are alike, so one compilation serves all. Names stay as they are."""
    if compiles_model(job_config):
        for block in model.blocks.values():
            block.compile(backend=job_config.compile.backend, fullgraph=True)


def apply_fsdp(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """FSDP2 over the shard axis, HSDP where there is a replicate axis too.

    One group a block. Everything else is the root group: embedding and head are one parameter and must be in one
    group, and the root, which is gathered first and used last, is where that costs nothing extra.
    """
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh: DeviceMesh = parallel_dims.get_mesh(axes)
    offload = CPUOffloadPolicy() if job_config.training.enable_cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy(job_config), offload_policy=offload)
    reshard = job_config.parallelism.fsdp_reshard_after_forward
    # In a pipeline every microbatch would gather the parameters again.
    reshard_blocks = reshard == "always" or (reshard == "default" and not parallel_dims.pp_enabled)
    for block in model.blocks.values():
        shard(block, reshard_after_forward=reshard_blocks)
    shard(model, reshard_after_forward=reshard == "always", shard_placement_fn=_columns_if_rows_are_uneven)
    _sum_gradients(model)
    logger.info("Applied %s over %s ranks", "HSDP" if len(axes) == 2 else "FSDP", mesh.size())


def _columns_if_rows_are_uneven(parameter: nn.Parameter) -> Shard | None:
    """Which dimension of a parameter FSDP shards: the first (None), or the second where tp does not divide the first.

    Where tensor-parallel ranks hold unequal numbers of rows and FSDP cuts these again, DTensor (torch 2.13) is wrong
    about which rows the last ranks have: neither initial weights nor checkpoints would fit.
    """
    if not isinstance(parameter, DTensor) or parameter.dim() != 2 or not parameter.placements[0].is_shard(0):
        return None
    return Shard(1) if parameter.shape[0] % parameter.device_mesh.size() else None


def apply_ddp(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Whole replicas: FSDP2's machinery with nothing sharded, since the older DDP can only average gradients."""
    mesh = parallel_dims.get_mesh("dp_replicate")
    # Alone, DDP runs under the trainer's autocast, which keeps the parameters as they are.
    alone = not (parallel_dims.tp_enabled or parallel_dims.pp_enabled)
    mp_policy = policy(job_config)
    if alone:
        mp_policy = MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype)
    for block in model.blocks.values():
        replicate(block, mesh=mesh, mp_policy=mp_policy)
    replicate(model, mesh=mesh, mp_policy=mp_policy)
    _sum_gradients(model)
    logger.info("Applied DDP over %s ranks", mesh.size())


def _sum_gradients(model: CausalLM) -> None:
    """Add gradients over ranks instead of averaging: the loss is already divided by the step's global token count.

    A divide factor of 1 alone would become NCCL's pre-multiplied sum, which gloo refuses.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
