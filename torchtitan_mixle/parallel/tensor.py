"""Tensor parallelism with sequence parallelism, as a table of what is shared how (Korthikanti et al. 2022).

Attention is shared by whole heads and the MLP by hidden units: a column-parallel linear, then a row-parallel one. There
activations are whole sequences; everywhere else (residuals, norms, the position table) each rank has T/tp tokens. The
tied matrix is shared by vocabulary rows. Per block and direction that is two all-gathers and two reduce-scatters.
"""

from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan_mixle.model.model import CausalLM

SEQUENCE = Shard(1)
"""Each rank has T/tp tokens of (B, T, d)."""


def block_plan() -> dict[str, ParallelStyle]:
    """Module of a block -> how it is shared."""
    return {
        "ln1": SequenceParallel(),
        "attn": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
        "attn.wqkv": ColwiseParallel(),
        "attn.proj": RowwiseParallel(output_layouts=SEQUENCE),
        "ln2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=SEQUENCE),
    }


def outer_plan(*, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Module outside the blocks -> how it is shared. With `loss_parallel` each rank keeps its columns of the logits."""
    return {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "pos": OwnPositions(),
        "ln": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(
            input_layouts=SEQUENCE,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


def apply_tp(model: CausalLM, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Share `model` over the ranks of `mesh` (1-D). Parameters become DTensors under the same names."""
    outer = outer_plan(loss_parallel=loss_parallel)
    # A pipeline stage has not all of the modules.
    parallelize_module(model, mesh, {name: style for name, style in outer.items() if getattr(model, name) is not None})
    for block in model.blocks.values():
        parallelize_module(block, mesh, block_plan())
    model.tie_weights()  # sharding replaced embedding and head one by one


class OwnPositions(ParallelStyle):
    """The position table, whole on every rank: each looks up the rows of its own tokens, without communication."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._own, output_fn=self._local)

    @staticmethod
    def _own(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        """Positions (T,) or (B, T), the same on all ranks -> this rank's part of them."""
        positions = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return positions.redistribute(placements=[Shard(positions.dim() - 1)])

    @staticmethod
    def _local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        """Rows (T/tp, d) or (B, T/tp, d) as a plain tensor."""
        return output.to_local()
