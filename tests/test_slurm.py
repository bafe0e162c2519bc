"""Jobs of a real SLURM; where the nodes are too few, its `srun` and `scontrol` are replaced by ones that tell."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.slurm import SEARCH_PATH, Slurm, until
from torchtitan_mixle.errors import STOPPED

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
CONFIG = ROOT / "train_configs" / "mixle_debug.toml"
SHORT = ["--validation.no-enable", "--training.local_batch_size", "2", "--training.seq_len", "32"]


def submit(slurm: Slurm, folder: Path, *more: str) -> str:
    out = f"--output={folder / 'job.txt'}"
    words = ["sbatch", "--parsable", "--nodes=1", out, str(SCRIPT), str(CONFIG), *SHORT]
    folder.mkdir()
    more = ("--job.dump_folder", str(folder / "run"), "--metrics.log_freq", "1", *more)
    environment = {"NPROC_PER_NODE": "2", "LOG_FOLDER": str(folder / "logs"), "MIXLE_ENV": ""}
    return slurm.ask(*words, *more, **environment)


def steps(folder: Path) -> list[int]:
    log = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def workers(folder: Path) -> list[psutil.Process]:
    """Ranks of the run, without the launchers above them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder / "run") in words and "torchtitan.train" in words and not any("launch" in word for word in words):
            found.append(process)
    return found


@pytest.mark.slow
def test_a_job_trains_and_one_whose_rank_dies_fails(slurm: Slurm, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    jobs = {
        good: submit(slurm, good, "--training.steps", "4"),
        bad: submit(slurm, bad, "--training.steps", "100000", "--checkpoint.no-enable"),
    }
    until(lambda: len(steps(bad)) >= 3 or None)
    workers(bad)[-1].send_signal(signal.SIGKILL)
    assert slurm.wait(jobs[good], "COMPLETED", "FAILED")["JobState"] == "COMPLETED", (good / "job.txt").read_text()
    assert steps(good) == [1, 2, 3, 4]
    job = slurm.wait(jobs[bad], "COMPLETED", "FAILED")
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0")
    assert "Signal 9 (SIGKILL)" in (bad / "job.txt").read_text()  # torchrun's word for it
    assert not workers(bad)
    ports = {(folder / "job.txt").read_text().split("rendezvous at ")[1].split(",")[0] for folder in jobs}
    assert len(ports) == 2


@pytest.mark.slow
def test_a_job_near_its_limit_saves_and_is_requeued_until_it_is_done(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "drill"
    number = submit(slurm, folder, "--training.steps", "200", "--checkpoint.last_save_model_only")
    until(lambda: len(steps(folder)) >= 5 or None)
    slurm.ask("scancel", "--batch", "--signal=USR1", number)  # as the time limit does: --signal=B:USR1@180
    until(lambda: True if slurm.job(number).get("Restarts") == "1" else None)
    stopped_at = steps(folder)[-1]
    assert 5 <= stopped_at < 200
    assert "requeued" in (folder / "job.txt").read_text()
    job = slurm.wait(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", (folder / "job.txt").read_text()
    assert steps(folder) == list(range(1, 201))
    ended = [json.loads(line) for line in (folder / "run" / "run.earlier.jsonl").read_text().splitlines()]
    last = json.loads((folder / "run" / "run.json").read_text())
    assert [start["ended"] for start in [*ended, last]] == ["stopped", "complete"]
    assert last["first_step"] == stopped_at + 1


FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$TOLD"
while [ $# -gt 0 ] && [ "$1" != launch ]; do shift; done
echo "cpus $SRUN_CPUS_PER_TASK" >>"$TOLD.cpus"
marker="$2"
case "$END" in
  complete) echo "0 node" >"$marker" ;;
  stopped) echo "75 node" >"$marker" ;;
  failed) exit 7 ;;
  preempted)
    trap 'exit 137' TERM # srun itself kills the step then
    trap 'echo "75 node" >"$marker"; exit 0' USR1
    sleep 0.5 # until the batch shell listens
    kill -TERM "$PPID"
    for _ in {1..100}; do sleep 0.1; done ;;
esac
"""
FAKE_SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then exec "$REAL" "$@"; fi
echo "$*" >"$TOLD.scontrol"; exit 1
"""


@pytest.mark.parametrize(
    ("nodes", "head", "end", "code"),
    [
        ("gpu[07-08]", "gpu07", "complete", 0),
        ("a[3-33],b[01-33]", "a3", "stopped", STOPPED),
        ("n1", "n1", "failed", 7),
        ("n1", "n1", "lost", 1),
        ("a-rather-long-name-of-a-node-[0001-3000]", "a-rather-long-name-of-a-node-0001", "preempted", STOPPED),
    ],
)
def test_where_the_nodes_meet(nodes: str, head: str, end: str, code: int, slurm: Slurm, tmp_path: Path) -> None:
    real = slurm.ask("which", "scontrol")
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    n = len(slurm.ask(real, "show", "hostnames", nodes).split())
    told = tmp_path / "told"
    environment = slurm.environment | {
        "PATH": f"{tmp_path}{os.pathsep}{SEARCH_PATH}",
        "SLURM_JOB_ID": "7654321",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(n),
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "96",
        "LOG_FOLDER": str(tmp_path / "logs"),
        "TOLD": str(told),
        "REAL": real,
        "END": end,
    }
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gpu07.log").write_text("the node's last words")
    words = ["bash", str(SCRIPT), str(CONFIG), "--training.steps", "9"]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code, result.stderr
    arguments = told.read_text().splitlines()
    assert f"--rdzv_endpoint={head}:{20000 + 7654321 % 12000}" in arguments
    assert {f"--nnodes={n}", "--nproc_per_node=8", f"--ntasks={n}", "--kill-on-bad-exit=1"} <= set(arguments)
    assert arguments[-4:] == ["--job.config_file", str(CONFIG), "--training.steps", "9"]
    assert (tmp_path / "told.cpus").read_text() == "cpus 96\n"
    assert (tmp_path / "told.scontrol").exists() == (code == STOPPED)  # asked to requeue, refused here
    assert ("the node's last words" in result.stderr) == (end in ("failed", "lost"))
