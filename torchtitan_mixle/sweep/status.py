"""What became of a point: its status.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_mixle.sweep.points import write_json

PENDING = "pending"
REFUSED = "refused"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
OUT_OF_MEMORY = "out_of_memory"
TIMED_OUT = "timed_out"
INTERRUPTED = "interrupted"

LAUNCHED_TO_THE_END = (DONE, FAILED, OUT_OF_MEMORY, TIMED_OUT)
"""A point with one of these is not run again."""


@dataclass(frozen=True)
class Status:
    state: str = PENDING
    reason: str | None = None
    """In one line, where it is not done."""
    seconds: float | None = None
    """From the launch to the end, start-up included."""
    exit_code: int | None = None
    host: str | None = None
    pid: int | None = None
    """Of torchrun or srun on that host, while it runs."""
    started: str | None = None

    @property
    def ended(self) -> bool:
        return self.state in LAUNCHED_TO_THE_END


def read_status(folder: Path) -> Status:
    """A point without a readable status is pending: it was not launched, or not to an end."""
    content = read_json(folder / "status.json")
    known = Status.__dataclass_fields__
    if not isinstance(content, dict) or not isinstance(content.get("state"), str):
        return Status()
    return Status(**{key: value for key, value in content.items() if key in known})


def write_status(folder: Path, status: Status) -> None:
    """Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "status.json", asdict(status))


def read_json(path: Path) -> Any:
    """None where there is no such file, or not JSON in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
