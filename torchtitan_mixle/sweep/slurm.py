"""Points as one job array of SLURM: a task for each, on as many nodes as the sweep says."""

import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.sweep import status as states
from torchtitan_mixle.sweep.file import SweepFile
from torchtitan_mixle.sweep.points import Point, write_json
from torchtitan_mixle.sweep.prepare import give_up_on
from torchtitan_mixle.sweep.progress import Progress
from torchtitan_mixle.sweep.status import read_json, read_status

SCRIPT = Path(__file__).with_name("array.sbatch")
_POLL_S = 2.0
_SETTLE_S = 10.0  # a shared file system may show a status some seconds after its task has left the queue
_TIME_FOR_ENDING_S = 180  # beyond a point's own timeout, before SLURM ends the task


Task = tuple[str, int]
"""Id of an array, and the number in it."""


def submit(sweep: SweepFile, points: Sequence[Point]) -> dict[Task, Point]:
    """Submit the points as one array. Raises ConfigError with sbatch's words if it will not."""
    logs = sweep.folder / "slurm"
    logs.mkdir(exist_ok=True)
    tasks = logs / f"tasks-{len(list(logs.glob('tasks-*.json')))}.json"
    content = {"job": None, "folders": [str(point.folder(sweep.folder)) for point in points]}
    write_json(tasks, content)
    words = ["sbatch", "--parsable", *_options(sweep, len(points)), str(SCRIPT), str(tasks)]
    result = _ask(words, {"PYTHON": sys.executable} | os.environ)
    if result.returncode:
        tasks.unlink()
        raise ConfigError(f"{shlex.join(words)}: {result.stderr.strip()}")
    job = result.stdout.strip().split(";")[0]  # "id;cluster" where there are several
    write_json(tasks, content | {"job": job})
    return {(job, i): point for i, point in enumerate(points)}


def _options(sweep: SweepFile, n: int) -> list[str]:
    options: dict[str, object] = {
        "array": f"0-{n - 1}",
        "nodes": sweep.nodes,
        "time": math.ceil((sweep.timeout_seconds + _TIME_FOR_ENDING_S) / 60),
        "output": str(sweep.folder).replace("%", "%%") + "/slurm/%A_%a.txt",  # %a is sbatch's word
        "export": "ALL",
    }
    options |= sweep.slurm
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items() if value is not False]


def in_queue(sweep: SweepFile, points: Sequence[Point]) -> dict[Task, Point]:
    """Those of the points that earlier submissions still have in the queue."""
    by_folder = {str(point.folder(sweep.folder)): point for point in points}
    found: dict[Task, Point] = {}
    for path in sorted((sweep.folder / "slurm").glob("tasks-*.json")):
        content = read_json(path)
        if not isinstance(content, dict) or not content.get("job"):
            continue
        job, folders = content["job"], content["folders"]
        queued = _queued(job)
        if queued is None:
            raise ConfigError(f"squeue does not say what became of job {job} of this sweep; try again in a while")
        found |= {(job, i): by_folder[folders[i]] for i in queued if i < len(folders) and folders[i] in by_folder}
    return found


def wait(sweep: SweepFile, tasks: dict[Task, Point], progress: Progress) -> None:
    """Wait until every task's point has its last status, or the task has left the queue without one."""
    waiting = dict(tasks)
    gone_since: dict[Task, float] = {}
    while waiting:
        queued = {job: _queued(job) for job in {job for job, _ in waiting}}
        for task, point in list(waiting.items()):
            job, i = task
            folder = point.folder(sweep.folder)
            numbers = queued[job]
            if not _is_final(folder) and (numbers is None or i in numbers):
                continue
            if not _is_final(folder):
                if time.monotonic() - gone_since.setdefault(task, time.monotonic()) < _SETTLE_S:
                    continue
                _note_gone(sweep, task, folder)
            progress.ended(point.name, read_status(folder))
            del waiting[task]
        folders = {point.name: point.folder(sweep.folder) for point in waiting.values()}
        progress.running(*(name for name, folder in folders.items() if read_status(folder).state == states.RUNNING))
        if waiting:
            time.sleep(_POLL_S)


def _note_gone(sweep: SweepFile, task: Task, folder: Path) -> None:
    """A task has left the queue without a result; one that did not begin has been cancelled, and can still be run."""
    name = f"{task[0]}_{task[1]}"
    if read_status(folder).state == states.PENDING and not (sweep.folder / "slurm" / f"{name}.txt").exists():
        give_up_on(folder, f"task {name} was taken from the queue before it began", state=states.INTERRUPTED)
    else:
        give_up_on(folder, f"task {name} left the queue without a result; see slurm/{name}.txt")


def check_not_queued(sweep: SweepFile, points: Sequence[Point]) -> None:
    """Raise ConfigError if the array of an earlier --launcher slurm still has one of the points to run."""
    if shutil.which("squeue") is None:  # the sweep's folder is on a machine that has no part in that cluster
        return
    if tasks := in_queue(sweep, points):
        jobs = ", ".join(sorted({job for job, _ in tasks}))
        raise ConfigError(
            f"SLURM still has {len(tasks)} points of this sweep in its queue; scancel {jobs} first, "
            "or use --launcher slurm, which waits for them"
        )


def _is_final(folder: Path) -> bool:
    status = read_status(folder)
    return status.ended or status.state == states.INTERRUPTED


def _ask(words: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise ConfigError(f"--launcher slurm needs {words[0]}, which is not on the path; use --launcher local")
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def _queued(job: str) -> set[int] | None:
    """Numbers of the array's tasks that wait or run; None if SLURM does not answer just now."""
    words = ["squeue", "--noheader", "--array", "--format=%K %T", f"--jobs={job}"]
    result = _ask(words)
    if result.returncode:
        # A job that has left SLURM's memory is an error too, and the only one that will not pass.
        return set() if "Invalid job id" in result.stderr else None
    tasks = [line.split() for line in result.stdout.splitlines()]
    return {int(task[0]) for task in tasks if len(task) == 2 and task[0].isdigit() and task[1] not in _ENDED}


_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
)
