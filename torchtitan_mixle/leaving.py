"""Leaving a process without a crash at the very end.

gloo's threads let go of a collective's tensors a moment after its result is known. One that does so while Python shuts
down is ended in the middle of a destructor, which C++ answers with SIGABRT ("terminate called without an active
exception"): torchrun then calls a job failed that has done all its work (pytorch/pytorch#190489).
"""

import atexit
import logging
import threading
import time
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.01
_PATIENCE_SECONDS = 5.0
_TASKS = Path("/proc/self/task")


@cache
def settle_at_exit() -> None:
    """Have this process wait for its threads before Python shuts down."""
    atexit.register(settle)


def settle() -> None:
    """Wait until all other threads wait as well, twice in a row: one may have waited for the interpreter's lock."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    quiet = 0
    while quiet < 2:
        if time.monotonic() > deadline:
            logger.warning("threads still run after %g s; leaving all the same", _PATIENCE_SECONDS)
            return
        time.sleep(_PAUSE_SECONDS)  # the lock is free meanwhile
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether a thread but this one runs, or would if it had a processor. Not known outside Linux."""
    own = str(threading.get_native_id())
    return _TASKS.is_dir() and any(task.name != own and _state(task) in "RD" for task in _TASKS.iterdir())


def _state(task: Path) -> str:
    """A letter, as in proc(5); X for a thread that has just ended."""
    try:
        return (task / "stat").read_bytes().rpartition(b") ")[2][:1].decode() or "X"
    except OSError:
        return "X"
