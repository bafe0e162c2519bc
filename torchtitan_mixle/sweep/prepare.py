"""From a sweep file to folders of points that are ready to run, or refused."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.sweep import status as states
from torchtitan_mixle.sweep.file import SweepFile
from torchtitan_mixle.sweep.points import Point, job_of, make_points, write_json, write_point
from torchtitan_mixle.sweep.status import Status, read_status, write_status

Check = Callable[[Any], str | None]


def load_points(sweep: SweepFile, *, on_this_machine: bool) -> list[tuple[Point, str | None]]:
    """Every point, with the reason why it cannot run, if so. Starts TorchTitan's config once for all (seconds)."""
    import torch
    from torchtitan.config import ConfigManager

    from torchtitan_mixle import startup
    from torchtitan_mixle.preflight import check_job

    try:
        base = ConfigManager().parse_args(["--job.config_file", str(sweep.config)])
    except (ValueError, TypeError, AttributeError) as error:
        raise startup.explain(error, error.__traceback__) or ConfigError(f"{sweep.config}: {error}") from error
    here = torch.accelerator.is_available()
    # Where a cluster's nodes will run it, it need not fit this machine: refuse what goes neither with GPUs nor without.
    kinds = [here] if on_this_machine else [here, not here]
    points = make_points(sweep, base)
    return [(point, _refusal(job_of(point, base), sweep.world_size, kinds, check_job)) for point in points]


def _refusal(job: Any, world_size: int, kinds: list[bool], check_job: Callable[..., None]) -> str | None:
    reasons = []
    for on_accelerator in kinds:
        try:
            check_job(job, world_size, on_accelerator=on_accelerator)
            return None
        except ConfigError as mistake:
            reasons.append(str(mistake))
    return reasons[0]


def write_sweep(sweep: SweepFile, points: list[tuple[Point, str | None]], *, retry: bool) -> list[Point]:
    """Write the sweep's folder; the points that are still to run, in order.

    What is done, or failed (unless `retry`), is left as it is, also by another version of the sweep file.
    """
    pending = []
    for point, refusal in points:
        folder = point.folder(sweep.folder)
        status = read_status(folder)
        if status.state == states.DONE or (status.ended and not retry):
            continue
        write_point(point, sweep)
        if refusal is not None:
            write_status(folder, Status(states.REFUSED, refusal))
            continue
        if status.state in (states.REFUSED, states.INTERRUPTED) or status.ended:
            write_status(folder, Status())
        pending.append(point)
    rows = [
        {"name": point.name, "folder": f"points/{point.id}", "values": point.values, "repeat": point.repeat}
        for point, _ in points
    ]
    facts = {"name": sweep.path.stem, "file": str(sweep.path.absolute()), "world_size": sweep.world_size}
    facts |= {"steps": sweep.steps, "warmup": sweep.warmup, "points": rows}
    write_json(sweep.folder / "sweep.json", facts)
    return pending


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder: a second sweep of it at the same time would run the same points."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the sweep's folder {folder} is a file; give another folder in the sweep file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "sweep.lock").exists():
        raise ConfigError(f"{folder} holds something else than a sweep; give another folder in the sweep file")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another sweep is running in {folder}; wait for it, or stop it") from None
        yield
    finally:
        os.close(lock)


def give_up_on(folder: Path, reason: str, *, state: str = states.FAILED) -> None:
    """Note that a point's launcher is gone without a word."""
    write_status(folder, replace(read_status(folder), state=state, reason=reason, pid=None))
