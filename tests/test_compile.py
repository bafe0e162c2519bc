"""Compile and recomputation change speed and memory, never the numbers."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import BRIEF, TINY, build_trainer, job_config
from tests.ranks import RankPool
from torchtitan_mixle.metrics.counting import flops_per_token
from torchtitan_mixle.metrics.rates import recomputed_by
from torchtitan_mixle.model.args import args_of

SHARD = "parallelism.data_parallel_shard_degree"
TENSOR = "parallelism.tensor_parallel_degree"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {SHARD: 2}),
    "tp2": (2, {TENSOR: 2}),
    "fsdp2xtp2": (4, {SHARD: 2, TENSOR: 2}),
}
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpoint.mode": "none"},
    "full": {"activation_checkpoint.mode": "full"},
    "every second": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
    "op": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
}
STEPS = 3
CACHED_LAYOUTS = ["tp2", "fsdp2xtp2", "tp2"]


def steps(overrides: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Losses and norms of a few steps; from the third on a recompilation is an error."""
    import torch._functorch.config
    from torch._dynamo.utils import counters

    os.environ.update(env)
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = 1.0  # TorchTitan leaves there what an earlier job asked for
    counters.clear()
    trainer = build_trainer(overrides)
    log: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda step, loss, max_loss, norm, **k: log.append((loss, norm))
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, STEPS + 1):
        with torch._dynamo.config.patch(error_on_recompile=step >= 3):
            trainer.step += 1
            trainer.train_step(batches)
    names = [name for name, _ in trainer.model_parts[0].named_parameters()]
    trainer.close()
    return {
        "log": log,
        "graph_breaks": dict(counters["graph_break"]),
        "graphs": counters["stats"]["unique_graphs"],
        "names": names,
    }


def run(
    ranks: RankPool, layout: str, overrides: dict[str, Any], folder: Path, env: dict[str, str] | None = None
) -> dict[str, Any]:
    world_size, degrees = LAYOUTS[layout]
    job = TINY | BRIEF | degrees | {"job.dump_folder": str(folder), "training.global_batch_size": 4} | overrides
    return ranks.run(steps, world_size, job, env or {})[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "layout"),
    # The C++ compiler takes its time: it gets the layouts that hold what all of them hold.
    [*(("aot_eager", layout) for layout in LAYOUTS), ("inductor", "1"), ("inductor", "fsdp2xtp2")],
)
def test_compiled_equals_eager(backend: str, layout: str, ranks: RankPool, tmp_path: Path) -> None:
    """Each way to recompute, with and without compile, against plain eager of the same layout."""
    eager = run(ranks, layout, {}, tmp_path / "eager")
    assert eager["graphs"] == 0
    # Whole blocks are recomputed around the compiled code, so a second layout shows nothing new of the C++ compiler.
    ways = ("none", "op") if (backend, layout) == ("inductor", "fsdp2xtp2") else tuple(RECOMPUTATION)
    for name in ways:
        recompute = RECOMPUTATION[name]
        result = run(ranks, layout, recompute | {"compile.enable": True, "compile.backend": backend}, tmp_path / name)
        assert result["graphs"] > 0
        assert not result["graph_breaks"]
        for (loss, norm), (expected_loss, expected_norm) in zip(result["log"], eager["log"], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            assert norm == pytest.approx(expected_norm, rel=1e-4), name


@pytest.mark.slow
def test_ranks_do_not_take_each_others_code_from_the_cache(ranks: RankPool, tmp_path: Path) -> None:
    """257 columns of logits are 129 on one rank and 128 on the other, and groups differ between replicas.

    All compile into one cache, and later layouts find what earlier ones left there.
    """
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    job = {"compile.enable": True}
    logs = [run(ranks, layout, job, tmp_path / str(i), cache)["log"] for i, layout in enumerate(CACHED_LAYOUTS)]
    for layout, log in zip(CACHED_LAYOUTS, logs, strict=True):
        assert log == logs[CACHED_LAYOUTS.index(layout)]


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=pytest.mark.slow if x == "fsdp2xtp2" else []) for x in LAYOUTS]
)
def test_recomputation_is_bitwise(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    plain = run(ranks, layout, {}, tmp_path / "plain")
    for name, recompute in RECOMPUTATION.items():
        assert run(ranks, layout, recompute, tmp_path / name)["log"] == plain["log"], name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "fsdp2"])
def test_memory_budget(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    plain = run(ranks, layout, {}, tmp_path / "plain")
    budget = {"activation_checkpoint.mode": "memory_budget", "compile.enable": True}
    result = run(ranks, layout, budget, tmp_path / "budget")
    assert [loss for loss, _ in result["log"]] == pytest.approx([loss for loss, _ in plain["log"]], abs=1e-5)


def compiled_flops(jobs: list[dict[str, Any]]) -> list[int]:
    """For each job: FLOPs of the compiler's graphs, as often as they run in a step on this rank."""
    import torch._functorch.config
    from torch._dynamo import reset

    from tests.flops import counting_backend

    torch._functorch.config.activation_memory_budget = 1.0  # TorchTitan leaves there what an earlier job asked for
    name, runs = counting_backend()
    results = []
    for job in jobs:
        reset()
        trainer = build_trainer(job | {"compile.enable": True, "compile.backend": name})
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(2):
            runs.clear()
            trainer.step += 1
            trainer.train_step(batches)
        trainer.close()
        results.append(sum(runs))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2"])
def test_compiled_blocks_compute_what_the_closed_form_says(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    world_size, degrees = LAYOUTS[layout]
    early = RECOMPUTATION["full"] | {"activation_checkpoint.early_stop": True}
    ways = [*(RECOMPUTATION[name] for name in ("none", "full", "every second")), early]
    jobs = [TINY | degrees | way | {"job.dump_folder": str(tmp_path)} for way in ways]
    by_rank = ranks.run(compiled_flops, world_size, jobs)
    for i, job in enumerate(jobs):  # by op, torch's partitioner fails where inductor does not prepare the graph for it
        config = job_config(job | {"compile.enable": True})
        args = args_of(config)
        flops, recomputed = flops_per_token(args, config.training.seq_len), recomputed_by(config, args)
        assert recomputed is not None
        tokens = TINY["training.global_batch_size"] * TINY["training.seq_len"]
        # The head is not compiled.
        assert sum(rank[i] for rank in by_rank) == (flops.blocks + flops.attention + recomputed) * tokens, job
