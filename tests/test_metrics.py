"""metrics.jsonl, rates and utilisation."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torchtitan.distributed import ParallelDims

from tests.jobs import ROOT, TINY, build_trainer, job_config, metrics_of, read_lines, train
from tests.ranks import RankPool
from torchtitan_mixle.metrics.jsonl import StepLog
from torchtitan_mixle.metrics.rates import device_peak, job_rates
from torchtitan_mixle.metrics.run_record import RunRecord, git_state
from torchtitan_mixle.metrics.summary import Summary
from torchtitan_mixle.metrics.tensorboard import TensorBoard
from torchtitan_mixle.model.args import CausalLMArgs


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


@pytest.mark.parametrize("rest", [b'\n{"step": 2, "lo', b"", b"\n\0\0\xff\xfe"])
def test_a_line_cut_short_by_a_crash_does_not_stay(rest: bytes, tmp_path: Path) -> None:
    """In its middle, before its end of line, or as a file system leaves blocks that were not written."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}' + rest)
    StepLog(path).append({"step": 2, "loss": 1.0})
    assert read_lines(path) == [{"step": 1}, {"step": 2, "loss": 1.0}]


def test_nan_is_null_so_that_any_json_reader_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    StepLog(path).append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None}


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
    return list(events(folder, tag).values())


def events(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value, as a reader of the folder sees them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tb")).Reload().Scalars(tag)
    assert len({event.step for event in found}) == len(found), "a step is there twice"
    return {event.step: event.value for event in found}


def test_events_hold_each_step_once_across_starts(tmp_path: Path) -> None:
    for start, steps in ((1, range(1, 6)), (2, range(4, 8))):  # the last checkpoint was at step 3
        board = TensorBoard(tmp_path / "tb")
        board.start_at(steps[0])
        for step in steps:
            board.log({"start": start}, step)
        board.close()
    assert events(tmp_path, "start") == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2}


def test_summary_is_median_and_percentiles() -> None:
    summary = Summary()
    assert summary.line() is None
    for rate in (100.0, 10.0, 50.0, 20.0, 30.0):
        summary.add({"tokens_per_second": rate, "tokens_per_second_per_device": rate, "step_seconds": 1 / rate}, 10)
    spread = summary.spreads()["tokens_per_second"]
    assert (summary.steps, spread["median"]) == (50, 30)
    assert (spread["p10"], spread["p90"]) == (pytest.approx(14), pytest.approx(80))


