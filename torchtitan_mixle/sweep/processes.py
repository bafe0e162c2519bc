"""Ending a launcher and everything that it started, also what is in a session of its own, as torchrun's workers are."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_GRACE_S = 5.0  # for a launcher to end its workers by itself


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and kill what is left of it and of its descendants after a few seconds."""
    family = descendants(process.pid)
    process.terminate()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and (process.poll() is None or any(map(_same, family.items()))):
        for pid in list(family):
            family |= descendants(pid)
        time.sleep(0.1)
    kill_family(family)
    process.kill()
    process.wait()


def kill_family(family: dict[int, str]) -> None:
    """SIGKILL to the processes that are still those of the listing."""
    for pid, started in family.items():
        if _same((pid, started)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> dict[int, str]:
    """{process: when it started} of a process and of all below it; empty where there is none or no /proc."""
    found: dict[int, str] = {}
    left = [pid]
    while left:
        pid = left.pop()
        if (started := start_of(pid)) is not None and pid not in found:
            found[pid] = started
            with contextlib.suppress(OSError):
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    left += map(int, children.read_text().split())
    return found


def start_of(pid: int) -> str | None:
    """Clock ticks from boot to the process's start: with its number, what no later process shares. None if it ended."""
    try:
        # After the name, which may hold spaces and parentheses: state is field 3, starttime field 22 (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _same(known: tuple[int, str]) -> bool:
    return start_of(known[0]) == known[1]
