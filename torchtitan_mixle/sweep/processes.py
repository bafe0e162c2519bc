"""Ending a launcher and everything that it started, also what is in a session of its own, as torchrun's workers are."""

import subprocess
import time
from contextlib import suppress

import psutil

_GRACE_S = 5.0  # for a launcher to end its workers by itself

Family = set[psutil.Process]
"""psutil tells a process from a later one of the same number."""


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and kill what is left of it and of its descendants after a few seconds."""
    family = family_of(process.pid)
    process.terminate()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and (process.poll() is None or any(map(_lives, family))):
        for member in list(family):
            with suppress(psutil.Error):
                family |= set(member.children(recursive=True))
        time.sleep(0.1)
    kill_family(family)
    process.kill()
    process.wait()


def kill_family(family: Family) -> None:
    """SIGKILL to those of the processes that still are."""
    for member in family:
        with suppress(psutil.Error):
            member.kill()


def family_of(pid: int) -> Family:
    """A process and all below it; empty where there is none."""
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.Error:
        return set()


def _lives(member: psutil.Process) -> bool:
    try:
        return bool(member.is_running() and member.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
