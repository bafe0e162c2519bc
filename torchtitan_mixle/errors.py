"""The one exception a user's mistake raises, and how it reaches the terminal."""

import os
import sys
from types import TracebackType


class ConfigError(ValueError):
    """A request that cannot work: its message names the values, the rule and a remedy.

    Raised with the same text on every rank, before any of them waits for another.
    """


def show_config_errors_as_one_line() -> None:
    """Let an uncaught ConfigError end the process with its message alone; other exceptions keep their traceback."""
    previous = sys.excepthook
    if getattr(previous, "shows_config_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ConfigError):
            previous(kind, error, trace)
            return
        rank = os.environ.get("RANK")  # set by torchrun
        where = f"[rank {rank}] " if rank is not None else ""
        print(f"{where}ConfigError: {error}", file=sys.stderr, flush=True)

    hook.shows_config_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
