"""The one exception a user's mistake raises, how it reaches the terminal; how a run is stopped, and its exit code."""

import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from types import TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Each of them asks a run to save a checkpoint and stop."""

STOPPED = 75
"""Exit code of a run that a signal stopped: it has saved a checkpoint, and the same command goes on from there.

sysexits.h calls it EX_TEMPFAIL. 0 is a complete run, anything else a failure.
"""


class ConfigError(ValueError):
    """A request that cannot work: its message names the values, the rule and a remedy.

    Raised with the same text on every rank that sees it: at start-up on all of them, before anything is built.
    """


def suggestion(word: str, known: Iterable[str]) -> str:
    """For an unknown word: "did you mean ...?", also by the last part of a key with dots; else all known ones."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    if not near:  # the right name in the wrong section
        last = difflib.get_close_matches(word.rsplit(".", 1)[-1], [key.rsplit(".", 1)[-1] for key in known], n=1)
        near = [key for key in known if last and key.rsplit(".", 1)[-1] == last[0]]
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"


Explain = Callable[[BaseException, TracebackType | None], ConfigError | None]


def show_config_errors_as_one_line(explain: Explain) -> None:
    """Let an uncaught ConfigError end the process with its message alone; other exceptions keep their traceback.

    `explain` may know the ConfigError behind another exception.
    """
    previous = sys.excepthook
    if getattr(previous, "shows_config_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mistake = error if isinstance(error, ConfigError) else explain(error, trace)
        if mistake is None:
            previous(kind, error, trace)
            return
        rank = os.environ.get("RANK")  # set by torchrun
        where = f"[rank {rank}] " if rank is not None else ""
        print(f"{where}ConfigError: {mistake}", file=sys.stderr, flush=True)

    hook.shows_config_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
