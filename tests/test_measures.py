"""What a run reports against a clock, a FLOP counter and a list of host synchronisations, in every layout."""

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torchtitan.config.job_config import DataLoader as DataLoaderOptions

from tests.jobs import TINY, build_trainer, metrics_of, read_lines
from tests.ranks import RankPool
from tests.test_pipeline import EVEN
from tests.test_store import make_store
from torchtitan_mixle.data.loader import GlobalOrderLoader, TrainingSamples

SHARD = "parallelism.data_parallel_shard_degree"
CONTEXT = "parallelism.context_parallel_degree"
TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
FULL = {"activation_checkpoint.mode": "full"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {SHARD: 2, "training.local_batch_size": 4}),
    "cp2": (2, {CONTEXT: 2}),
    "tp2": (2, {TENSOR: 2}),
    "pp2": (2, {PIPELINE: 2} | EVEN),
    "accumulation 4, full recomputation": (1, FULL | {"training.local_batch_size": 2}),
}
PEAK_TFLOPS = 2.0
TOKENS_A_STEP = 8 * 32
BLOCKS, HEAD, ATTENTION = 72 * 4 * 128**2, 6 * 257 * 128, 12 * 4 * 128 * 32
FLOPS = BLOCKS + HEAD + ATTENTION


class LocalFlops(TorchDispatchMode):
    """Counts as FlopCounterMode does, which on a DTensor would count the whole product on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with this rank's share
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.counts[str(func._overloadpacket)] += formula(*args, **(kwargs or {}), out_val=out)
        return out


_WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class Syncs(TorchDispatchMode):
    """Notes the stack of whatever makes the host wait for the device.

    item(), bool(), float(), tolist(), numpy(), and results whose size depends on values, such as x[mask].
    """

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[list[str]] = []

    def note(self) -> None:
        self.stacks.append([frame.filename for frame in traceback.extract_stack()])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in _WAITS or by_mask:
            self.note()
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, int]:
        """All of them, and those with this package in the stack."""
        ours = sum(any("/torchtitan_mixle/" in name for name in stack) for stack in self.stacks)
        return {"all": len(self.stacks), "ours": ours}


@contextmanager
def noted_syncs() -> Iterator[Syncs]:
    syncs = Syncs()
    # These read a CPU tensor's memory without an operator; on a GPU they would wait all the same.
    patched = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}
    for name, original in patched.items():

        def noting(self: torch.Tensor, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            syncs.note()
            return _original(self, *args, **kwargs)

        setattr(torch.Tensor, name, noting)
    try:
        with syncs:
            yield syncs
    finally:
        for name, original in patched.items():
            setattr(torch.Tensor, name, original)


def make_last_rank_worst(trainer: Any) -> None:
    """Each rank holds a GiB more than the one before it; the last one waits for data for a quarter of each step."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    processor, load = trainer.metrics_processor, trainer.batch_generator
    monitor = processor.device_memory_monitor
    peak = monitor.get_peak_stats()._replace(max_reserved_gib=1.5 + rank, max_active_gib=1.0 + rank)
    monitor.get_peak_stats = lambda: peak

    def batches(loader: Any) -> Iterator[Any]:
        for batch in load(loader):
            if rank == world_size - 1:
                processor.data_loading_times.append(0.25 / trainer.gradient_accumulation_steps)
            yield batch

    trainer.batch_generator = batches


