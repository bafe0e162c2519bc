"""A checkpoint of any layout is a checkpoint of every layout: weights, moments and what comes next."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.jobs import TINY, build_trainer, full
from tests.ranks import RankPool

SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
TENSOR = "parallelism.tensor_parallel_degree"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {SHARD: 2}),
    "tp2": (2, {TENSOR: 2}),
    "tp4": (4, {TENSOR: 4}),
    "fsdp2xtp2": (4, {SHARD: 2, TENSOR: 2}),
    "ddp2xtp2": (4, {REPLICATE: 2, TENSOR: 2}),
}


def run(overrides: dict[str, Any], load: bool) -> dict[str, Any]:
    """Train to training.steps, from a checkpoint if `load`; the whole state before and after, and the losses."""
    trainer = build_trainer(overrides)
    if load:
        assert trainer.checkpointer.load()
    state = whole_state(trainer)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *a, **k: losses.append(loss)
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step, last_step=trainer.step == overrides["training.steps"])
    after = whole_state(trainer)
    trainer.close()
    return {"loaded": state, "trained": after, "losses": losses}


def whole_state(trainer: Any) -> dict[str, Tensor]:
    """Full weights and moments by checkpoint key."""
    state = trainer.model_parts[0].state_dict() | trainer.optimizers.state_dict()
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
                "training.steps": 3,
                "lr_scheduler.total_steps": 4,
                "job.dump_folder": str(folder),
            }
        )
        result[name] = (folder, ranks.run(run, world_size, job, False)[0])
    return result


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps of one process."""
    return ranks.run(
        run, 1, TINY | {"training.steps": 4, "job.dump_folder": str(tmp_path_factory.mktemp("four"))}, False
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), list(permutations(LAYOUTS, 2)))
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
    job = TINY | degrees | {"checkpoint.enable": True, "checkpoint.load_only": True, "training.steps": 4}
    read = ranks.run(run, world_size, job | {"job.dump_folder": str(tmp_path)}, True)
    for result in read:
        assert result["loaded"].keys() == written["trained"].keys()
        for key, value in written["trained"].items():
            assert torch.equal(result["loaded"][key], value), key
        assert result["losses"] == pytest.approx(unbroken["losses"][3:], abs=1e-4)


def test_the_compared_state_holds_everything(unbroken: dict[str, Any]) -> None:
    """Otherwise the comparison above could pass by comparing little."""
    keys = unbroken["trained"]
    parameters = [key for key in keys if f"state.{key}.exp_avg" in keys]
    assert len(parameters) == 4 * 12 + 4
    assert all(f"state.{key}.exp_avg_sq" in keys for key in parameters)
    assert all(keys[f"state.{key}.exp_avg"].any() for key in parameters)
