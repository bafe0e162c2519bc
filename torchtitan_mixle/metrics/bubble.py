"""The pipeline bubble: the share of their time that a schedule's ranks spend waiting. Plain data: no torch here."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchtitan_mixle.planning.order import Action, in_turn, needs, result

_KINDS = "FBIW"

RERUNS = {"F": 0, "B": 1, "I": 1, "W": 6}
"""How often each kind of action runs a checkpointed block's forward pass again.

torch 2.13 goes through the graph once for the gradients of inputs, and then once for the weights of each norm and each
linear layer by themselves, and every time computes the whole block that they are in.
"""


def costs(recomputed: float = 0.0) -> dict[str, float]:
    """Time of each kind of action in forward passes.

    A backward pass is two: one for the gradients of inputs, one for those of weights. `recomputed` is the share of a
    forward pass that is run again each time that one is.
    """
    computed = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    return {kind: cost + RERUNS[kind] * recomputed for kind, cost in computed.items()}


def reruns_by_stage(orders: Sequence[Sequence[Action]]) -> dict[int, float]:
    """How often a checkpointed block of each stage is run again per microbatch, on average.

    The first stage has no inputs to split off: its W is the whole backward pass.
    """
    actions = [action for order in orders for action in order]
    microbatches = Counter(stage for stage, kind, _ in actions if kind == "F")
    whole = RERUNS | {"I": 0, "W": 1}
    reruns = dict.fromkeys(microbatches, 0)
    for stage, kind, _ in actions:
        reruns[stage] += (RERUNS if stage else whole)[kind]
    return {stage: runs / microbatches[stage] for stage, runs in reruns.items()}


def bubble_share(orders: Sequence[Sequence[Action]], recomputed: float = 0.0) -> float:
    """1 - busy time / (ranks x time until the last is done), if all stages are alike and sending costs nothing.

    `orders` holds each rank's actions in the order it runs them: an action begins when its rank is free and what it
    needs is there. `recomputed` is as in `costs`. Raises ValueError for orders that cannot be run to their end.
    """
    cost = costs(recomputed)
    last = max((stage for order in orders for stage, _, _ in order), default=0)
    done: dict[Action, float] = {}
    clock = [0.0] * len(orders)
    busy, taken = 0.0, 0
    for rank, (action,) in in_turn([[(action,) for action in order] for order in orders], last):
        clock[rank] = max([clock[rank], *(done[need] for need in needs(action, last))]) + cost[action[1]]
        done[result(action)] = clock[rank]
        busy += cost[action[1]]
        taken += 1
    if taken < sum(map(len, orders)):
        raise ValueError("these orders would wait for ever")
    return 1 - busy / (len(orders) * max(clock)) if busy else 0.0


def one_stage_bubble(ranks: int, microbatches: int) -> float:
    """The share for GPipe and 1F1B, which wait equally long (Narayanan et al. 2021, section 2.2)."""
    return (ranks - 1) / (microbatches + ranks - 1)


def actions_of(schedule: Any) -> list[list[Action]]:
    """What each rank computes, in order, under one of torch's schedules of several stages a rank."""
    table = schedule.pipeline_order
    return [_plain(table[rank]) for rank in sorted(table)]


def _plain(order: Sequence[Any]) -> list[Action]:
    """Without pauses and communication, which follow from the rest; overlapped pairs one after the other."""
    single = [part for action in order if action is not None for part in (action.sub_actions or (action,))]
    return [
        Action(part.stage_index, part.computation_type.value, part.microbatch_index)
        for part in single
        if part.computation_type.value in _KINDS
    ]
