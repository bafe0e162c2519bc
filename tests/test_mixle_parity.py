"""Our model against the mixle package's CausalLM: same weights, same ids, same numbers."""

import pytest
import torch
import torch.nn.functional as F
from mixle.models.transformer import build_causal_lm

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.model.weights import from_mixle, qkv_to_wqkv, to_mixle, wqkv_to_qkv

SHAPE = {"d_model": 48, "n_layer": 3, "n_head": 6, "block": 32}
VOCAB = 63


def mixle_and_ours(*, mup: bool = False) -> tuple[torch.nn.Module, CausalLM]:
    torch.manual_seed(0)
    reference = build_causal_lm(VOCAB, **SHAPE)
    with torch.no_grad():  # mixle's default init has zero biases nowhere to be seen to move; spread everything
        for parameter in reference.parameters():
            parameter.normal_(0, 0.2)
        if mup:
            reference.mup_output_multiplier.fill_(0.37)
            for block in reference.blocks:
                block.attn.mup_attention = True
    ours = CausalLM(CausalLMArgs(vocab_size=VOCAB, **SHAPE, mup_attention=mup))
    missing = ours.load_state_dict(from_mixle(reference.state_dict(), SHAPE["n_head"]))
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    return reference, ours


@pytest.mark.parametrize("mup", [False, True])
def test_logits_loss_and_every_gradient(mup: bool) -> None:
    reference, ours = mixle_and_ours(mup=mup)
    tokens, labels = torch.randint(VOCAB, (2, 3, 29))
    expected = reference(tokens, return_all_logits=True)
    logits = ours(tokens)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    losses = [F.cross_entropy(x.flatten(0, 1), labels.flatten()) for x in (logits, expected)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.backward()
    gradients = to_mixle({name: p.grad for name, p in ours.named_parameters()}, SHAPE["n_head"])
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_positions_are_global() -> None:
    reference, ours = mixle_and_ours()
    tokens = torch.randint(VOCAB, (2, 5))
    positions = torch.tensor([3, 1, 4, 15, 9])
    expected = reference(tokens, position_ids=positions, return_all_logits=True)
    torch.testing.assert_close(ours(tokens, positions), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(tokens, positions.expand(2, -1)), expected, atol=1e-5, rtol=1e-5)


def test_state_dict_round_trip_is_bitwise_and_keeps_the_tie() -> None:
    reference, ours = mixle_and_ours()
    back = to_mixle(ours.state_dict(), SHAPE["n_head"])
    assert back.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(back[name], value), name
    assert ours.head.weight is ours.tok.weight


def test_wqkv_rows_are_whole_heads() -> None:
    n_head, head_dim = 3, 4
    rows = torch.arange(3 * n_head * head_dim)
    q, k, v = rows.chunk(3)
    per_head = qkv_to_wqkv(rows, n_head).chunk(n_head)
    for head, share in enumerate(per_head):
        own = slice(head * head_dim, (head + 1) * head_dim)
        assert torch.equal(share, torch.cat([q[own], k[own], v[own]]))
    assert torch.equal(wqkv_to_qkv(qkv_to_wqkv(rows, n_head), n_head), rows)
    with pytest.raises(ConfigError, match="36 rows does not hold q, k and v of n_head=5"):
        qkv_to_wqkv(rows, 5)
