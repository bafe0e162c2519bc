"""A checkpoint of any layout is a checkpoint of every layout: weights, moments and what comes next."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.jobs import BRIEF, TINY, build_trainer, full, metrics_of
from tests.ranks import RankPool

SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
STAGES = {"training.local_batch_size": 4, "training.global_batch_size": 8}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {SHARD: 2}),
    "tp2": (2, {TENSOR: 2}),
    "tp4": (4, {TENSOR: 4}),
    "fsdp2xtp2": (4, {SHARD: 2, TENSOR: 2}),
    "pp2": (2, {PIPELINE: 2} | STAGES),
    "pp2xtp2": (4, {PIPELINE: 2, TENSOR: 2} | STAGES),
    "ddp2xtp2": (4, {REPLICATE: 2, TENSOR: 2}),
    "fsdp4xtp2": (8, {SHARD: 4, TENSOR: 2, "training.local_batch_size": 1, "training.global_batch_size": 8}),
}
EACH_WITH_EACH = ("1", "tp2", "tp4", "fsdp2xtp2", "pp2xtp2")
PAIRS = list(permutations(EACH_WITH_EACH, 2))
PAIRS += [pair for other in LAYOUTS if other not in EACH_WITH_EACH for pair in (("1", other), (other, "1"))]
PAIRS.sort(key=lambda pair: pair[1])  # ranks keep DTensor's caches between cases of one layout


def run(overrides: dict[str, Any], load: bool) -> dict[str, Any]:
    """Train to training.steps, from a checkpoint if `load`; the whole state before and after, and the losses."""
    trainer = build_trainer(overrides)
    if load:
        assert trainer.checkpointer.load()
    state = whole_state(trainer)
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step, last_step=trainer.step == overrides["training.steps"])
    after = whole_state(trainer)
    trainer.close()
    return {"loaded": state, "trained": after, "losses": [line["loss"] for line in metrics_of(overrides)]}


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks hold; where several hold the same, they must agree."""
    whole: dict[str, Any] = {"losses": results[0]["losses"]}
    for moment in ("loaded", "trained"):
        whole[moment] = {}
        for result in results:
            for key, value in result[moment].items():
                assert torch.equal(whole[moment].setdefault(key, value), value), key
    return whole


def whole_state(trainer: Any) -> dict[str, Tensor]:
    """Full weights and moments of this rank's stages by checkpoint key."""
    state = trainer.optimizers.state_dict()
    for part in trainer.model_parts:
        state |= part.state_dict()
    return {key: full(value) for key, value in state.items() if isinstance(value, Tensor)}


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Layout -> (dump folder, what was saved there after three steps)."""
    result = {}
    for name, (world_size, degrees) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        job = (
            TINY
            | degrees
            | {
                "checkpoint.enable": True,
                "model.flavor": "shallow",
                "training.steps": 3,
                "lr_scheduler.total_steps": 4,
                "job.dump_folder": str(folder),
            }
        )
        result[name] = (folder, together(ranks.run(run, world_size, job, False)))
    return result


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps of one process."""
    return ranks.run(
        run, 1, TINY | BRIEF | {"training.steps": 4, "job.dump_folder": str(tmp_path_factory.mktemp("four"))}, False
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_reads_what_another_layout_wrote(
    writer: str,
    reader: str,
    saved: dict[str, tuple[Path, dict[str, Any]]],
    unbroken: dict[str, Any],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    folder, written = saved[writer]
    (tmp_path / "checkpoint").symlink_to(folder / "checkpoint")
    world_size, degrees = LAYOUTS[reader]
    job = TINY | BRIEF | degrees | {"checkpoint.enable": True, "checkpoint.load_only": True, "training.steps": 4}
    read = together(ranks.run(run, world_size, job | {"job.dump_folder": str(tmp_path)}, True))
    assert read["loaded"].keys() == written["trained"].keys()
    for key, value in written["trained"].items():
        assert torch.equal(read["loaded"][key], value), key
    assert read["losses"] == pytest.approx(unbroken["losses"][3:], abs=1e-4)


def test_the_compared_state_holds_everything(unbroken: dict[str, Any]) -> None:
    """Otherwise the comparison above could pass by comparing little."""
    keys = unbroken["trained"]
    parameters = [key for key in keys if f"state.{key}.exp_avg" in keys]
    assert len(parameters) == 2 * 12 + 4
    assert all(f"state.{key}.exp_avg_sq" in keys for key in parameters)
    assert all(keys[f"state.{key}.exp_avg"].any() for key in parameters)
