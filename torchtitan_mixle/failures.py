"""What went wrong with a run, from what its processes printed."""

import re
from itertools import pairwise
from pathlib import Path

# torchrun and torch put the rank before a worker's lines; rich and torchrun draw boxes around them.
_RANK = re.compile(r"^\[(?:rank|default|trainer)?\d+\]:\s?")
_OPTIONS = ("Unrecognized options", "Invalid choice", "Invalid value")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|bad_alloc)\b")
_NOT_THE_CAUSE = ("ChildFailedError", "SignalException", "torch.distributed.elastic", "DistNetworkError")
_CRASH = re.compile(r"^(?:terminate called|Fatal Python error)")
_ENDED = re.compile(r"torch/distributed/elastic/.*\] failed \(exitcode")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|XPU) (?:error: )?out of memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|^MemoryError\b|std::bad_alloc|oom[-_ ]kill|OUT_OF_ME",
    re.IGNORECASE,
)
_KILLED = re.compile(r"Signal 9 \(SIGKILL\)|exitcode\s*:?\s*-9\b")


def first_error(log: str) -> str | None:
    """The line that says what went wrong: a ConfigError's, or else the first exception's, or else a crash's."""
    lines = _lines(log)
    own = [line.split("ConfigError: ", 1)[1] for line in lines if "] ConfigError: " in line]
    options = [line for line in lines if line.startswith(_OPTIONS)]
    exceptions = [line for line in lines if _EXCEPTION.match(line) and not any(word in line for word in _NOT_THE_CAUSE)]
    crashes = [
        f"{line} {after}" if after.startswith("what():") else line
        for line, after in pairwise([*lines, ""])
        if _CRASH.match(line)
    ]
    return next(iter(own + options + exceptions + crashes), None)


def last_lines(log: str, count: int = 15) -> str:
    """The last that a run's processes printed, without what torchrun says after them, for where no line tells more."""
    lines = log.rstrip().splitlines()
    ended = [i + 1 for i, line in enumerate(lines) if _ENDED.search(line)]
    return "\n".join(lines[: ended[0] if ended else None][-count:])


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
