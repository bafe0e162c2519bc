"""`python -m torchtitan_mixle.launch`: torchrun, with its arguments, whose end tells what became of the run.

torchrun itself ends with 1 whatever its workers ended with. When it is sent SIGTERM it gives them half a minute, and
SIGUSR1 kills it. This one hands SIGTERM, SIGUSR1 and SIGUSR2 to its workers and waits for them. Exit codes: 0 the run
is complete; 75 it was stopped by a signal, has saved a checkpoint (or had not begun), and goes on when it is started
again; else it failed.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from torchtitan_mixle.errors import STOP_SIGNALS, STOPPED

_told: set[int] = set()
"""The stop signals that came."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun in this process; its exit code."""
    args = run.parse_args(argv)
    args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # torchrun's own way of dying is right for these
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = args.signals_to_handle
    for number in STOP_SIGNALS:
        signal.signal(number, _pass_on)
    try:
        record(run.run)(args)
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        # Workers leave with this code only after all of them have saved.
        if STOPPED in codes:
            print("Stopped by a signal; the checkpoint is saved, and the same command goes on from it", file=sys.stderr)
            return STOPPED
        if codes <= {-number for number in _told}:  # in their start-up, before they listen
            print("Stopped by a signal before the first step; the same command starts it", file=sys.stderr)
            return STOPPED
        raise
    return 0


def _pass_on(number: int, _: FrameType | None) -> None:
    _told.add(number)
    workers = psutil.Process().children()
    if not workers:  # it still waits for the other nodes
        sys.exit(STOPPED)
    for worker in workers:
        try:
            worker.send_signal(number)
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    sys.exit(main())
