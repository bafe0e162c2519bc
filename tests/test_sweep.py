"""`torchtitan-mixle sweep`: its file, its points, and what becomes of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from rich.console import Console

from tests.jobs import DEBUG_CONFIG, ROOT
from tests.slurm import Slurm
from torchtitan_mixle import failures
from torchtitan_mixle.cli.sweep import _report
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.sweep import slurm as sweep_slurm
from torchtitan_mixle.sweep.file import read_sweep
from torchtitan_mixle.sweep.local import end_leftover
from torchtitan_mixle.sweep.points import Point
from torchtitan_mixle.sweep.prepare import load_points, write_sweep
from torchtitan_mixle.sweep.progress import Progress
from torchtitan_mixle.sweep.status import RUNNING, Status, write_status

# Points of each shipped sweep.
SHIPPED = {"cpu_layouts": 10, "mfu_7b_8": 20, "mfu_7b_64": 40, "mfu_7b_512": 40, "mfu_70b_64": 26, "mfu_70b_512": 37}
HEAD = f'config = "{DEBUG_CONFIG}"\nnproc = 1\nsteps = 3\nwarmup = 1\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "try.toml"
    path.write_text(text)
    return path


def points_of(path: Path) -> list[tuple[Point, str | None]]:
    return load_points(read_sweep(path), on_this_machine=True)


def test_no_shipped_sweep_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "train_configs/sweeps").glob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_point_of_a_shipped_sweep_can_run(name: str) -> None:
    sweep = read_sweep(ROOT / "train_configs/sweeps" / f"{name}.toml")
    points = load_points(sweep, on_this_machine=False)
    assert [reason for _, reason in points if reason] == []
    assert len({point.id for point, _ in points}) == len(points) == SHIPPED[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axis = 1\n", "'axis' is not a key of a sweep .* did you mean 'axes'"),
        ("[axes]\nparallelism.tensor_parralel_degree = [1, 2]\n", "did you mean 'parallelism.tensor_parallel_degree'"),
        ('[axes]\nparallelism.tensor_parallel_degree = [1, "2"]\n', "='2' must be a whole number, without quotes"),
        ("[override]\ntraining.seq_length = 8\n", "did you mean 'training.seq_len'"),
        ("[override]\nmixle.dropout = 8\n", "'mixle.dropout' is not a key"),
        ("[override]\ntraining.steps = 8\n", "sets it by its own key steps"),
        ("[axes]\nmetrics.log_freq = [1, 2]\n", "metrics.log_freq=2 must divide steps=3"),
        ('[axes]\nlayout = ["zp2"]\n', "layout 'zp2' is not understood"),
        ('[axes]\nlayout = ["1"]\nparallelism.tensor_parallel_degree = [1]\n', "set by two axes"),
        ("[axes]\ntraining.seq_len = [8, 8]\n", "has 8 twice"),
        ("[axes]\ntraining.seq_len = 8\n", "must be a list"),
        ("[[zip]]\ntraining.seq_len = [8, 16]\noptimizer.lr = [1e-3]\n", "must be of equal length"),
        ("[axes]\ntraining.seq_len = [8]\n[[skip]]\ntraining.seq_len = 9\n", "no point meets the condition"),
        ("[axes]\ntraining.seq_len = [8]\n[[skip]]\ntraining.seq_len = 8\n", "leave none of 1 points"),
    ],
)
def test_mistakes_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        points_of(write(tmp_path, HEAD + text))


def test_points_are_a_matter_of_their_content(tmp_path: Path) -> None:
    axes = "[axes]\ntraining.seq_len = [16, 32]\noptimizer.lr = [1e-3, 1e-2]\n"
    first = points_of(write(tmp_path, HEAD + axes))
    more = axes.replace("[16, 32]", "[64, 32, 16]") + "[[skip]]\ntraining.seq_len = 16\noptimizer.lr = 1e-2\n"
    second = points_of(write(tmp_path, HEAD + more))
    assert len(first) == 4
    assert len(second) == 5
    shared = {point.id for point, _ in first} & {point.id for point, _ in second}
    assert len(shared) == 3
    changed = points_of(write(tmp_path, HEAD + axes + "[override]\ntraining.max_norm = 2.0\n"))
    assert not {point.id for point, _ in first} & {point.id for point, _ in changed}


def test_a_point_keeps_its_folder_under_another_name(tmp_path: Path) -> None:
    """Axes in another order, or one of them now in [override]: what has ended is not run again."""
    where = f'folder = "{tmp_path / "out"}"\n{HEAD}'
    first = points_of(write(tmp_path, where + "[axes]\ntraining.seq_len = [16]\noptimizer.lr = [1e-3, 1e-2]\n"))
    for point, _ in first:
        point.folder(tmp_path / "out").mkdir(parents=True)
    turned = "[axes]\noptimizer.lr = [1e-3, 1e-2]\ntraining.seq_len = [16]\n"
    fewer = "[axes]\noptimizer.lr = [1e-3, 1e-2]\n[override]\ntraining.seq_len = 16\n"
    for text in (turned, fewer):
        assert [point.id for point, _ in points_of(write(tmp_path, where + text))] == [point.id for point, _ in first]


def test_the_leftover_of_a_point_is_killed(tmp_path: Path) -> None:
    """Where the watcher was killed too; a process that only has its number is left alone."""
    path = write(tmp_path, f'folder = "{tmp_path / "out"}"\n{HEAD}[axes]\ntraining.seq_len = [16, 32]\n')
    points = [point for point, _ in points_of(path)]
    sleep = "import time; time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", sleep, word]) for word in (points[1].id, "another")]
    for point, process in zip(reversed(points), processes, strict=True):
        status = Status(RUNNING, host=socket.gethostname(), pid=process.pid)
        write_status(point.folder(tmp_path / "out"), status)
    try:
        for point in points:
            end_leftover(point.folder(tmp_path / "out"))
        assert processes[0].wait(10) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_errors_in_logs() -> None:
    log = "[rank0]: Traceback\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert "CUDA out of memory" in (failures.out_of_memory(log) or "")
    assert failures.first_error("x\n[rank1]: RuntimeError: broken\nValueError: later\n") == "RuntimeError: broken"
    assert failures.first_error("[rank 0] ConfigError: tp=3 must\nRuntimeError: b\n") == "tp=3 must"
    assert failures.first_error("x\n[rank1]: terminate called without an active exception\ny") == (
        "terminate called without an active exception"
    )
    thrown = "terminate called after throwing an instance of 'c10::Error'\n  what():  no device\n"
    assert (failures.first_error(thrown) or "").endswith("an instance of 'c10::Error' what():  no device")
    assert failures.first_error(f"{thrown}KeyError: 1\n") == "KeyError: 1"
    ended = "E1203 10:00:00 7 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 3) local_rank: 0"
    assert failures.last_lines(f"a\nlast words\n{ended}\nTraceback\n  torchrun's", 2) == f"last words\n{ended}"
    assert failures.last_lines("a\nb\n\n", 2) == "a\nb"
    assert failures.was_killed("exitcode  : -9 (pid: 3)\n") and failures.out_of_memory("memory: 0.5GiB\n") is None


FAULTS = {
    "crashing": 'raise RuntimeError("this point is broken")',
    "hanging": "import time; time.sleep(3600)",
    "greedy": "import torch; torch.empty(2**50)",
}


def command(path: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "torchtitan_mixle", "sweep", str(path), *more]


def environment(folder: Path) -> dict[str, str]:
    for name, line in FAULTS.items():
        (folder / f"{name}.py").write_text(f"import torchtitan_mixle\n{line}\n")
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def states(folder: Path) -> list[tuple[str, str, str | None]]:
    rows = json.loads((folder / "sweep.json").read_text())["points"]
    found: list[tuple[str, str, Any]] = []
    for row in rows:
        status = json.loads((folder / row["folder"] / "status.json").read_text())
        found.append((row["name"], status["state"], status["reason"]))
    return found


SMALL = "[override]\ntraining.seq_len = 16\ntraining.local_batch_size = 1\n"


@pytest.mark.slow
def test_failures_are_rows_and_a_killed_sweep_continues(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    axis = '[axes]\nexperimental.custom_import = ["torchtitan_mixle", "crashing", "greedy", "hanging"]\n'
    path = write(tmp_path, f'folder = "{folder}"\ntimeout_seconds = 45\n{HEAD}{axis}{SMALL}')
    with subprocess.Popen(command(path), env=environment(tmp_path), cwd=tmp_path, start_new_session=True) as first:
        ends = time.monotonic() + 120
        while time.monotonic() < ends and not list(folder.glob("points/custom_import=crashing*/log.txt")):
            time.sleep(0.1)
        os.kill(first.pid, signal.SIGKILL)
    done = next(folder.glob("points/custom_import=torchtitan_mixle*"))
    before = {name: (done / name).read_bytes() for name in ("metrics.jsonl", "status.json", "log.txt")}
    assert json.loads(before["status.json"])["state"] == "done"
    ended = subprocess.run(
        command(path), env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert {name: (done / name).read_bytes() for name in before} == before, "what is done is not run again"
    rows = states(folder)
    assert Counter(state for _, state, _ in rows) == Counter(["done", "failed", "out_of_memory", "timed_out"])
    reasons = {name.partition("=")[2]: reason or "" for name, _, reason in rows}
    assert "this point is broken" in reasons["crashing"]
    assert "allocate" in reasons["greedy"]
    assert "did not end within 45 s" in reasons["hanging"]
    assert (folder / "report" / "throughput.png").stat().st_size > 5000
    assert "this point is broken" in (folder / "report" / "report.md").read_text()


def test_a_point_whose_status_cannot_be_written_is_not_left_running(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()  # as on a full disk, the file cannot be put there
    facts = {"nodes": 1, "nproc": 1, "steps": 3, "timeout_seconds": 60}
    (tmp_path / "point.json").write_text(json.dumps(facts))
    words = [sys.executable, "-m", "torchtitan_mixle", "sweep-point", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "IsADirectoryError" in ended.stderr
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert not left


def test_a_task_that_left_the_queue_without_a_result(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that did not begin, as after scancel, is run by the next start; one that did is a failure."""
    monkeypatch.setattr(sweep_slurm, "_SETTLE_S", 0.0)
    for key in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(key, slurm.environment[key])
    folder, console = tmp_path / "out", Console(quiet=True)
    plan = read_sweep(write(tmp_path, f'folder = "{folder}"\n{HEAD}[axes]\ntraining.seq_len = [16]\n'))
    points = load_points(plan, on_this_machine=False)
    tasks = {("999999", 0): points[0][0]}  # no job of this SLURM
    for state, reason in (("interrupted", "taken from the queue"), ("failed", "see slurm/999999_0.txt")):
        assert len(write_sweep(plan, points, retry=False)) == 1
        with Progress(console, 1, earlier=0) as progress:
            sweep_slurm.wait(plan, tasks, progress)
        ((_, found, said),) = states(folder)
        assert (found, reason in (said or "")) == (state, True)
        assert _report(folder, console) == 1
        (folder / "slurm").mkdir(exist_ok=True)
        (folder / "slurm" / "999999_0.txt").touch()
    assert not write_sweep(plan, points, retry=False)
    assert len(write_sweep(plan, points, retry=True)) == 1


