"""Reports of runs with figures that are known by hand."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_mixle.cli.main import main
from torchtitan_mixle.report.plots import curve_of
from torchtitan_mixle.report.records import read_runs
from torchtitan_mixle.sweep import status as states

SPEEDS = [1.0, 10.0, 30.0, 20.0]  # the first is the compiling step's
PNG = b"\x89PNG\r\n\x1a\n"


def records(speeds: list[float]) -> str:
    lines = []
    for step, speed in enumerate(speeds, 1):
        line: dict[str, Any] = {"step": step, "loss": 6.0 - step, "tokens_seen": 100 * step, "tokens_per_second": speed}
        line |= {"steps": 1, "step_seconds": 100 / speed, "tflops_per_device": speed / 1000, "data_loading_pct": 2.0}
        line |= {"memory_gib": 1.5, "time": 1e9 + 1000 * step}
        lines.append(json.dumps(line | ({"first_step": True} if step == 1 else {})))
    return "\n".join(lines) + "\n"


def a_run(folder: Path, speeds: list[float], ended: str | None = "complete", steps: int | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(records(speeds))
    facts: dict[str, Any] = {
        "layout": {"name": "fsdp2", "world_size": 2},
        "device": {"name": "a device"},
        "config": {"training": {"steps": steps or len(speeds)}},
    }
    (folder / "run.json").write_text(json.dumps(facts if ended is None else facts | {"ended": ended}))
    return folder


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_single_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        a_run(tmp_path / "a" / "run", SPEEDS),
        a_run(tmp_path / "b" / "run", SPEEDS[:3], ended="failed", steps=9),
        a_run(tmp_path / "[stopped]$_{$", SPEEDS, ended="stopped", steps=9),
    ]
    out = tmp_path / "out[" / "x]"  # neither rich's nor matplotlib's own words
    assert main(["report", *map(str, [*runs, runs[0]]), "--out", str(out)]) == 0
    first, second, third = rows(out)
    assert [row["name"] for row in (first, second, third)] == ["a: run", "b: run", "[stopped]$_{$"]
    # Without the first step: 10, 30, 20; percentiles between them are linear.
    assert [float(first[f"tokens_per_second{x}"]) for x in ("", "_p10", "_p90")] == [20, 12, 28]
    assert (float(first["loss"]), first["steps"], first["reports"], first["processes"]) == (2.0, "4", "3", "2")
    assert (first["status"], second["status"], third["status"]) == (states.DONE, states.FAILED, states.DONE)
    assert "failed after step 3 of 9" in second["reason"]
    assert "stopped at step 4 of 9" in third["reason"]
    markdown = (out / "report.md").read_text()
    assert "| a: run |" in markdown.replace("  ", " ")
    assert "MFU" not in markdown  # no peak is known, so nobody knows it
    assert "20" in capsys.readouterr().out
    for name in ("throughput", "step_time", "loss"):
        assert (out / f"{name}.png").read_bytes().startswith(PNG)


def test_wall_time_is_the_clocks(tmp_path: Path) -> None:
    """With all that passed between two reports; the first step took 100 s."""
    (run,) = read_runs([a_run(tmp_path / "run", SPEEDS)])
    assert curve_of(run) == [(100 * step, 100.0 + 1000 * (step - 1), 6.0 - step) for step in (1, 2, 3, 4)]


def test_a_report_that_begins_in_the_warm_up_does_not_count(tmp_path: Path) -> None:
    (run,) = read_runs([a_run(tmp_path / "run", SPEEDS)])
    run.warmup = 2
    for record in run.records[0]:
        record["steps"] = 2
    assert [record["step"] for record in run.steady()] == [4]


def test_a_sweep_with_repeats(tmp_path: Path) -> None:
    points = []
    for i, (name, speeds) in enumerate([("x", SPEEDS), ("x", [1.0, 40.0, 50.0, 60.0]), ("y", [1.0])]):
        folder = a_run(tmp_path / str(i), speeds)
        state = {"state": states.DONE} if name == "x" else {"state": states.TIMED_OUT, "reason": "no end after 5 s"}
        (folder / "status.json").write_text(json.dumps(state))
        points.append({"name": name, "folder": str(i)})
    sweep = {"name": "s", "warmup": 2, "world_size": 2, "points": points}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert main(["report", str(tmp_path)]) == 0
    x, y = rows(tmp_path / "report")
    # After two steps of warm-up: 30, 20 of the first run and 50, 60 of the second.
    assert (float(x["tokens_per_second"]), x["runs_done"], x["runs"]) == (40.0, "2", "2")
    assert (y["status"], y["reason"], y["tokens_per_second"]) == (states.TIMED_OUT, "no end after 5 s", "")


@pytest.mark.parametrize("words", [[], ["nowhere"], ["empty"], ["broken"]])
def test_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/sweep.json").write_text('{"warmup": 1')
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchtitan-mixle: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("report*"))


def test_damaged_files_of_a_run(tmp_path: Path) -> None:
    """A line cut short by a kill, a run.json that is none: what can be read is shown."""
    folder = a_run(tmp_path / "run", SPEEDS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    (folder / "run.json").write_text("[")
    assert main(["report", str(folder)]) == 0
    (row,) = rows(folder / "report")
    assert (row["steps"], float(row["tokens_per_second"])) == ("4", 20.0)
