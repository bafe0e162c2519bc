"""Where a sweep stands: one live line on a terminal, a line for each ended point elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchtitan_mixle.sweep import status as states
from torchtitan_mixle.sweep.status import Status


class Progress:
    """Tells of points as they start and end."""

    def __init__(self, console: Console, n_points: int, *, earlier: int) -> None:
        self._console = console
        self._n = n_points
        self._done = self._failed = 0
        self._earlier = earlier
        self._running: tuple[str, ...] = ()
        self._began = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._earlier:
            self._console.print(f"{self._earlier} points ended earlier and are kept", highlight=False)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def running(self, *names: str) -> None:
        """These points run now; call often: it moves the clock."""
        if self._live is None and names and names != self._running:
            self._console.print(f"running {_some(names)}", highlight=False, markup=False)
        self._running = names
        if self._live is not None:
            self._live.update(Text(self.line()), refresh=True)

    def ended(self, name: str, status: Status) -> None:
        """A point has its last status."""
        self._running = ()
        self._done += status.state == states.DONE
        self._failed += status.state != states.DONE
        seconds = "" if status.seconds is None else f" after {status.seconds:.0f} s"
        reason = f": {status.reason}" if status.reason else ""
        place = f"[{self._done + self._failed}/{self._n}]"
        line = f"{place} {name}: {status.state.replace('_', ' ')}{seconds}{reason}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._live is None:
            self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    def line(self) -> str:
        """Running, done, failed, left, and for how long."""
        ended = self._done + self._failed
        spent = time.monotonic() - self._began
        left = self._n - ended
        time_left = "" if not ended or not left else f", about {_duration(spent / ended * left)} left"
        running = f"running {_some(self._running)}; " if self._running and left else ""
        return f"{running}{self._done} done, {self._failed} failed, {left} to go{time_left}"


def _some(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "nothing"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
