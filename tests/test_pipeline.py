"""Every pipeline is the one-process run: same start, same loss, same norm, same gradients, one tied matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import TINY, steps_with_gradients
from tests.ranks import RankPool

PIPELINE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
TENSOR = "parallelism.tensor_parallel_degree"
EVEN = {
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {PIPELINE: 2}),
    "pp4": (4, {PIPELINE: 4}),
    "pp2xfsdp2": (4, {PIPELINE: 2, SHARD: 2}),
    "pp2xddp2": (4, {PIPELINE: 2, REPLICATE: 2, SHARD: 1}),
    "pp2xtp2": (4, {PIPELINE: 2, TENSOR: 2}),
    "pp4xtp2": (8, {PIPELINE: 4, TENSOR: 2}),
    "pp2xfsdp2xtp2": (8, {PIPELINE: 2, SHARD: 2, TENSOR: 2}),
    "hsdp2xpp2": (8, {PIPELINE: 2, REPLICATE: 2, SHARD: 2}),
}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


def sizes(layout: dict[str, Any], *, accumulation: int = 1) -> dict[str, Any]:
    dp = layout.get(SHARD, 1) * layout.get(REPLICATE, 1)
    local = TINY["training.global_batch_size"] // dp // accumulation
    return TINY | EVEN | layout | {"training.local_batch_size": local}


def compare(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """The bars of every layout; the stages together must be the whole model, and the tie one matrix."""
    gradients: dict[str, Any] = {}
    final: dict[str, Any] = {}
    for result in results:
        for name, value in result["initial"].items():
            assert torch.equal(value, reference["initial"][name]), f"initial {name}"
        gradients |= result["gradients"]
        final |= result["final"]
        assert result["loss"][0] == pytest.approx(reference["loss"][0], rel=1e-5)
        assert result["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-5)
        assert result["loss"] == pytest.approx(reference["loss"], abs=1e-4)
    assert final.keys() == reference["final"].keys()
    assert gradients.keys() == reference["gradients"].keys(), "the mirror must have no gradient left"
    for name, gradient in reference["gradients"].items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"gradient of {name}: {error:.1e}"
    assert torch.equal(final["tok.weight"], final["head.weight"])


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = TINY | {"training.local_batch_size": TINY["training.global_batch_size"]}
    return ranks.run(steps_with_gradients, 1, job | {"job.dump_folder": str(tmp_path_factory.mktemp("one"))})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    world_size, degrees = LAYOUTS[layout]
    job = sizes(degrees) | {SCHEDULE: "GPipe" if layout.startswith("pp4") else "1F1B"}
    compare(ranks.run(steps_with_gradients, world_size, job | {"job.dump_folder": str(tmp_path)}), one_process)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(schedule: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    job = sizes({PIPELINE: 2}) | {SCHEDULE: schedule, "job.dump_folder": str(tmp_path)}
    compare(ranks.run(steps_with_gradients, 2, job), one_process)
