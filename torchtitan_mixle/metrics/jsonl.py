"""One JSON object a line, each step once, across any number of starts of the same run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_mixle.whole_file import write_whole


class StepLog:
    """Appends records that have a "step" to a file.

    `start_at` tells where this start of the run resumed (without it, the first record does): records of that step or a
    later one were made by a start that was cut off after its last checkpoint, and move to `<name>.superseded.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record at once, so that a killed run loses none. Infinities and NaN become null (JSON has none)."""
        self.start_at(int(record["step"]))
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def start_at(self, step: int) -> None:
        """Clear the way for records from `step` on; only the first call does something."""
        if not self._started:
            self._supersede_from(step)
            self._started = True

    def _supersede_from(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        kept = [line for line in lines if _step_of(line) < step]
        dropped = [line for line in lines if _step_of(line) >= step]
        if not dropped and (text.endswith("\n") or not text):
            return
        with self.path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in dropped)
        write_whole(self.path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    """The record's step; a line that a crash cut short counts as later than any step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