def measured_run(overrides: dict[str, Any]) -> dict[str, Any]:
    """Four steps of exactly one second each: the second counted in FLOPs, the last two in synchronisations."""
    trainer = build_trainer(overrides)
    make_last_rank_worst(trainer)
    clock = time.perf_counter
    time.perf_counter = lambda: float(trainer.step)
    trainer.metrics_processor.time_last_log = 0.0
    batches = trainer.batch_generator(trainer.dataloader)
    flops = LocalFlops()
    syncs = []
    try:
        with sdpa_kernel(SDPBackend.MATH):  # whose matrix products autograd shows one by one
            trainer.step = 1  # in which stages and DTensors also try out what shapes they will have
            trainer.train_step(batches)
            trainer.step = 2
            with flops:
                trainer.train_step(batches)
        for trainer.step in (3, 4):  # the third is not reported
            with noted_syncs() as noted:
                trainer.train_step(batches)
            syncs.append(noted.counts())
        trainer.close()
    finally:
        time.perf_counter = clock
    fused = {group["fused"] for optimizer in trainer.optimizers for group in optimizer.param_groups}
    return {"lines": metrics_of(overrides), "flops": dict(flops.counts), "syncs": syncs, "fused": fused}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, int, list[dict[str, Any]], Path]:
    """(layout, ranks, results by rank, folder)."""
    world_size, layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("run")
    job = TINY | {"training.local_batch_size": 8, "metrics.log_freq": 2, "metrics.enable_tensorboard": True}
    job |= {"job.dump_folder": str(folder), "mixle.peak_tflops": PEAK_TFLOPS}
    return request.param, world_size, ranks.run(measured_run, world_size, job | layout), folder


def test_rates_are_those_of_the_clock(run: Any) -> None:
    _, world_size, results, _ = run
    lines = results[0]["lines"]
    assert [line["step"] for line in lines] == [1, 2, 4]
    assert [line["steps"] for line in lines] == [1, 1, 2]
    assert [line["tokens_seen"] for line in lines] == [TOKENS_A_STEP * step for step in (1, 2, 4)]
    per_device = TOKENS_A_STEP / world_size
    for line in lines:
        assert line["step_seconds"] == 1
        assert line["tokens_per_second"] == TOKENS_A_STEP
        assert line["tokens_per_second_per_device"] == per_device
        assert line["tflops_per_device"] == pytest.approx(FLOPS * per_device / 1e12)
        assert line["mfu_pct"] == pytest.approx(100 * FLOPS * per_device / (PEAK_TFLOPS * 1e12))
        causal = FLOPS - ATTENTION / 2
        assert line["mfu_causal_pct"] == pytest.approx(100 * causal * per_device / (PEAK_TFLOPS * 1e12))
        assert line["max_loss"] >= line["loss"] > 0


def test_memory_and_waiting_for_data_are_the_worst_ranks(run: Any) -> None:
    _, world_size, results, _ = run
    for line in results[0]["lines"]:
        assert line["data_loading_pct"] == pytest.approx(25)
        assert (line["memory_gib"], line["memory_active_gib"]) == (world_size + 0.5, world_size)


def test_hfu_counts_what_runs_again(run: Any) -> None:
    layout, _, results, _ = run
    again = (BLOCKS + ATTENTION) / 3 if "recomputation" in layout else 0
    for line in results[0]["lines"]:
        assert line["hfu_pct"] == pytest.approx(line["mfu_pct"] * (FLOPS + again) / FLOPS)


def test_flops_are_those_counted_on_the_ranks(run: Any) -> None:
    layout, _, results, _ = run
    linear = sum(result["flops"].get(op, 0) for result in results for op in ("aten.mm", "aten.addmm"))
    everything = sum(sum(result["flops"].values()) for result in results)
    again = (BLOCKS + ATTENTION) / 3 if "recomputation" in layout else 0
    if layout == "cp2":  # whose attention computes what a causal query sees, and its scores again for the backward pass
        assert linear == (BLOCKS + HEAD) * TOKENS_A_STEP
        assert 0.5 * ATTENTION < everything / TOKENS_A_STEP - (BLOCKS + HEAD) < ATTENTION
    else:
        assert everything == (FLOPS + again) * TOKENS_A_STEP