def compiled_step(overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """A run of a fake clock whose first step of this start takes a hundred seconds and is not reported."""
    import time

    trainer = build_trainer(overrides)
    clock = time.perf_counter
    time.perf_counter = lambda: 0.0 if trainer.step < 8 else 100.0 + trainer.step - 8
    trainer.metrics_processor.time_last_log = 0.0
    batches = trainer.batch_generator(trainer.dataloader)
    try:
        for trainer.step in range(8, 13):
            trainer.train_step(batches)
        trainer.close()
    finally:
        time.perf_counter = clock
    return metrics_of(overrides)


def test_the_first_step_of_a_start_is_in_no_average(ranks: RankPool, tmp_path: Path) -> None:
    """Step 8 is the first after a resume, and log_freq=5 reports steps 10 and 15."""
    job = TINY | {"job.dump_folder": str(tmp_path), "metrics.log_freq": 5}
    (line,) = ranks.run(compiled_step, 1, job)[0]
    assert (line["step"], line["steps"], line["step_seconds"]) == (10, 2, 1)
    assert line["tokens_per_second"] == 8 * 32
    assert "first_step" not in line


def validating_run(overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of one second each on a fake clock, with a validation of a hundred seconds after each."""
    import time

    trainer = build_trainer(overrides)
    clock, now = time.perf_counter, 0.0
    time.perf_counter = lambda: now
    trainer.metrics_processor.time_last_log = 0.0
    batches, sum_loss = trainer.batch_generator(trainer.dataloader), trainer.validator._sum_loss

    def slow_sum_loss(*args: Any) -> Any:
        nonlocal now
        now += 100.0
        return sum_loss(*args)

    trainer.validator._sum_loss = slow_sum_loss
    try:
        for trainer.step in (1, 2, 3, 4):
            now += 1.0
            trainer.train_step(batches)
            trainer.validator.validate(trainer.model_parts, trainer.step)
        trainer.close()
    finally:
        time.perf_counter = clock
    return metrics_of(overrides)


def test_validation_takes_no_time_or_tokens_of_training(ranks: RankPool, tmp_path: Path) -> None:
    job = TINY | {"job.dump_folder": str(tmp_path), "metrics.log_freq": 2, "validation.enable": True}
    job |= {"validation.steps": 1, "validation.local_batch_size": 2, "validation.seq_len": 32}
    lines = ranks.run(validating_run, 1, job)[0]
    assert [(line["step"], line["step_seconds"]) for line in lines] == [(1, 1), (2, 1), (4, 1)]
    assert {line["tokens_per_second"] for line in lines} == {8 * 32}
    assert [line["tokens_seen"] for line in lines] == [8 * 32 * step for step in (1, 2, 4)]


def test_a_second_start_keeps_the_first_ones_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    dims = ParallelDims(dp_replicate=2, dp_shard=3, cp=2, tp=4, pp=5, ep=1, etp=1, world_size=240)
    for start in (1, 2, 3):
        RunRecord(path, job_config({}), dims, start=start).write()
    record = json.loads(path.read_text())
    assert (record["start"], record["layout"]["name"]) == (3, "hsdp2x3xtp4xpp5xcp2")
    assert [line["start"] for line in read_lines(tmp_path / "run.earlier.jsonl")] == [1, 2]
    assert record["config"]["mixle"]["peak_tflops"] is None
    path.write_text("{ cut")
    RunRecord(path, job_config({}), dims, start=4).write()
    assert read_lines(tmp_path / "run.earlier.jsonl")[-1] == {"unreadable": "{ cut"}


def test_git_state_is_of_the_packages_repository() -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    state = git_state()
    assert state is not None
    assert state["commit"] == commit.stdout.strip()


@pytest.mark.parametrize(
    ("overrides", "peak", "said"),
    [
        ({}, 989e12, "989.0 TFLOP/s, the dense bfloat16 peak of NVIDIA H100 80GB HBM3"),
        ({"converters": ["float8"]}, 1979e12, "1979.0 TFLOP/s, the dense float8 peak of NVIDIA H100 80GB HBM3"),
        ({"converters": ["float8"], "emulate": True}, 989e12, "dense bfloat16 peak"),
        ({"peak_tflops": 500.0}, 500e12, "500.0 TFLOP/s of [mixle] peak_tflops"),
        ({"name": "foo"}, None, "no peak rate is known for 'foo' in bfloat16; [mixle] peak_tflops gives one"),
        ({"name": "NVIDIA RTX A6000", "converters": ["float8"]}, None, "'NVIDIA RTX A6000' in float8"),
    ],
)
def test_the_log_says_which_peak(
    overrides: dict[str, Any], peak: float | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = job_config({})
    config.model.converters = overrides.get("converters", [])
    config.quantize.linear.float8.emulate = overrides.get("emulate", False)
    config.mixle.peak_tflops = overrides.get("peak_tflops")
    with caplog.at_level("INFO"):
        assert device_peak(config, overrides.get("name", "NVIDIA H100 80GB HBM3")) == peak
    assert said in caplog.text


def test_replicas_and_shards_both_bring_tokens() -> None:
    """HSDP over tensor, pipeline and context parallelism: six data-parallel ranks of 240."""
    dims = ParallelDims(dp_replicate=2, dp_shard=3, cp=2, tp=4, pp=5, ep=1, etp=1, world_size=240)
    config: Any = job_config({"mixle.peak_tflops": 2.0})
    job = job_rates(config, dims, CausalLMArgs(), "cpu")
    rates = job.over(tokens=1000, steps=4, seconds=2.0)
    assert (rates["step_seconds"], rates["tokens_per_second"]) == (0.5, 3000)
    assert rates["tokens_per_second_per_device"] == 12.5
    assert rates["mfu_pct"] == pytest.approx(100 * job.flops.total * 12.5 / 2e12)


def test_the_log_says_why_there_is_no_hfu(caplog: pytest.LogCaptureFixture) -> None:
    config: Any = job_config({"activation_checkpoint.mode": "memory_budget", "mixle.peak_tflops": 1.0})
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    with caplog.at_level("INFO"):
        rates = job_rates(config, dims, CausalLMArgs(), "cpu").over(1, 1, 1.0)
    assert "mfu_pct" in rates
    assert "hfu_pct" not in rates
    assert "HFU is not reported: under activation_checkpoint.mode='memory_budget'" in caplog.text


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
