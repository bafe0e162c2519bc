"""A pipeline schedule in a CSV file: one line a rank, one cell an action, as torch writes and reads it.

An action is `<stage><kind><microbatch>`, for example 1F0: F forward, B backward, or I and W for its two halves (the
gradients of inputs and of weights). `(1F2;0B1)OVERLAP_F_B` is a pair, and an empty cell a pause.
"""

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.planning.order import Action, in_turn, rank_of_stage

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True)
class FileSchedule:
    """What a file says."""

    name: str
    """For messages: the TOML key with its value."""
    cells: list[list[tuple[Action, ...]]]
    """By rank, in order: one action, two that overlap, or none."""

    @property
    def actions(self) -> list[list[Action]]:
        """By rank, in order, overlapping ones one after the other."""
        return [[action for cell in row for action in cell] for row in self.cells]

    @property
    def n_stages(self) -> int:
        return 1 + max(action.stage for row in self.actions for action in row)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind in "IW" for row in self.actions for action in row)

    @property
    def v_shaped(self) -> bool:
        """Whether rank r has stages r and 2 pp - 1 - r."""
        pp = len(self.actions)
        return pp > 1 and self._stages(0) == {0, 2 * pp - 1}

    def _stages(self, rank: int) -> set[int]:
        return {action.stage for action in self.actions[rank]}

    def check(self, *, pp: int, microbatches: int) -> None:
        """Raise ConfigError unless `pp` ranks can run the file to its end, each stage with each microbatch."""
        if len(self.actions) != pp:
            raise ConfigError(
                f"{self.name} has {len(self.actions)} lines, and pipeline_parallel_degree={pp} needs one a rank"
            )
        self._check_placement()
        for stage in range(self.n_stages):
            self._check_microbatches(stage, microbatches)
        self._check_order()

    def _check_placement(self) -> None:
        """TorchTitan deals stages out in turn, or there and back again."""
        pp, n = len(self.actions), self.n_stages
        for rank in range(pp):
            expected = {stage for stage in range(n) if rank_of_stage(stage, pp, v_shaped=self.v_shaped) == rank}
            if self._stages(rank) != expected or n % pp:
                here = ", ".join(map(str, sorted(self._stages(rank)))) or "none"
                raise ConfigError(
                    f"{self.name} runs stages {here} of {n} on rank {rank}; stages must be dealt out in turn (rank r "
                    f"has r, r + {pp}, ...) or in a V (rank r has r and {2 * pp - 1} - r)"
                )

    def _check_microbatches(self, stage: int, microbatches: int) -> None:
        row = [action for row in self.actions for action in row if action.stage == stage]
        wanted = set(range(microbatches))
        forward = [action.microbatch for action in row if action.kind == "F"]
        if sorted(forward) != sorted(wanted):
            raise ConfigError(
                f"{self.name} runs {len(forward)} microbatches forward on stage {stage}, and the job makes "
                f"{microbatches} (local_batch_size / microbatch size), each once; change one of them"
            )
        inputs = sorted(action.microbatch for action in row if action.kind in "BI")
        weights = sorted(action.microbatch for action in row if action.kind in "BW")
        if inputs != sorted(wanted) or weights != sorted(wanted):
            raise ConfigError(
                f"{self.name} does not run each microbatch of stage {stage} backward once: B, or I and W, for each of "
                f"0 to {microbatches - 1}"
            )

    def _check_order(self) -> None:
        """Run the file in thought: whatever waits for ever here would do so on the ranks."""
        taken = Counter(rank for rank, _ in in_turn(self.cells, self.n_stages - 1))
        waiting = [(rank, row[taken[rank]]) for rank, row in enumerate(self.cells) if taken[rank] < len(row)]
        stuck = [f"{' with '.join(map(str, cell))} on rank {rank}" for rank, cell in waiting]
        if stuck:
            raise ConfigError(
                f"{self.name} cannot be run to its end: {', '.join(stuck)} would wait for ever; reorder it"
            )


def read_schedule(path: str) -> FileSchedule:
    """The schedule in a CSV file. Raises ConfigError for what is not one."""
    name = f"parallelism.pipeline_parallel_schedule_csv={path!r}"
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{name} cannot be read ({reason}); give a CSV file, or unset the key") from None
    cells = [[tuple(_actions(cell.strip(), name)) for cell in row] for row in rows]
    if not any(any(row) for row in cells):
        raise ConfigError(f"{name} has no actions; give one line a rank, with cells like 0F0")
    return FileSchedule(name, cells)


def _actions(cell: str, name: str) -> list[Action]:
    pair = _PAIR.fullmatch(cell)
    result = []
    for text in pair.groups() if pair else [cell] * bool(cell):
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{name} has a cell {cell!r}; actions are <stage><F, B, I or W><microbatch> like 1F0, and what is sent "
                f"and received follows from them"
            )
        result.append(Action(int(match[1]), match[2], int(match[3])))
    return result
