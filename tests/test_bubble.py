"""The pipeline bubble: torch's own schedules against the closed forms of their papers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from torchtitan_mixle.metrics.bubble import Action, actions_of, bubble_share, one_stage_bubble, reruns_by_stage


def order_of_1f1b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Narayanan et al. 2019: fill up, then one forward and one backward in turn, then drain."""
    ahead = ranks - 1 - rank
    forward = [(rank, "F", i) for i in range(microbatches)]
    backward = [(rank, "B", i) for i in range(microbatches)]
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return forward[:ahead] + steady + backward[microbatches - ahead :]


def order_of_gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    return [(rank, kind, i) for kind in "FB" for i in range(microbatches)]


@pytest.mark.parametrize("recomputed", [0.0, 1.0])
@pytest.mark.parametrize("order", [order_of_1f1b, order_of_gpipe])
def test_one_stage_a_rank(order: Any, recomputed: float) -> None:
    for ranks, microbatches in ((2, 2), (2, 8), (4, 8), (8, 64)):
        orders = [order(rank, ranks, microbatches) for rank in range(ranks)]
        expected = one_stage_bubble(ranks, microbatches)
        assert bubble_share(orders, recomputed) == pytest.approx(expected)
        assert expected == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def torch_schedule(name: str, ranks: int, microbatches: int) -> Any:
    """Torch's schedule of that name, of two stages a rank, as rank 0 holds it."""
    last = 2 * ranks - 1
    of_rank_0 = (0, last) if name in ("ZBVZeroBubble", "DualPipeV") else (0, ranks)
    stages = [
        SimpleNamespace(
            stage_index=i,
            num_stages=2 * ranks,
            group_size=ranks,
            group_rank=0,
            is_first=i == 0,
            is_last=i == last,
            has_backward=True,
            device=torch.device("cpu"),
            submod=torch.nn.Identity(),
            group=None,
        )
        for i in of_rank_0
    ]
    build = schedules.get_schedule_class(name)
    return build(stages, n_microbatches=microbatches, loss_fn=lambda *_: None, scale_grads=False)


@pytest.mark.parametrize("recomputed", [0.0, 1.0])
@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B"])
def test_several_stages_a_rank(name: str, recomputed: float) -> None:
    """Narayanan et al. 2021, section 2.2: interleaving over v stages a rank divides the bubble by v."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16)):
        orders = actions_of(torch_schedule(name, ranks, microbatches))
        expected = (ranks - 1) / (2 * microbatches + ranks - 1)
        assert bubble_share(orders, recomputed) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_zero_bubble(name: str) -> None:
    """With W to fill the gaps, each rank waits for (p - 1) forward passes at most, of 6 m it computes."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16)):
        orders = actions_of(torch_schedule(name, ranks, microbatches))
        share = bubble_share(orders)
        assert 0 < share <= (ranks - 1) / (6 * microbatches + ranks - 1) + 1e-12
        assert all(sum(kind == "F" for _, kind, _ in order) == 2 * microbatches for order in orders)


def test_a_split_backward_pass_runs_a_block_again_for_each_part() -> None:
    """Six weights after the inputs; the first stage's W is the whole backward pass, and so is a B."""
    orders = [
        [(0, "F", 0), (0, "I", 0), (0, "W", 0)],
        [(1, "F", 0), (1, "F", 1), (1, "I", 0), (1, "W", 0), (1, "B", 1)],
    ]
    assert reruns_by_stage(orders) == {0: 1, 1: (1 + 6 + 1) / 2}
    alone = [[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "I", 0), (1, "W", 0)]]
    # Rank 1 has 1 + 1.5 + 4 of work, rank 0 1 + 2.5; it ends at 1 + 1 + 1.5 + 4.
    assert bubble_share(alone, 0.5) == pytest.approx(1 - (3.5 + 6.5) / (2 * 7.5))


def test_orders_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match="wait for ever"):
        bubble_share([[(0, "B", 0), (0, "F", 0)], [(1, "F", 0), (1, "B", 0)]])
    assert bubble_share([[(0, "F", 0), (0, "B", 0)]]) == 0
