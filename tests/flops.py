"""FLOPs of the graphs that a compiler runs.

The backward pass of attention counts as twice its forward pass: a fused kernel's own recomputation is left out.
"""

from functools import cache
from typing import Any

import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import flop_registry, sdpa_flop_count


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one operator call."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 2 * int(sdpa_flop_count(*(t.shape for t in args[1:4])))
    return 0


def graph_flops(graph: torch.fx.GraphModule) -> int:
    """FLOPs of one run of a graph of the compiler's."""
    total = 0
    for node in graph.graph.nodes:
        if node.op == "call_function":
            args = [arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg for arg in node.args]
            func = node.target
            # An operator that may draw random numbers is the argument of another that restores their state.
            inner = [i for i, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload)]
            if inner:
                func, args = args[inner[0]], args[inner[0] + 1 :]
            total += flops_of(func, args, node.kwargs, node.meta.get("val"))
    return total


@cache
def counting_backend() -> tuple[str, list[int]]:
    """The name of a compiler backend that runs graphs as they are, and the FLOPs of each run."""
    runs: list[int] = []

    def counting(graph: torch.fx.GraphModule, example: Any) -> Any:
        flops = graph_flops(graph)

        def run(*args: Any) -> Any:
            runs.append(flops)
            return graph.forward(*args)

        return make_boxed_func(run)

    partition = min_cut_rematerialization_partition  # the one of inductor
    register_backend(aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=partition), "count_flops")
    return "count_flops", runs
