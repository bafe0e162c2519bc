"""Generation with the kept keys and values: token for token what comes without them, and what mixle's comes to."""

import itertools

import numpy as np
import pytest
import torch
from mixle.models.language_model import LM

from torchtitan_mixle.cli.generate import _text
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.generate import generate
from torchtitan_mixle.model.model import CausalLM, causal_attention
from torchtitan_mixle.model.weights import from_mixle

SHAPE = {"d_model": 32, "n_layer": 2, "n_head": 4, "block": 24}
VOCAB = 61
PROMPT = [5, 17, 3, 60, 0]


@pytest.fixture(scope="module")
def models() -> tuple[LM, CausalLM]:
    torch.manual_seed(3)
    lm = LM(VOCAB, **SHAPE)
    with torch.no_grad():
        for parameter in lm.module.parameters():
            parameter.normal_(0, 0.3)
        lm.module.pos.weight.mul_(5)  # or the likeliest token follows itself for ever
    ours = CausalLM(CausalLMArgs(vocab_size=VOCAB, **SHAPE))
    ours.load_state_dict(from_mixle(lm.module.state_dict(), SHAPE["n_head"]))
    return lm, ours


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "seed": 11},
        {"temperature": 2.0, "n_ids": 40, "seed": 2},
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 5], ids=["short", "longer than the block"])
def test_cache_changes_nothing(models: tuple[LM, CausalLM], settings: dict[str, float], prompt: list[int]) -> None:
    """60 tokens of a model of 24 positions: the window is full, and slides, for most of them."""
    kept = list(generate(models[1], prompt, 60, **settings))
    assert kept == list(generate(models[1], prompt, 60, cache=False, **settings))
    assert len(kept) == 60
    assert len(set(kept)) > 3 or not settings["temperature"]
    if "n_ids" in settings:
        assert max(kept) < settings["n_ids"]


def test_greedy_is_mixles_own(models: tuple[LM, CausalLM]) -> None:
    lm, ours = models
    assert PROMPT + list(generate(ours, PROMPT, 40, temperature=0.0)) == lm.generate(PROMPT, 40, greedy=True)


def test_cached_steps_cost_one_position_each(models: tuple[LM, CausalLM]) -> None:
    seen: list[int] = []
    hook = models[1].blocks["0"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    list(generate(models[1], PROMPT, 22))
    hook.remove()
    block = SHAPE["block"]
    assert seen == [len(PROMPT)] + [1] * (block - len(PROMPT)) + [block] * 2


def test_model_is_left_as_it_was(models: tuple[LM, CausalLM]) -> None:
    tokens = generate(models[1], PROMPT, 10)
    list(itertools.islice(tokens, 3))
    tokens.close()
    assert all(block.attn.attend is causal_attention for block in models[1].blocks.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_not_finite_says_nothing(temperature: float) -> None:
    model = CausalLM(CausalLMArgs(vocab_size=VOCAB, **SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        model.ln.weight[3] = torch.nan
    with pytest.raises(ConfigError, match="NaN or infinite numbers"):
        next(generate(model, PROMPT, 1, temperature=temperature))


def test_prompt_of_any_bytes() -> None:
    """Words of a shell that are no UTF-8 come as surrogates; a tokenizer of bytes takes what they stand for."""
    assert _text("é", any_bytes=False) == "é"
    assert _text("a\udcff", any_bytes=True) == b"a\xff"
    for prompt, any_bytes in (("a\udcff", False), ("\ud800", True)):
        with pytest.raises(ConfigError, match="--prompt is not UTF-8"):
            _text(prompt, any_bytes=any_bytes)


def test_draws_follow_the_model(models: tuple[LM, CausalLM]) -> None:
    """First tokens over many seeds against softmax(logits / temperature)."""
    logits = models[1](torch.tensor([PROMPT]))[0, -1]
    expected = torch.softmax(logits / 1.5, dim=0).detach().numpy()
    draws = [next(generate(models[1], PROMPT, 1, temperature=1.5, seed=seed)) for seed in range(1500)]
    counts = np.bincount(draws, minlength=VOCAB)
    bound = 5 * np.sqrt(1500 * expected * (1 - expected)) + 1
    assert (np.abs(counts - 1500 * expected) < bound).all()
    likeliest = set(np.argsort(expected)[-3:].tolist())
    assert {next(generate(models[1], PROMPT, 1, top_k=3, seed=seed)) for seed in range(60)} <= likeliest