@pytest.mark.slow
def test_slurm_gives_the_table_of_this_machine(slurm: Slurm, tmp_path: Path) -> None:
    """Three points, the second of them broken: two results and a failure from either launcher."""
    axis = '[axes]\nexperimental.custom_import = ["torchtitan_mixle", "crashing", "sound"]\n'
    (tmp_path / "sound.py").write_text("import torchtitan_mixle\n")
    paths = {}
    for launcher in ("slurm", "local"):
        folder = tmp_path / f"50%a by {launcher}"  # spaces, and what sbatch would replace
        folder.mkdir()
        paths[launcher] = write(folder, f'folder = "{folder / "out"}"\n{HEAD}{axis}{SMALL}')
    tables = {}
    for launcher, path in paths.items():
        words = command(path, f"--launcher={launcher}")
        there = environment(tmp_path) | {key: slurm.environment[key] for key in ("PATH", "SLURM_CONF")}
        ended = subprocess.run(words, env=there, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
        assert ended.returncode == 1, ended.stdout + ended.stderr
        table = pd.read_csv(path.parent / "out" / "report" / "report.csv")
        assert list(table["tokens_per_second"].notna()) == [True, False, True]
        tables[launcher] = table[["name", "processes", "status", "reason", "runs_done", "reports", "steps", "loss"]]
    assert list(tables["local"]["status"]) == ["done", "failed", "done"]
    pd.testing.assert_frame_equal(tables["slurm"], tables["local"])
