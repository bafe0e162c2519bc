"""Named model sizes as plain data; the keys of the same names in `[mixle]` override a flavor's numbers."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Flavor:
    """The five numbers that fix a CausalLM's parameters."""

    vocab_size: int
    d_model: int
    n_layer: int
    n_head: int
    block: int
    """Rows of the position table: the longest sequence."""


SIZES = tuple(field.name for field in fields(Flavor))
"""The names of the five."""


_GPT2 = {"vocab_size": 50257, "block": 1024}
_MEGATRON = {"vocab_size": 51200, "block": 2048}
_MPT = {"vocab_size": 50368, "block": 2048}

FLAVORS: dict[str, Flavor] = {
    # 256 bytes and an end-of-document token: fits the python_stdlib data set.
    "debugmodel": Flavor(vocab_size=257, d_model=128, n_layer=4, n_head=8, block=512),
    # GPT-2 (Radford et al. 2019), sizes as released.
    "124M": Flavor(d_model=768, n_layer=12, n_head=12, **_GPT2),
    "355M": Flavor(d_model=1024, n_layer=24, n_head=16, **_GPT2),
    "774M": Flavor(d_model=1280, n_layer=36, n_head=20, **_GPT2),
    "1.5B": Flavor(d_model=1600, n_layer=48, n_head=25, **_GPT2),
    # Megatron-LM's weak-scaling table (Narayanan et al. 2021, table 1; 175B is GPT-3's shape in the same paper).
    "1.7B": Flavor(d_model=2304, n_layer=24, n_head=24, **_MEGATRON),
    "3.6B": Flavor(d_model=3072, n_layer=30, n_head=32, **_MEGATRON),
    "7.5B": Flavor(d_model=4096, n_layer=36, n_head=32, **_MEGATRON),
    "18B": Flavor(d_model=6144, n_layer=40, n_head=48, **_MEGATRON),
    "39B": Flavor(d_model=8192, n_layer=48, n_head=64, **_MEGATRON),
    "76B": Flavor(d_model=10240, n_layer=60, n_head=80, **_MEGATRON),
    "145B": Flavor(d_model=12288, n_layer=80, n_head=96, **_MEGATRON),
    "175B": Flavor(d_model=12288, n_layer=96, n_head=96, **_MEGATRON),
    # MPT's sizes (llm-foundry).
    "7B": Flavor(d_model=4096, n_layer=32, n_head=32, **_MPT),
    "13B": Flavor(d_model=5120, n_layer=40, n_head=40, **_MPT),
    "30B": Flavor(d_model=7168, n_layer=48, n_head=56, **_MPT),
    "70B": Flavor(d_model=8192, n_layer=80, n_head=64, **_MPT),
}
