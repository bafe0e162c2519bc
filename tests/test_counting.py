"""Closed forms against published figures and against counted tensors."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.jobs import job_config
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import FLAVORS, Flavor
from torchtitan_mixle.metrics.counting import count_parameters, flops_per_token, recomputed_flops_per_token
from torchtitan_mixle.metrics.hardware import DEVICES, find_device, peak_flops
from torchtitan_mixle.metrics.rates import recomputed_by
from torchtitan_mixle.model.args import CausalLMArgs, FlavorArgs
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.parallel.parallelize import apply_recomputation

# GPT-2: as released. MPT: the models of these shapes in llm-foundry's throughput tables.
PUBLISHED_EXACT = {
    "124M": 124_439_808,
    "355M": 354_823_168,
    "774M": 774_030_080,
    "1.5B": 1_557_611_200,
    "7B": 6_658_859_008,
    "13B": 12_853_954_560,
    "30B": 29_975_214_080,
    "70B": 64_862_437_376,
}
# Narayanan et al. 2021, table 1 (175B: the same paper's GPT-3), in billions to one decimal.
PUBLISHED_BILLIONS = {"1.7B": 1.7, "3.6B": 3.6, "7.5B": 7.5, "18B": 18.4, "39B": 39.1, "76B": 76.1, "145B": 145.6}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_EXACT.items())
def test_published_parameter_count(name: str, parameters: int) -> None:
    assert count_parameters(FLAVORS[name]) == parameters


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_published_billions(name: str, billions: float) -> None:
    assert round(count_parameters(FLAVORS[name]) / 1e9, 1) == billions


def test_175b() -> None:
    assert round(count_parameters(FLAVORS["175B"]) / 1e9) == 175


@pytest.mark.parametrize("name", FLAVORS)
def test_closed_form_equals_the_model(name: str) -> None:
    with torch.device("meta"):
        model = CausalLM(CausalLMArgs.from_flavor(FLAVORS[name]))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(FLAVORS[name])


def test_gpt2_small_flops_per_token() -> None:
    flops = flops_per_token(FLAVORS["124M"], 1024)
    assert flops.total == 854_438_400
    # 6N + 12LdT without the position table also counts biases and norms.
    n = count_parameters(FLAVORS["124M"]) - 1024 * 768
    assert 6 * n + 12 * 12 * 768 * 1024 == 855_166_464
    assert flops.causal_total == flops.total - 6 * 12 * 768 * 1024


def counted_flops(model: CausalLM, batch: int, seq_len: int) -> int:
    """Forward and backward pass; autograd through the unfused attention shows its matrix products one by one."""
    counter = FlopCounterMode(display=False)
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64, device=model.tok.weight.device)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if shape.n_layer > 24 else []) for name, shape in FLAVORS.items()],
)
def test_flops_equal_those_counted_in_a_step(name: str) -> None:
    """On the meta device, where a model of any size fits."""
    shape = FLAVORS[name]
    with torch.device("meta"):
        model = CausalLM(CausalLMArgs.from_flavor(shape))
    assert counted_flops(model, 2, shape.block) == flops_per_token(shape, shape.block).total * 2 * shape.block


SMALL = Flavor(vocab_size=61, d_model=32, n_layer=5, n_head=4, block=16)
RECOMPUTATION = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "full, stopped early": {"mode": "full", "early_stop": True},
    "every block": {"mode": "selective", "selective_ac_option": "1"},
    "every second block": {"mode": "selective", "selective_ac_option": "2"},
    "every third block, stopped early": {"mode": "selective", "selective_ac_option": "3", "early_stop": True},
    "no block": {"mode": "selective", "selective_ac_option": "6"},
}


def recomputing(options: dict[str, object]) -> tuple[CausalLM, int | None]:
    """A model on the meta device under activation checkpointing, and what the closed form says it computes again."""
    from torchtitan.distributed import activation_checkpoint

    activation_checkpoint._layer_sac_count = 0  # a process makes one model; this one makes many
    config = job_config({f"activation_checkpoint.{key}": value for key, value in options.items()})
    config.training.seq_len = SMALL.block
    args = CausalLMArgs.from_flavor(SMALL)
    with torch.device("meta"):
        model = CausalLM(args)
    apply_recomputation(model, config)
    return model, recomputed_by(config, args)


@pytest.mark.parametrize("name", RECOMPUTATION)
def test_recomputed_flops_equal_those_counted(name: str) -> None:
    model, recomputed = recomputing(RECOMPUTATION[name])
    assert recomputed is not None
    expected = flops_per_token(SMALL, SMALL.block).total + recomputed
    assert counted_flops(model, 2, SMALL.block) == expected * 2 * SMALL.block


class Calls(TorchDispatchMode):
    """Counts what is computed, below whatever hands out a saved result instead."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("early_stop", [False, True])
def test_recomputation_by_op_repeats_no_product(early_stop: bool) -> None:
    model, recomputed = recomputing({"mode": "selective", "selective_ac_option": "op", "early_stop": early_stop})
    assert recomputed == 0
    model = model.to_empty(device="cpu")
    model.init_weights()
    counter, calls = FlopCounterMode(display=False), Calls()
    with calls, counter:
        model(torch.zeros(2, SMALL.block, dtype=torch.int64)).sum().backward()
    flops = flops_per_token(SMALL, SMALL.block)
    assert counter.get_total_flops() == (flops.blocks + flops.head) * 2 * SMALL.block
    # The fused attention of a CPU, which has no FLOP formula.
    assert calls.count[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default] == SMALL.n_layer
    assert calls.count[torch.ops.aten.gelu.default] == 2 * SMALL.n_layer, "what is cheap runs again"