SPLIT: list[dict[str, Any]] = [
    FULL | {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", "activation_checkpoint.early_stop": True},
    {
        "parallelism.pipeline_parallel_schedule": "DualPipeV",  # splits some backward passes, not all
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    },
]


def counted_and_reported(jobs: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """For each job: FLOPs that this rank counts in a step, FLOPs per token by the closed form, and MFU over HFU."""
    results = []
    for job in jobs:
        trainer = build_trainer(job)
        batches = trainer.batch_generator(trainer.dataloader)
        flops = LocalFlops()
        with sdpa_kernel(SDPBackend.MATH):
            trainer.step = 1
            trainer.train_step(batches)
            trainer.step = 2
            with flops:
                trainer.train_step(batches)
        rates = trainer.metrics_processor.rates
        reported = rates.over(1, 1, 1.0)
        trainer.close()
        results.append((sum(flops.counts.values()), rates.flops.total, reported["hfu_pct"] / reported["mfu_pct"]))
    return results


def test_hfu_of_a_backward_pass_in_parts_counts_every_run(ranks: RankPool, tmp_path: Path) -> None:
    """Torch runs a checkpointed block again for each part of its backward pass."""
    job = TINY | EVEN | {PIPELINE: 2, "training.local_batch_size": 8, "mixle.peak_tflops": PEAK_TFLOPS}
    jobs = [job | {"job.dump_folder": str(tmp_path)} | split for split in SPLIT]
    by_rank = ranks.run(counted_and_reported, 2, jobs)
    for i in range(len(jobs)):
        _, total, ratio = by_rank[0][i]
        assert sum(rank[i][0] for rank in by_rank) == pytest.approx(total * ratio * TOKENS_A_STEP, rel=1e-12)
        assert ratio > 1.05
    recomputed = json.loads((tmp_path / "run.json").read_text())["model"]["flops_per_token"]["recomputed"]
    assert FLOPS + recomputed == pytest.approx(FLOPS * by_rank[0][-1][2])


def test_no_step_waits_for_the_device_but_where_torchtitan_does(run: Any) -> None:
    """TorchTitan's own: the number of valid tokens at each step that shares data, and what it reports."""
    layout, _, results, _ = run
    for result in results:
        unreported, reported = result["syncs"]
        assert unreported["ours"] == 0
        assert unreported["all"] == (1 if layout == "fsdp2" else 0)
        assert reported["ours"] == (2 if layout == "pp2" else 1)  # the worst of the ranks; the loss of the last stage


def test_the_optimizer_is_fused(run: Any) -> None:
    assert all(result["fused"] == {True} for result in run[2])


def test_the_bubble_is_reported_for_a_pipeline_alone(run: Any) -> None:
    layout, _, results, _ = run
    for line in results[0]["lines"]:
        if layout == "pp2":  # 1F1B
            assert line["bubble_pct"] == pytest.approx(100 / (8 + 1))
        else:
            assert "bubble_pct" not in line


def test_the_record_and_the_summary(run: Any) -> None:
    """The first step is kept out; what stays is one second a step."""
    layout, world_size, _, folder = run
    record = json.loads((folder / "run.json").read_text())
    assert record["layout"]["world_size"] == world_size
    assert record["layout"]["name"] == ("1" if world_size == 1 else layout)
    assert record["config"]["training"]["seq_len"] == 32
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"]["peak_tflops"] == PEAK_TFLOPS
    assert record["model"]["flops_per_token"]["total"] == FLOPS
    assert record["summary"]["steps"] == 3
    assert record["summary"]["tokens_per_second"] == dict.fromkeys(("median", "p10", "p90"), TOKENS_A_STEP)
    assert len(list((folder / "tb").iterdir())) == 1, "one rank writes events"
    assert read_lines(folder / "metrics.jsonl")[0]["first_step"] is True


def test_the_loader_reads_a_million_tokens_a_second(tmp_path: Path) -> None:
    """In one process, from memory-mapped files, shuffled, as batches of tensors."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 250, 50_000).tolist() for _ in range(40)]
    store = make_store(tmp_path / "store", documents, shard_tokens=500_000)
    samples = TrainingSamples(store, seq_len=1024, vocab_size=store.vocab_size, seed=0)
    loader = GlobalOrderLoader(
        samples, dp_rank=1, dp_world_size=8, local_batch_size=8, options=DataLoaderOptions(num_workers=0)
    )
    batches = iter(loader)
    next(batches)
    rates = []
    for _ in range(5):  # the best of which tells, on a machine that does other things too
        began = time.perf_counter()
        tokens = sum(next(batches)[1].numel() for _ in range(50))
        rates.append(tokens / (time.perf_counter() - began))
    assert max(rates) > 1e6, rates
