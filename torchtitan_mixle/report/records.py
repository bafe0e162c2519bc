"""Sweeps and runs as rows of a table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.metrics.records import read_records
from torchtitan_mixle.sweep import status as states
from torchtitan_mixle.sweep.status import Status, read_json, read_status

SPREAD = ("tokens_per_second", "mfu_pct", "tflops_per_device", "step_seconds")
"""Figures with their 10th and 90th percentile."""
MEDIANS = ("mfu_causal_pct", "hfu_pct", "data_loading_pct", "bubble_pct", "memory_gib")


@dataclass
class Run:
    """A point of a sweep with all its repeats, or a single run."""

    name: str
    statuses: list[Status] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of each run."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """The run.json of each."""
    folders: list[Path] = field(default_factory=list)
    warmup: int = 0
    world_size: int | None = None
    sweep: str = ""

    def add(self, folder: Path, status: Status) -> None:
        record = read_json(folder / "run.json")
        self.folders.append(folder)
        self.statuses.append(status)
        self.records.append(read_records(folder))
        self.facts.append(record if isinstance(record, dict) else {})

    def steady(self) -> list[dict[str, Any]]:
        """Reports after warm-up, without the first, compiling one; a sweep's runs must have come to their end."""
        return [
            record
            for status, records in zip(self.statuses, self.records, strict=True)
            if status.state == states.DONE or not self.sweep
            for record in records
            if int(record["step"]) - (record.get("steps") or 1) >= self.warmup and not record.get("first_step")
        ]

    def row(self) -> dict[str, Any]:
        """One row; None where there is no figure."""
        worst = next((s for s in self.statuses if s.state != states.DONE), self.statuses[0])
        done = [status.state for status in self.statuses].count(states.DONE)
        layout = self._fact("layout")
        steady = self.steady()
        last = [records[-1] for records in self.records if records]
        row: dict[str, Any] = {
            "sweep": self.sweep,
            "name": self.name,
            "layout": layout.get("name"),
            "processes": self.world_size or layout.get("world_size"),
            "device": self._fact("device").get("name"),
            "status": worst.state,
            "reason": worst.reason,
            "runs_done": done,
            "runs": len(self.statuses),
            "reports": len(steady),
            "steps": int(last[0]["step"]) if last else 0,
            "loss": last[0].get("loss") if last else None,
        }
        for key in SPREAD:
            values = _values(steady, key)
            marks = (50, 10, 90)
            low_to_high = [float(x) for x in np.percentile(values, marks)] if values else [None] * 3
            row |= dict(zip((key, f"{key}_p10", f"{key}_p90"), low_to_high, strict=True))
        for key in MEDIANS:
            values = _values(steady, key)
            row[key] = float(np.median(values)) if values else None
        return row | {"folder": str(self.folders[0])}

    def _fact(self, key: str) -> dict[str, Any]:
        found = (facts[key] for facts in self.facts if isinstance(facts.get(key), dict))
        return next(found, {})


def _values(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(record[key]) for record in records if isinstance(record.get(key), int | float)]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The points and runs in folders of sweeps and of runs. Raises ConfigError for a folder that is neither."""
    runs: list[Run] = []
    for folder in {folder.resolve(): folder for folder in folders}.values():  # a folder that is named twice, once
        if (folder / "sweep.json").is_file():
            runs += _read_sweep(folder)
        elif (folder / "metrics.jsonl").is_file() or (folder / "run.json").is_file():
            runs.append(_read_run(folder))
        else:
            raise ConfigError(
                f"{folder} is neither a sweep's folder (with a sweep.json) nor a run's (with a metrics.jsonl)"
            )
    if not runs:
        raise ConfigError("there is nothing to report on; name folders of sweeps or of runs")
    _tell_apart(runs)
    return runs


def _read_sweep(folder: Path) -> list[Run]:
    try:
        sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        warmup = int(sweep["warmup"])
        by_name: dict[str, Run] = {}
        for point in sweep["points"]:
            blank = Run(point["name"], warmup=warmup, world_size=sweep["world_size"], sweep=sweep["name"])
            run = by_name.setdefault(point["name"], blank)
            place = folder / point["folder"]
            run.add(place, read_status(place))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'sweep.json'} cannot be read: {error!r}; run the sweep again") from None
    return list(by_name.values())


def _read_run(folder: Path) -> Run:
    """A single run: what became of it is in its run.json, unless it was killed or goes on."""
    run = Run(folder.resolve().name)
    run.add(folder, Status(states.DONE))
    last = int(run.records[0][-1]["step"]) if run.records[0] else 0
    wanted = _steps_of(run.facts[0])
    of = "" if wanted is None else f" of {wanted}"
    ended = run.facts[0].get("ended")
    if ended == "failed":
        run.statuses[0] = Status(states.FAILED, f"failed after step {last}{of}")
    elif ended == "stopped":
        run.statuses[0] = Status(states.DONE, f"stopped at step {last}{of}")
    elif not last:
        run.statuses[0] = Status(states.PENDING, f"has no readable step{of} in its metrics.jsonl")
    elif wanted is not None and last < wanted:
        run.statuses[0] = Status(states.DONE, f"has {last}{of} steps")
    return run


def _steps_of(facts: dict[str, Any]) -> int | None:
    """How many steps the run was to take; None where its run.json does not say."""
    place: Any = facts
    for key in ("config", "training", "steps"):
        place = place.get(key) if isinstance(place, dict) else None
    return place if isinstance(place, int) else None


def _tell_apart(runs: list[Run]) -> None:
    """Names that are used twice get their sweep, or their folder, before them."""
    names = [run.name for run in runs]
    for run, name in zip(runs, names, strict=True):
        if names.count(name) > 1:
            run.name = f"{run.sweep or run.folders[0].resolve().parent.name}: {name}"
    names = [run.name for run in runs]
    for run, name in zip(runs, names, strict=True):
        if names.count(name) > 1:
            run.name = f"{name} ({run.folders[0]})"


def table_of(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each point or run."""
    return pd.DataFrame([run.row() for run in runs])
