"""Initial weights that are a function of (seed, parameter name) alone: any number of ranks starts from the same model.

The scheme is GPT-2's (Radford et al. 2019, section 2.3): N(0, 0.02), the projections that write to the residual stream
N(0, 0.02 / sqrt(2 L)), biases 0, norms 1.
"""

import hashlib
import math

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

STD = 0.02
_RESIDUAL_PROJECTIONS = ("attn.proj.weight", "mlp.2.weight")
# What torch wraps around a block leaves its mark in the parameters' names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A parameter's name in the bare model, whatever activation checkpointing or compile put around its module."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def init_parameters(model: nn.Module, *, n_layer: int, seed: int) -> None:
    """Draw every parameter of `model` in place, one full tensor at a time on the parameter's own device.

    Each rank draws the full tensor and keeps its slice: no communication, and no more than one full parameter in
    memory beside the model.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            full = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
            _draw(full, plain_name(name), n_layer=n_layer, seed=seed)
            local.copy_(_own_slice(full, parameter))


def _draw(full: Tensor, name: str, *, n_layer: int, seed: int) -> None:
    if name.endswith(".bias"):
        full.zero_()
    elif full.dim() == 1:  # a LayerNorm's weight
        full.fill_(1.0)
    else:
        std = STD / math.sqrt(2 * n_layer) if name.endswith(_RESIDUAL_PROJECTIONS) else STD
        generator = torch.Generator(device=full.device).manual_seed(_name_seed(name, seed))
        full.normal_(mean=0.0, std=std, generator=generator)


def _own_slice(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of `full` under the placements of `parameter`."""
    if not isinstance(parameter, DTensor):
        return full
    # src_data_rank=None: every rank already holds the full tensor, nothing is sent.
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def _name_seed(name: str, seed: int) -> int:
    if name == "head.weight":  # alone on a pipeline's last stage: the mirror of the first stage's embedding
        name = "tok.weight"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a generator takes a signed 64-bit seed
