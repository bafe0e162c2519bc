"""Signals to real runs under plain torchrun; tests/test_slurm.py has those under SLURM and our launcher."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.slurm import until
from torchtitan_mixle.errors import STOPPED

ROOT = Path(__file__).parents[1]
RUN = ["-m", "torchtitan.train", "--job.config_file", str(ROOT / "train_configs" / "mixle_debug.toml")]
SHORT = ["--validation.no-enable", "--training.local_batch_size", "2", "--training.seq_len", "32"]


def start(folder: Path, *more: str, module: str = "torch.distributed.run") -> subprocess.Popen[str]:
    """A run of two ranks, which ends with step 60."""
    words = [sys.executable, "-m", module, "--standalone", "--nproc_per_node=2", *RUN, *SHORT, "--training.steps", "60"]
    words += ["--job.dump_folder", str(folder), "--metrics.log_freq", "1", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(folder: Path) -> list[dict[str, float]]:
    log = folder / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def reach(folder: Path, step: int) -> None:
    until(lambda: True if records(folder) and records(folder)[-1]["step"] >= step else None)


def workers(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children()


def last_checkpoint(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").iterdir())


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "stopped"

    first = start(folder, "--checkpoint.interval", "1000")
    reach(folder, 3)
    workers(first)[1].send_signal(signal.SIGTERM)  # to one rank alone
    seen = records(folder)[-1]["step"]
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 1  # torchrun's code for any failure of its workers
    assert f"exitcode: {STOPPED}" in out
    stopped_at = last_checkpoint(folder)
    assert records(folder)[-1]["step"] == stopped_at < 60
    assert stopped_at <= seen + 3  # the step under way, one to agree, and one that may end before the signal is heard

    second = start(folder, "--checkpoint.interval", "1000")
    reach(folder, stopped_at + 3)
    ranks = workers(second)
    second.send_signal(signal.SIGUSR1)  # kills torchrun, which does not know it
    out, _ = second.communicate(timeout=60)
    assert second.returncode == -signal.SIGUSR1
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    again = last_checkpoint(folder)
    assert stopped_at < again == records(folder)[-1]["step"] < 60

    for run in (start(folder), start(whole)):
        out, _ = run.communicate(timeout=120)
        assert run.returncode == 0, out
    assert [r["step"] for r in records(folder)] == list(range(1, 61))
    for mine, uninterrupted in zip(records(folder), records(whole), strict=True):
        assert mine["loss"] == pytest.approx(uninterrupted["loss"], rel=1e-6)
    starts = [json.loads(line)["ended"] for line in (folder / "run.earlier.jsonl").read_text().splitlines()]
    assert starts == ["stopped", "stopped"]
    assert json.loads((folder / "run.json").read_text())["ended"] == "complete"


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    run = start(tmp_path, "--training.steps", "100000", module="torchtitan_mixle.launch")
    reach(tmp_path, 2)
    ranks = workers(run)
    ranks[1].suspend()  # a rank that hangs: the others wait for it in a collective and cannot agree
    run.send_signal(signal.SIGTERM)
    time.sleep(3.5)
    assert run.poll() is None
    ranks[0].send_signal(signal.SIGTERM)
    psutil.wait_procs(ranks[:1], timeout=10)
    assert not ranks[0].is_running()
    ranks[1].kill()
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1, out
    assert not list((tmp_path / "checkpoint").glob("step-*"))


@pytest.mark.slow
def test_a_signal_during_start_up_stops_a_run_that_has_not_begun(tmp_path: Path) -> None:
    """With the code by which a job is requeued: the launcher without workers, and workers that do not listen yet."""
    alone = [sys.executable, "-c", "from torchtitan_mixle import launch; launch._pass_on(10, None)"]
    waiting = subprocess.Popen(alone)
    run = start(tmp_path, module="torchtitan_mixle.launch")
    until(lambda: True if workers(run) else None)
    run.send_signal(signal.SIGUSR1)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == STOPPED, out
    assert not records(tmp_path)
    assert waiting.wait(timeout=60) == STOPPED


@pytest.mark.slow
def test_without_checkpoints_a_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    run = start(tmp_path, "--checkpoint.no-enable", "--training.steps", "100000", module="torchtitan_mixle.launch")
    reach(tmp_path, 2)
    ranks = workers(run)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=30)
    assert run.returncode == 1
    assert not any(rank.is_running() for rank in ranks)
