"""A stop on a signal: all ranks agree at the end of a step, save one whole checkpoint, and leave with exit code 75.

SIGTERM, SIGUSR1 or SIGUSR2 to any one worker stops the whole run. The ranks learn of it from each other, one step
after it came at the latest, so that the checkpoint is of the same step on all of them. A second signal ends a worker
at once, as the first one does in a run without checkpoints: with 128 and the signal's number. A worker that has died of
the signal itself had not begun: nobody was listening yet.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import JobConfig

from torchtitan_mixle.errors import STOP_SIGNALS, STOPPED

logger = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 3.0
"""Signals within this time are one: SLURM signals every process of a step, and a launcher hands its own on as well."""


class StopOnSignal:
    """What a rank knows of the wish to stop. Made on every rank at once, after the process group."""

    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = job_config
        self.stopped_by: int | None = None
        """The signal for which the run was stopped, once all ranks agree."""
        self._steps = job_config.training.steps
        self._heard = 0
        self._heard_at = 0.0
        comm = job_config.comm
        patience = max(comm.init_timeout_seconds, comm.train_timeout_seconds)
        # The ranks talk on the host, beside the step's own work: an accelerator does not wait for it.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        self._answer: tuple[torch.Tensor, Any] | None = None
        self._save_all_of_it()
        _listen(self._hear)

    def at_step_end(self, step: int) -> None:
        """Called on every rank before a step's checkpoint is due; a stop makes this step the last one."""
        training = self.job_config.training
        asked = self._take_answer()
        if step >= training.steps:
            return  # it ends by itself
        if asked == 0:
            self._ask()
            return
        self.stopped_by = asked
        training.steps = step
        logger.warning("%s: saving a checkpoint of step %d and stopping", signal.Signals(asked).name, step)

    def restore_config(self) -> None:
        """After the last step: the config as it was given."""
        self.job_config.training.steps = self._steps

    def leave(self) -> None:
        """End this process as stopped, together with all others: a launcher kills the rest when the first one goes."""
        dist.barrier(group=self._group)
        dist.destroy_process_group()
        sys.exit(STOPPED)

    def _ask(self) -> None:
        wish = torch.tensor(self._heard, dtype=torch.int32)
        self._answer = wish, dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _take_answer(self) -> int:
        """The signal that some rank had heard when all were last asked; 0 for none."""
        if self._answer is None:
            return 0
        wish, work = self._answer
        self._answer = None
        work.wait()
        return int(wish)

    def _hear(self, number: int) -> None:
        """In a thread of its own: the main one may be waiting for other ranks."""
        now = time.monotonic()
        if self._heard and now - self._heard_at > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
        if not self._heard:
            self._heard, self._heard_at = number, now

    def _save_all_of_it(self) -> None:
        """A run that is to keep only weights, or Hugging Face files, at its end keeps everything when it is stopped."""
        checkpoint = self.job_config.checkpoint
        for name in ("last_save_model_only", "last_save_in_hf"):
            if getattr(checkpoint, name):
                setattr(checkpoint, name, _UnlessStopped(self))


def end_on_signal() -> None:
    """For a run that saves nothing: the first signal ends this process at once."""
    _listen(lambda number: os._exit(128 + number))


class _UnlessStopped:
    """True, until the run is stopped: TorchTitan keeps such a setting from its start and looks at it when it saves."""

    def __init__(self, stop: StopOnSignal) -> None:
        self._stop = stop

    def __bool__(self) -> bool:
        return self._stop.stopped_by is None

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        return True  # in a copy of the config, for the record


def _listen(hear: Callable[[int], None]) -> None:
    """Call `hear` with the number of each stop signal, whatever the main thread is at."""
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # Python writes to the socket before it calls this

    def wait() -> None:
        with mine, theirs:
            while numbers := mine.recv(64):
                for number in numbers:
                    if number in STOP_SIGNALS:
                        hear(number)

    threading.Thread(target=wait, name="stop-signals", daemon=True).start()
    if sys.platform == "linux" and dist.is_torchelastic_launched():
        _die_with_parent()


def _die_with_parent() -> None:
    """Have the system send SIGTERM to this worker when torchrun dies (SIGUSR1 kills it): nobody would stop it."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
