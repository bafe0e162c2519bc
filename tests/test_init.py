"""Initial weights: a function of the seed and the name, with GPT-2's spread."""

import math

import pytest
import torch
from torch.testing import assert_close

from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.init import STD, plain_name
from torchtitan_mixle.model.model import CausalLM


def fresh(seed: int = 0, **overrides: int) -> CausalLM:
    with torch.device("meta"):
        model = CausalLM(CausalLMArgs(seed=seed, **overrides))
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def test_materialising_keeps_the_tie_and_fills_the_buffer() -> None:
    model = fresh()
    assert model.head.weight is model.tok.weight
    assert model.mup_output_multiplier.item() == 1.0
    parameters = [name for name, _ in model.named_parameters()]
    assert sorted(model.state_dict()) == sorted([*parameters, "head.weight", "mup_output_multiplier"])


def test_spread_of_each_kind() -> None:
    model = fresh()
    n_layer = model.model_args.n_layer
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif ".ln" in name or name.startswith("ln"):
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attn.proj.weight", "mlp.2.weight"))
            std = STD / math.sqrt(2 * n_layer) if residual else STD
            assert_close(parameter.std().item(), std, rtol=0.03, atol=0, msg=name)
            assert abs(parameter.mean().item()) < std / 20, name


def test_same_seed_same_weights_and_no_two_parameters_alike() -> None:
    first, again, other = fresh(1), fresh(1), fresh(2)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.std() > 0:
            assert not torch.equal(a, c), name
    blocks = first.blocks
    assert not torch.equal(blocks["0"].attn.wqkv.weight, blocks["2"].attn.wqkv.weight)
    half = first.tok.weight.shape[0] // 2
    assert not torch.equal(first.tok.weight[:half], first.tok.weight[half : 2 * half])


def test_the_global_generator_does_not_matter() -> None:
    torch.manual_seed(1)
    first = fresh()
    torch.manual_seed(2)
    assert torch.equal(first.pos.weight, fresh().pos.weight)


@pytest.mark.parametrize(
    "wrapped",
    ["blocks.0._checkpoint_wrapped_module.attn.wqkv.weight", "_orig_mod.blocks.0.attn.wqkv.weight"],
)
def test_wrappers_leave_the_name(wrapped: str) -> None:
    assert plain_name(wrapped) == "blocks.0.attn.wqkv.weight"
