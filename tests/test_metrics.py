"""metrics.jsonl, rates and utilisation."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TINY, build_trainer, job_config, metrics_of, read_lines, train
from tests.ranks import RankPool
from torchtitan_mixle.metrics.jsonl import StepLog


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_each_step_once_across_starts(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = StepLog(path)
    for step in (1, 2, 3, 4, 5):
        first.append({"step": step, "start": 1})
    resumed = StepLog(path)  # the last checkpoint was at step 3
    for step in (4, 5, 6):
        resumed.append({"step": step, "start": 2})
    assert [(x["step"], x["start"]) for x in read_lines(path)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert steps(path.with_suffix(".superseded.jsonl")) == [4, 5]
    assert sorted(p.name for p in path.parent.iterdir()) == ["metrics.jsonl", "metrics.superseded.jsonl"]


def test_lines_of_an_abandoned_branch_go_even_if_the_first_steps_are_not_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = StepLog(path)
    for step in range(1, 9):
        first.append({"step": step})
    resumed = StepLog(path)
    resumed.start_at(3)
    resumed.append({"step": 5, "new": True})
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 5, "new": True}]


def test_a_line_cut_short_by_a_crash_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    StepLog(path).append({"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    StepLog(path).append({"step": 2, "loss": 1.0})
    assert read_lines(path) == [{"step": 1}, {"step": 2, "loss": 1.0}]


def test_nan_is_null_so_that_any_json_reader_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    StepLog(path).append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None}


def log_with_a_clock(overrides: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One report after exactly `seconds` in which this rank trained 1000 tokens."""
    import torchtitan_mixle.metrics.processor as processor

    trainer = build_trainer(overrides)
    metrics = trainer.metrics_processor
    metrics.ntokens_since_last_log = 1000
    metrics.data_loading_times = [seconds / 4]
    metrics.time_last_log = 100.0
    clock = processor.time.perf_counter
    processor.time.perf_counter = lambda: 100.0 + seconds
    try:
        metrics.log(1, 2.5, 3.0, 0.5, {"lr": 0.1, "n_tokens_seen": 0})
    finally:
        processor.time.perf_counter = clock
        trainer.close()
    return metrics_of(overrides)[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_rates_and_mfu_are_those_of_the_clock(world_size: int, ranks: RankPool, tmp_path: Path) -> None:
    job = TINY | {"job.dump_folder": str(tmp_path), "mixle.peak_tflops": 2.0}
    line = ranks.run(log_with_a_clock, world_size, job, 2.0)[0]
    flops = 72 * 4 * 128**2 + 12 * 4 * 128 * 32 + 6 * 257 * 128
    assert line["tokens_per_second"] == pytest.approx(500 * world_size)
    assert line["tokens_per_second_per_device"] == pytest.approx(500)
    assert line["tflops_per_device"] == pytest.approx(500 * flops / 1e12)
    assert line["mfu_pct"] == pytest.approx(100 * 500 * flops / 2e12)
    assert line["mfu_causal_pct"] == pytest.approx(100 * 500 * (flops - 6 * 4 * 128 * 32) / 2e12)
    assert line["data_loading_pct"] == pytest.approx(25)
    assert (line["loss"], line["max_loss"], line["grad_norm"], line["lr"]) == (2.5, 3.0, 0.5, 0.1)


def test_a_run_writes_true_numbers_from_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    job = TINY | {"job.dump_folder": str(tmp_path), "metrics.enable_tensorboard": True, "validation.enable": True}
    job |= {"validation.steps": 2, "validation.local_batch_size": 2, "validation.seq_len": 32}
    lines = ranks.run(train, 2, job)[0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["tokens_seen"] for line in lines] == [8 * 32 * step for step in (1, 2, 3, 4, 5)]
    assert not any(key.startswith("mfu") for line in lines for key in line), "a CPU has no peak, so no MFU"
    assert all(0.1 < line["memory_gib"] < 16 for line in lines)
    assert all(line["max_loss"] >= line["loss"] for line in lines)
    assert scalars(tmp_path, "loss_metrics/global_avg_loss") == pytest.approx([line["loss"] for line in lines])
    validation = read_lines(tmp_path / "validation.jsonl")
    assert [line["step"] for line in validation] == [1, 5]
    assert all(line["tokens"] == 2 * 2 * 2 * 32 for line in validation)


def scalars(folder: Path, tag: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = (folder / "tb").iterdir()
    (events,) = run.iterdir()
    return [event.value for event in EventAccumulator(str(events)).Reload().Scalars(tag)]


def test_upstreams_a100_peak_is_not_printed(ranks: RankPool, tmp_path: Path) -> None:
    text = "\n".join(ranks.run(start_up_log, 1, TINY | {"job.dump_folder": str(tmp_path)})[0])
    assert "MFU is not reported: no peak rate is known for" in text
    assert "A100" not in text
    assert "Peak FLOPS" not in text


def start_up_log(overrides: dict[str, Any]) -> list[str]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        build_trainer(overrides).close()
    finally:
        root.removeHandler(handler)
    return lines


def test_job_config_reads_our_section() -> None:
    config = job_config({"mixle.vocab_size": 300, "mixle.peak_tflops": 12.5})
    assert (config.mixle.vocab_size, config.mixle.block, config.mixle.peak_tflops) == (300, None, 12.5)
    assert config.checkpoint.last_save_model_only is False
