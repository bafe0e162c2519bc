"""A real SLURM of one node, with its own folder and ports, as root and without systemd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
"""Debian's packages slurm-wlm and munge."""

SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])

_CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for its credential's life to end.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
KillWait=5
MinJobAge=600
NodeName={host} CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What the tests need and this machine lacks."""
    programs = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    return programs if os.geteuid() == 0 else [*programs, "root"]


class Slurm:
    """Commands of the running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": SEARCH_PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *words: str, **more: str) -> str:
        result = subprocess.run(
            words, capture_output=True, text=True, timeout=60, env=self.environment | more, check=False
        )
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, seconds: float = 180) -> dict[str, str]:
        """The job, once it is in one of the states."""
        return until(lambda: job if (job := self.job(number))["JobState"] in states else None, seconds)


def until(look: Callable[[], T | None], seconds: float = 120) -> T:
    """What `look` finds, once it finds something."""
    end = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.3)
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start the daemons; stop them and what they started."""
    slurm = Slurm(folder)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    host = socket.gethostname()
    ports = dict(zip(("controller_port", "node_port"), _free_ports(2), strict=True))
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, host=host, **ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
    munge = [f"--{option}={folder / name}" for option, name in files.items()]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", host],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            with (folder / f"{words[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(words, env=slurm.environment, stdout=out, stderr=out))
            if words[0] == "munged":
                until(lambda: (folder / "munge.socket").exists() or None, 20)
        until(lambda: _ready(slurm, host), 60)
        yield slurm
    finally:
        if len(running) == len(daemons):
            subprocess.run(["scancel", "--user=root"], env=slurm.environment, capture_output=True, check=False)
            time.sleep(1)
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in reversed(running):
            daemon.wait(30)


def _ready(slurm: Slurm, host: str) -> bool | None:
    words = ["sinfo", "--noheader", "--format=%T", f"--nodes={host}"]
    result = subprocess.run(words, capture_output=True, text=True, env=slurm.environment, timeout=60, check=False)
    return True if result.stdout.strip() == "idle" else None


def _free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
