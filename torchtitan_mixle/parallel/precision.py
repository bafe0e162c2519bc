"""The dtype that a layout computes in: what `training.mixed_precision_param` asks for, in every layout."""

import logging
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchtitan_mixle.model.model import CausalLM

logger = logging.getLogger(__name__)


def policy(job_config: JobConfig) -> MixedPrecisionPolicy:
    """FSDP2's: parameters are gathered in one dtype, gradients reduced in another."""
    training = job_config.training
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )


def apply_precision(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Say which dtype the model computes in and by what, and bring it about where nobody else does.

    FSDP2 casts the parameters it gathers, and so does DDP here. The trainer enters autocast for one process and for
    DDP alone, but for nothing where tensor or pipeline parallelism stands without them: there the model enters it.
    """
    dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    shares_model = parallel_dims.tp_enabled or parallel_dims.pp_enabled
    if parallel_dims.fsdp_enabled or (parallel_dims.dp_replicate_enabled and shares_model):
        means = "cast on gathering"
    elif dtype == torch.float32:
        means = "as stored"
    else:
        means = "autocast"
        if shares_model:
            _autocast(model, dtype)
    logger.info(
        "Computes in %s (%s); parameters are %s, gradients are reduced in %s",
        job_config.training.mixed_precision_param,
        means,
        job_config.training.dtype,
        job_config.training.mixed_precision_reduce,
    )


def _autocast(model: CausalLM, dtype: torch.dtype) -> None:
    forward: Any = torch.autocast(utils.device_type, dtype=dtype)(model.forward)
    model.forward = forward  # type: ignore[method-assign]
