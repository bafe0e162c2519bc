"""The order in which a pipeline's ranks act: what an action waits for, and which rank has a stage. Plain data."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """Kinds: F forward, B backward, or I and W for its two halves (gradients of inputs and of weights)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def rank_of_stage(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Stages are dealt out in turn, or there and back again."""
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


def needs(action: Action, last_stage: int) -> list[Action]:
    """What must be done before, on whatever rank; a whole backward pass counts as its half I (see `result`)."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    following = [Action(stage + 1, "I", microbatch)] if stage < last_stage else []
    return [Action(stage, "F", microbatch), *following]


def result(action: Action) -> Action:
    """What others wait for: of a backward pass, the gradients of inputs."""
    return Action(action[0], "I" if action[1] == "B" else action[1], action[2])


def in_turn(orders: Sequence[Sequence[Sequence[Action]]], last_stage: int) -> Iterator[tuple[int, Sequence[Action]]]:
    """(rank, actions) one step after the other, as the ranks can take them; what waits for ever does not come.

    `orders` holds each rank's steps: the actions of one begin together, when all that each of them needs is there.
    """
    done: set[Action] = set()
    position = [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(orders):
            while position[rank] < len(steps):
                step = steps[position[rank]]
                if not all(need in done for action in step for need in needs(action, last_stage)):
                    break
                done.update(map(result, step))
                position[rank] += 1
                progress = True
                yield rank, step
