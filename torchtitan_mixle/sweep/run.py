"""Running one point to its end, whatever that is, and saying which in its status.json."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchtitan_mixle import failures
from torchtitan_mixle.errors import STOPPED, ConfigError
from torchtitan_mixle.metrics.records import read_records
from torchtitan_mixle.sweep import status as states
from torchtitan_mixle.sweep.processes import end_tree
from torchtitan_mixle.sweep.status import Status, read_json, write_status

_POLL_S = 0.2
_LOG_READ = 4 << 20  # bytes from either end of a log that are looked through


@dataclass(frozen=True)
class Task:
    """What is in a point's folder for whoever runs it."""

    folder: Path
    nodes: int
    nproc: int
    steps: int
    timeout_seconds: float

    @classmethod
    def read(cls, folder: Path) -> "Task":
        facts = read_json(folder / "point.json")
        if not isinstance(facts, dict):
            raise ConfigError(f"{folder} is not the folder of a sweep's point: it has no point.json")
        return cls(folder.resolve(), **{key: facts[key] for key in ("nodes", "nproc", "steps", "timeout_seconds")})

    def command(self, rendezvous: str | None) -> list[str]:
        """torchrun here, or by srun on every node of this SLURM job, which meet at `rendezvous` (host:port)."""
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={self.nproc}"]
        if rendezvous is None:
            words += ["--standalone"]
        else:
            step = [f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
            words = ["srun", *step, *words, f"--nnodes={self.nodes}"]
            words += ["--rdzv_backend=c10d", f"--rdzv_endpoint={rendezvous}", f"--rdzv_id={self.folder.name}"]
        return [*words, "-m", "torchtitan.train", "--job.config_file", str(self.folder / "config.toml")]


def run_point(task: Task, *, rendezvous: str | None = None, parent: int | None = None) -> Status:
    """Run a point; its last status. Ends it when its time is up, when this process is asked to end, or `parent` did."""
    if task.nodes > 1 and rendezvous is None:
        raise ConfigError(f"{task.folder} is a point of nodes={task.nodes}; run the sweep with --launcher slurm")
    asked = _Asked(parent)
    log = task.folder / "log.txt"
    began, clock = time.monotonic(), time.time()
    kills = failures.count_oom_kills()
    with log.open("ab") as output:
        start = output.tell()
        command = task.command(rendezvous)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    started = datetime.now(UTC).isoformat(timespec="seconds")
    status = Status(states.RUNNING, host=socket.gethostname(), pid=process.pid, started=started)
    try:
        write_status(task.folder, status)
        state = _wait(process, began + task.timeout_seconds, asked)
    except BaseException:  # a full disk, say: nobody else knows of the process
        end_tree(process)
        raise
    status = replace(status, pid=None, seconds=round(time.monotonic() - began, 3), exit_code=process.returncode)
    if state == states.TIMED_OUT:
        reason = f"did not end within {task.timeout_seconds:g} s; {_progress(task)}"
        status = replace(status, state=state, reason=reason)
    elif state == states.INTERRUPTED:
        status = replace(status, state=state, reason=f"stopped from outside; {_progress(task)}")
    else:
        oom_killed = failures.count_oom_kills() > kills
        stopped = process.returncode == STOPPED or _says_stopped(task.folder / "run.json", clock)
        text = _read(log, start)
        status = replace(status, **outcome(task, process.returncode, text, stopped=stopped, oom_killed=oom_killed))
    write_status(task.folder, status)
    return status


def outcome(task: Task, code: int, log: str, *, stopped: bool, oom_killed: bool) -> dict[str, Any]:
    """State and reason of a run that ended by itself with that exit code."""
    if stopped:
        return {"state": states.INTERRUPTED, "reason": f"stopped by a signal; {_progress(task)}"}
    if code == 0:
        if _last_step(task) == task.steps:
            return {"state": states.DONE}
        return {"state": states.FAILED, "reason": f"ended without an error, but {_progress(task)}"}
    if line := failures.out_of_memory(log):
        return {"state": states.OUT_OF_MEMORY, "reason": line}
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL) or failures.was_killed(log)
    if killed and oom_killed:
        return {"state": states.OUT_OF_MEMORY, "reason": "the system's out-of-memory killer ended a process"}
    error = failures.first_error(log)
    if error is None and killed:
        where = "this host's out-of-memory killer" if task.nodes == 1 else "the out-of-memory killer of the first node"
        error = f"a process was ended by SIGKILL, not by {where}; {_progress(task)}"
    return {"state": states.FAILED, "reason": error or f"ended with exit code {code}; {_progress(task)}"}


def _says_stopped(record: Path, since: float) -> bool:
    """Whether a run that began at `since` left word that it was asked to stop: torchrun's own exit code is 1 then."""
    content = read_json(record)
    return isinstance(content, dict) and content.get("ended") == "stopped" and record.stat().st_mtime >= since


class _Asked:
    """Whether this process should end: a signal came, or the process that started it is gone."""

    def __init__(self, parent: int | None) -> None:
        self._parent = parent
        self._signalled = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, *_: Any) -> None:
        self._signalled = True

    def __bool__(self) -> bool:
        return self._signalled or (self._parent is not None and os.getppid() != self._parent)


def _wait(process: subprocess.Popen[bytes], deadline: float, asked: _Asked) -> str | None:
    """None if the process ended by itself, also if it did so well just before it was to be ended."""
    while True:
        try:
            code = process.wait(timeout=_POLL_S)
            # SLURM signals this process and its srun at once: which of the two is seen first is a matter of chance.
            return states.INTERRUPTED if code != 0 and asked else None
        except subprocess.TimeoutExpired:
            pass
        if asked or time.monotonic() > deadline:
            state = states.INTERRUPTED if asked else states.TIMED_OUT
            end_tree(process)
            return state


def _read(log: Path, start: int) -> str:
    """What was printed from `start` on: of a very long log both ends, since causes come first or last."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(start)
        text = file.read(_LOG_READ)
        if file.tell() < size:
            file.seek(max(file.tell(), size - _LOG_READ))
            text += b"\n" + file.read()
    return text.decode(errors="replace")


def _last_step(task: Task) -> int:
    records = read_records(task.folder)
    return int(records[-1]["step"]) if records else 0


def _progress(task: Task) -> str:
    return f"the last step logged is {_last_step(task)} of {task.steps}"
