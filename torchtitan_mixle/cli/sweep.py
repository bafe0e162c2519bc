"""`torchtitan-mixle sweep`: every combination of a few settings, measured."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from torchtitan_mixle.cli.options import Flag
from torchtitan_mixle.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan_mixle.sweep.file import SweepFile
    from torchtitan_mixle.sweep.points import Point


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    /,
    launcher: Literal["local", "slurm"] = "local",
    dry_run: Flag = False,
    retry: Flag = False,
    no_wait: Flag = False,
) -> int:
    """Run the points of a sweep and report on them; started again, it continues. Exit code 1 if a point is not done.

    A point that cannot run is listed with the reason and not launched; one that fails, runs out of memory or takes too
    long is recorded as that, and the sweep goes on. Ctrl-C leaves a sweep that continues with the points that are left.

    Args:
        file: TOML file of the sweep; the README describes it.
        launcher: "local": one point after another on this machine; "slurm": all points as one job array.
        dry_run: List the points and what is wrong with any, and launch none.
        retry: Run those again that failed, ran out of memory or took too long.
        no_wait: With slurm: submit and leave; the same command without it waits and reports.
    """
    from torchtitan_mixle.sweep.file import read_sweep
    from torchtitan_mixle.sweep.prepare import load_points, only_one, write_sweep

    if no_wait and launcher != "slurm":
        raise ConfigError("--no-wait needs --launcher slurm: on this machine the sweep ends with its command")
    console = Console()
    plan = read_sweep(file)
    with console.status("checking the points"):
        points = load_points(plan, on_this_machine=launcher == "local")
    refused = sum(reason is not None for _, reason in points)
    console.print(
        f"{plan.path}: {len(points)} runs of {plan.world_size} processes ({refused} refused), in {plan.folder}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if dry_run:
        for point, reason in points:
            run = f" (run {point.repeat} of {plan.repeats})" if plan.repeats > 1 else ""
            console.print(f"{point.name}{run}: {reason or 'ready'}", markup=False, highlight=False, soft_wrap=True)
        return 0
    with only_one(plan.folder):
        pending = write_sweep(plan, points, retry=retry)
        ended = len(points) - len(pending) - refused
        if not _launch(plan, pending, launcher, console, ended, no_wait=no_wait):
            return 0
    return _report(plan.folder, console)


def _launch(
    plan: "SweepFile", pending: list["Point"], launcher: str, console: Console, earlier: int, *, no_wait: bool
) -> bool:
    """Whether there is something to report."""
    from torchtitan_mixle.sweep import slurm
    from torchtitan_mixle.sweep.local import run_here
    from torchtitan_mixle.sweep.progress import Progress

    if launcher == "local":
        slurm.check_not_queued(plan, pending)
        with Progress(console, len(pending), earlier=earlier) as progress:
            run_here(plan, pending, progress)
        return True
    tasks = slurm.in_queue(plan, pending)
    queued = {point.id for point in tasks.values()}
    if new := [point for point in pending if point.id not in queued]:
        submitted = slurm.submit(plan, new)
        console.print(f"submitted {len(submitted)} points as job {next(iter(submitted))[0]}", highlight=False)
        tasks |= submitted
    if no_wait:
        return False
    with Progress(console, len(tasks), earlier=earlier) as progress:
        slurm.wait(plan, tasks, progress)
    return True


def _report(folder: Path, console: Console) -> int:
    from torchtitan_mixle.report.report import write_report
    from torchtitan_mixle.sweep import status as states

    rows = write_report([folder], folder / "report", console)
    counts = Counter(rows["status"])
    return 0 if counts[states.DONE] + counts[states.REFUSED] == len(rows) else 1


def sweep_point(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    index: int | None = None,
    rendezvous: str | None = None,
    parent: int | None = None,
) -> int:
    """Run one point of a sweep, as the launchers do; exit code 0 if it is done.

    Args:
        folder: A point's folder, or with --index a sweep's tasks.json.
        index: Number of the point in tasks.json.
        rendezvous: HOST:PORT where the nodes of this SLURM job meet; unset: this machine alone.
        parent: End the point when this process, which must have started this one, has ended.
    """
    from torchtitan_mixle.sweep import status as states
    from torchtitan_mixle.sweep.run import Task, run_point
    from torchtitan_mixle.sweep.status import read_json

    if index is not None:
        tasks = read_json(folder)
        folders = tasks["folders"] if isinstance(tasks, dict) else []
        if not 0 <= index < len(folders):
            raise ConfigError(f"{folder} lists {len(folders)} points; there is no number {index}")
        folder = Path(folders[index])
    status = run_point(Task.read(folder), rendezvous=rendezvous, parent=parent)
    return 0 if status.state == states.DONE else 1
