"""What went wrong with a run, from what its processes printed."""

import re
from pathlib import Path

# torchrun and torch put the rank before a worker's lines; rich and torchrun draw boxes around them.
_RANK = re.compile(r"^\[(?:rank|default|trainer)?\d+\]:\s?")
_OPTIONS = ("Unrecognized options", "Invalid choice", "Invalid value")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|bad_alloc)\b|terminate called|Fatal Python error)"
)
_NOT_THE_CAUSE = ("ChildFailedError", "SignalException", "torch.distributed.elastic")
_OF_OTHER_RANKS = ("DistNetworkError",)
"""What the ranks that are left say when one has gone; seldom the cause."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|XPU) (?:error: )?out of memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|^MemoryError\b|std::bad_alloc|oom[-_ ]kill|OUT_OF_ME",
    re.IGNORECASE,
)
_KILLED = re.compile(r"Signal 9 \(SIGKILL\)|exitcode\s*:?\s*-9\b")


def first_error(log: str) -> str | None:
    """The line that says what went wrong: a ConfigError's, or else the first exception's."""
    lines = _lines(log)
    own = [line.split("ConfigError: ", 1)[1] for line in lines if "] ConfigError: " in line]
    options = [line for line in lines if line.startswith(_OPTIONS)]
    exceptions = [line for line in lines if _EXCEPTION.match(line) and not any(word in line for word in _NOT_THE_CAUSE)]
    exceptions.sort(key=lambda line: any(word in line for word in _OF_OTHER_RANKS))
    return next(iter(own + options + exceptions), None)


def last_lines(log: str, count: int = 30) -> str:
    """The end of what a run printed, for where no line says what went wrong."""
    return "\n".join(log.rstrip().splitlines()[-count:])


def out_of_memory(log: str) -> str | None:
    """The line that says that memory was short, on the device or on the host; None without one."""
    return next((line for line in _lines(log) if _OUT_OF_MEMORY.search(line)), None)


def was_killed(log: str) -> bool:
    """Whether torchrun says that a worker ended by SIGKILL, as the system's out-of-memory killer ends processes."""
    return _KILLED.search(log) is not None


def _lines(log: str) -> list[str]:
    return [_RANK.sub("", line.strip()).strip(" │|") for line in log.splitlines()]


def count_oom_kills() -> int:
    """How often the out-of-memory killer ended a process: on this host, and in this process's control group.

    The two can count the same kill: compare with an earlier count.
    """
    places = [(Path("/proc/vmstat"), "oom_kill")]
    try:
        groups = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for group in [*groups, "/"]:
        place = Path("/sys/fs/cgroup") / group.strip("/")
        places += [(place / "memory.events", "oom_kill"), (place / "memory.oom_control", "oom_kill")]
    return sum(_count(path, word) for path, word in dict.fromkeys(places))


def _count(path: Path, word: str) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] == word)
