"""Points one after another on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.sweep.file import SweepFile
from torchtitan_mixle.sweep.points import Point
from torchtitan_mixle.sweep.prepare import give_up_on
from torchtitan_mixle.sweep.processes import family_of, kill_family
from torchtitan_mixle.sweep.progress import Progress
from torchtitan_mixle.sweep.status import read_status

_POLL_S = 0.2


def run_here(sweep: SweepFile, points: Sequence[Point], progress: Progress) -> None:
    """Run the points in turn, each watched over by a process of its own that ends it if this one does."""
    if sweep.nodes > 1:
        raise ConfigError(f"{sweep.path}: nodes={sweep.nodes} needs --launcher slurm; this machine is one node")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for point in points:  # all of them first: an earlier start may have had another order
            end_leftover(point.folder(sweep.folder))
        for point in points:
            _run(sweep, point, progress)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(sweep: SweepFile, point: Point, progress: Progress) -> None:
    folder = point.folder(sweep.folder)
    words = [sys.executable, "-m", "torchtitan_mixle", "sweep-point", str(folder), "--parent", str(os.getpid())]
    # In a session of its own: Ctrl-C reaches it through us alone.
    watcher = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while watcher.poll() is None:
            progress.running(point.name)
            time.sleep(_POLL_S)
    except BaseException:
        watcher.terminate()
        watcher.wait()
        raise
    if not read_status(folder).reason and watcher.returncode != 0:
        end_leftover(folder)  # while its status still has the process
        give_up_on(folder, f"the process that watched over it ended with exit code {watcher.returncode}")
    progress.ended(point.name, read_status(folder))


def end_leftover(folder: Path) -> None:
    """Kill what still runs of a point whose watcher was killed."""
    status = read_status(folder)
    if status.pid is None or status.host != socket.gethostname():
        return
    family = family_of(status.pid)
    if any(_is_of(process, folder) for process in family):
        kill_family(family)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    """Whether the process, which could be another one of that number, runs this point."""
    with suppress(psutil.Error):
        return any(folder.name in word for word in process.cmdline())
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