def test_recomputation_that_the_compiler_chooses_is_unknown() -> None:
    assert recomputed_flops_per_token(SMALL, 16, mode="memory_budget") is None


def test_recomputed_blocks_of_a_pipeline_are_counted_by_rank() -> None:
    """Seven blocks on two ranks: 4 + 3, every second of each is 2 + 1; of four stages too."""
    shape = Flavor(vocab_size=61, d_model=32, n_layer=7, n_head=4, block=16)
    for schedule in ("1F1B", "Interleaved1F1B"):
        config = job_config({"activation_checkpoint.mode": "selective", "training.seq_len": 16})
        config.activation_checkpoint.selective_ac_option = "2"
        config.parallelism.pipeline_parallel_degree = 2
        config.parallelism.pipeline_parallel_schedule = schedule
        config.parallelism.pipeline_parallel_first_stage_less_layers = 0
        config.parallelism.pipeline_parallel_last_stage_less_layers = 0
        assert recomputed_by(config, CausalLMArgs.from_flavor(shape)) == 3 * (24 * 32**2 + 4 * 32 * 16)


def test_flavors_are_handed_out_as_copies() -> None:
    args = FlavorArgs()
    args["debugmodel"].vocab_size = 1
    assert args["debugmodel"].vocab_size == 257
    assert dict(args).keys() == FLAVORS.keys()


def test_unknown_flavor_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"model\.flavor='125M' is unknown; use one of debugmodel, 124M, "):
        FlavorArgs()["125M"]
    assert "125M" not in FlavorArgs()


def test_heads_must_divide_the_width() -> None:
    args = CausalLMArgs(d_model=12, n_head=5)
    with pytest.raises(ConfigError, match=r"n_head=5 must divide d_model=12; near it, 2, 3, 4, 6 would"):
        args.validate()


PEAKS = {
    "NVIDIA H200": (989, 1979),
    "NVIDIA H200 NVL": (835, 1670),
    "NVIDIA H100 80GB HBM3": (989, 1979),
    "NVIDIA H100 NVL": (835, 1670),
    "NVIDIA H100 PCIe": (756, 1513),
    "NVIDIA A100-SXM4-80GB": (312, None),
    "NVIDIA A100-SXM4-40GB": (312, None),
    "NVIDIA A100 80GB PCIe": (312, None),
    "NVIDIA A100-PCIE-40GB": (312, None),
    "NVIDIA H20": (148, 296),
    "NVIDIA H800": (989, 1979),
    "NVIDIA GH200 480GB": (989, 1979),
    "NVIDIA GH200 144G HBM3e": (989, 1979),
    "NVIDIA B200": (2250, 4500),
    "NVIDIA B300 SXM6 AC": (2250, 4500),
    "NVIDIA GB200": (2500, 5000),
    "NVIDIA GB300": (2500, 5000),
    "NVIDIA L40": (181.05, 362),
    "NVIDIA L40S": (362.05, 733),
    "NVIDIA RTX A6000": (154.8, None),
    "NVIDIA GeForce RTX 4090": (165.2, 330.3),
    "NVIDIA GeForce RTX 5090": (209.5, 419),
    "AMD Instinct MI250X": (191.5, None),
    "AMD Instinct MI300X": (1307.4, 2614.9),
    "AMD Instinct MI325X": (1307.4, 2614.9),
    "AMD Instinct MI350X": (2306.9, 4613.7),
    "AMD Instinct MI355X": (2516.6, 5033.2),
}
UNKNOWN = (
    "AMD Instinct MI250X / MI250",  # one name, two peaks
    "NVIDIA H100 80GB HBM2e",  # the PCIe card's memory, under the SXM module's name
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-10C",
    "NVIDIA A100X",
    "NVIDIA A10",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a share of one
    "GRID A100D-20C",
    "NVIDIA A100-SXM-64GB",  # another number of units
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA RTX A1000",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA L4",
    "CPU x86_64",
    "cpu",
    "foo",
    "",
)


@pytest.mark.parametrize(("name", "tflops"), PEAKS.items())
def test_peak_is_the_devices_own(name: str, tflops: tuple[float, float | None]) -> None:
    bf16, fp8 = tflops
    assert peak_flops(name) == bf16 * 1e12
    assert peak_flops(name, float8=True) == (None if fp8 is None else fp8 * 1e12)


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_peak_for_another_device(name: str) -> None:
    assert find_device(name) is None
    assert peak_flops(name) is None


def test_no_row_of_the_table_is_out_of_line() -> None:
    """No figure with sparsity, in the wrong unit or for both directions slips in unnoticed."""
    for device in DEVICES:
        assert find_device(device.name) == device
        if device.fp8_tflops is not None:
            assert device.fp8_tflops / device.bf16_tflops == pytest.approx(2, rel=0.02), device
        assert 100 < device.bf16_tflops / device.memory_tb_per_s < 500 or device.name == "H20", device
        assert 24 <= device.memory_gb <= 288, device
        assert device.link_gb_per_s in (32, 64) or 200 <= device.link_gb_per_s <= 900, device
