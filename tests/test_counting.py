"""Closed forms against published figures and against counted tensors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import FLAVORS, Flavor
from torchtitan_mixle.metrics.counting import count_parameters, flops_per_token
from torchtitan_mixle.metrics.hardware import peak_flops
from torchtitan_mixle.model.args import CausalLMArgs, FlavorArgs
from torchtitan_mixle.model.model import CausalLM

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


def test_flops_equal_those_counted_in_a_step() -> None:
    shape = Flavor(vocab_size=61, d_model=32, n_layer=3, n_head=4, block=16)
    batch, seq_len = 2, 16
    model = CausalLM(CausalLMArgs.from_flavor(shape))
    model.init_weights()
    counter = FlopCounterMode(display=False)
    # Autograd through the unfused attention shows its matrix products one by one.
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(torch.randint(61, (batch, seq_len))).sum().backward()
    assert counter.get_total_flops() == flops_per_token(shape, seq_len).total * batch * seq_len


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


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000", None),
        ("CPU x86_64", None),
        ("foo", None),
    ],
)
def test_peak_is_the_devices_own_or_none(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
