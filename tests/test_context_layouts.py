"""Context parallelism in real runs: the same run as one process's, with every method, order and neighbour."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from tests import test_layouts, test_pipeline
from tests.jobs import BRIEF, TINY, build_trainer, job_config, metrics_of, read_lines, steps_with_gradients, train
from tests.ranks import RankPool
from tests.test_plan import SHAPE, plan
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.planning.check import check_plan
from torchtitan_mixle.planning.sequence import METHODS, ORDERS
from torchtitan_mixle.planning.values import check_values

CONTEXT = "parallelism.context_parallel_degree"
SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
METHOD, ORDER = "mixle.context_parallel_method", "mixle.context_parallel_order"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {CONTEXT: 2}),
    "cp4": (4, {CONTEXT: 4}),
    "cp2xfsdp2": (4, {CONTEXT: 2, SHARD: 2}),
    "cp2xtp2": (4, {CONTEXT: 2, TENSOR: 2}),
    "cp2xpp2": (4, {CONTEXT: 2, PIPELINE: 2}),
    "cp2xtp2xpp2": (8, {CONTEXT: 2, TENSOR: 2, PIPELINE: 2}),
    "cp2xfsdp2xtp2": (8, {CONTEXT: 2, SHARD: 2, TENSOR: 2}),
}
QUICK = {("cp2", "allgather", "headtail"), ("cp2xtp2", "ulysses", "contiguous"), ("cp2xpp2", "ring", "headtail")}
MATRIX = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in ((layout, method, order) for layout in LAYOUTS for method in METHODS for order in ORDERS)
]


PAIRED = {"parallelism.pipeline_parallel_microbatch_size": 2}
"""Half as many microbatches: what a pipeline does with many is seen without context parallelism."""


def check(
    ranks: RankPool, folder: Path, one_process: dict[str, Any], world_size: int, overrides: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run a job of TINY's global batch and hold it to the bars."""
    pipeline = PIPELINE in overrides
    dp = overrides.get(SHARD, 1) * overrides.get(REPLICATE, 1)
    job = TINY | (test_pipeline.EVEN | PAIRED if pipeline else {})
    job |= {"training.local_batch_size": TINY["training.global_batch_size"] // dp, "job.dump_folder": str(folder)}
    results = ranks.run(steps_with_gradients, world_size, job | overrides)
    (test_pipeline if pipeline else test_layouts).compare(results, one_process)
    return results


SHALLOW = {"model.flavor": "shallow"}
"""Two blocks, where there are no stages that need more."""


def alone(ranks: RankPool, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """The job in one process."""
    job = TINY | {"training.local_batch_size": 8, "job.dump_folder": str(folder)}
    return ranks.run(steps_with_gradients, 1, job | more)[0]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return alone(ranks, tmp_path_factory.mktemp("one"), {})


@pytest.fixture(scope="module")
def shallow_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return alone(ranks, tmp_path_factory.mktemp("shallow"), SHALLOW)


@pytest.fixture(scope="module")
def brief_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return alone(ranks, tmp_path_factory.mktemp("brief"), BRIEF)


@pytest.mark.parametrize(("layout", "method", "order"), MATRIX)
def test_layout(
    layout: str,
    method: str,
    order: str,
    one_process: dict[str, Any],
    shallow_process: dict[str, Any],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    world_size, degrees = LAYOUTS[layout]
    job = degrees | {METHOD: method, ORDER: order}
    if PIPELINE in degrees:
        check(ranks, tmp_path, one_process, world_size, job)
    else:
        check(ranks, tmp_path, shallow_process, world_size, job | SHALLOW)


FULL = {"activation_checkpoint.mode": "full"}
BY_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
COMPILE = {"compile.enable": True, "compile.backend": "aot_eager"}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (2, {CONTEXT: 2, METHOD: "ring", "training.local_batch_size": 2}),
    "an order against the load balancer": (
        2,
        {CONTEXT: 2, ORDER: "headtail", "parallelism.context_parallel_load_balancer": None},
    ),
    "replicas": (4, {CONTEXT: 2, REPLICATE: 2, SHARD: 1, METHOD: "ring"}),
    "full recomputation, ring": (2, FULL | {CONTEXT: 2, METHOD: "ring"}),
    "full recomputation, pipeline": (4, FULL | {CONTEXT: 2, PIPELINE: 2, METHOD: "allgather"}),
    "recomputation by op, allgather": (2, BY_OP | {CONTEXT: 2, METHOD: "allgather"}),
    "recomputation by op, ulysses, tp2": (4, BY_OP | {CONTEXT: 2, TENSOR: 2, METHOD: "ulysses"}),
    "compile, allgather": (2, COMPILE | {CONTEXT: 2, METHOD: "allgather"}),
    "compile, ring, full recomputation": (2, COMPILE | FULL | {CONTEXT: 2, METHOD: "ring"}),
    "compile, ulysses, tp2, recomputation by op": (4, COMPILE | BY_OP | {CONTEXT: 2, TENSOR: 2, METHOD: "ulysses"}),
    "zero bubble": (4, {CONTEXT: 2, PIPELINE: 2, METHOD: "ring", SCHEDULE: "ZBVZeroBubble"}),
    "zero bubble, full recomputation": (
        4,
        FULL | {CONTEXT: 2, PIPELINE: 2, METHOD: "ulysses", SCHEDULE: "InterleavedZeroBubble"},
    ),
    "zero bubble, fsdp2": (8, {CONTEXT: 2, SHARD: 2, PIPELINE: 2, METHOD: "allgather", SCHEDULE: "ZBVZeroBubble"}),
    "loss parallel off": (4, {CONTEXT: 2, TENSOR: 2, METHOD: "ring", "parallelism.disable_loss_parallel": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(
    variant: str,
    one_process: dict[str, Any],
    brief_process: dict[str, Any],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    world_size, overrides = VARIANTS[variant]
    if SCHEDULE in overrides:  # whose stages need the four blocks
        check(ranks, tmp_path, one_process, world_size, overrides)
    else:
        check(ranks, tmp_path, brief_process, world_size, BRIEF | overrides)


def hide_second_half(labels: Tensor, sample: list[int]) -> Tensor:
    """In contiguous order the later ranks then have none."""
    return torch.cat([labels[: len(labels) // 2], torch.full_like(labels[len(labels) // 2 :], IGNORE_INDEX)])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_without_labels(order: str, ranks: RankPool, tmp_path: Path) -> None:
    """In contiguous order the last rank then has nothing to learn from, and the others must not count it."""
    job = TINY | BRIEF | {"training.local_batch_size": 8}
    one = ranks.run(steps_with_gradients, 1, job | {"job.dump_folder": str(tmp_path / "one")}, hide_second_half)[0]
    job |= {CONTEXT: 2, ORDER: order, "job.dump_folder": str(tmp_path / "two")}
    test_layouts.compare(ranks.run(steps_with_gradients, 2, job, hide_second_half), one)


def test_a_short_sequence(ranks: RankPool, tmp_path: Path) -> None:
    """T = cp * tp in contiguous order: one token a rank."""
    job = TINY | BRIEF | {"training.seq_len": 4, "training.local_batch_size": 8}
    one = ranks.run(steps_with_gradients, 1, job | {"job.dump_folder": str(tmp_path / "one")})[0]
    for method in METHODS:
        more = {CONTEXT: 2, TENSOR: 2, ORDER: "contiguous", METHOD: method}
        results = ranks.run(steps_with_gradients, 4, job | more | {"job.dump_folder": str(tmp_path / method)})
        test_layouts.compare(results, one)


def continued(overrides: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Train on to `steps` from the newest checkpoint."""
    trainer = build_trainer(overrides | {"training.steps": steps})
    trainer.train()
    trainer.close()
    return metrics_of(overrides)


@pytest.mark.slow
def test_what_a_run_reports(ranks: RankPool, tmp_path: Path) -> None:
    """Tokens, losses and validation of one process; and it goes on in one process where two left off."""
    job = TINY | {"training.local_batch_size": 8, "training.steps": 2, "checkpoint.enable": True}
    job |= {
        "checkpoint.interval": 2,
        "validation.enable": True,
        "validation.steps": 2,
        "validation.local_batch_size": 8,
    }
    job |= {"validation.seq_len": 32, "validation.freq": 2}
    ranks.run(train, 1, job | {"job.dump_folder": str(tmp_path / "one")})
    one = ranks.run(continued, 1, job | {"job.dump_folder": str(tmp_path / "one")}, 4)[0]
    validation = read_lines(tmp_path / "one" / "validation.jsonl")
    for name, world_size, more in (
        ("cp2", 2, {CONTEXT: 2, METHOD: "ring"}),
        ("cp2xpp2", 4, {CONTEXT: 2, PIPELINE: 2, METHOD: "ulysses"}),
    ):
        folder = {"job.dump_folder": str(tmp_path / name)}
        ranks.run(train, world_size, job | more | folder)
        lines = ranks.run(continued, 1, job | folder, 4)[0]
        for a, b in zip(one, lines, strict=True):
            assert (b["step"], b["tokens_seen"]) == (a["step"], a["tokens_seen"])
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
            assert b["max_loss"] == pytest.approx(a["max_loss"], abs=1e-4)
        for a, b in zip(validation, read_lines(tmp_path / name / "validation.jsonl"), strict=True):
            assert (b["step"], b["tokens"]) == (a["step"], a["tokens"])
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)


@pytest.mark.slow
def test_bfloat16(ranks: RankPool, tmp_path: Path) -> None:
    """FSDP casts the model to bfloat16, and the methods are no further off than its rounding."""
    job = TINY | BRIEF | {"training.mixed_precision_param": "bfloat16"}
    fsdp = job | {SHARD: 2, "training.local_batch_size": 4, "job.dump_folder": str(tmp_path / "fsdp")}
    reference = ranks.run(train, 2, fsdp)[0]
    for method in METHODS:
        more = {CONTEXT: 2, METHOD: method, "training.local_batch_size": 8, "job.dump_folder": str(tmp_path / method)}
        for a, b in zip(reference, ranks.run(train, 2, job | more)[0], strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2)


def positions_of_the_trainer(order: str) -> tuple[list[int], list[int]]:
    """Which tokens TorchTitan gives this rank, and which our attention believes it has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    from torchtitan_mixle.planning.sequence import chunks_of_rank, chunks_per_rank

    cp = torch.distributed.get_world_size()
    tokens = torch.arange(24).expand(2, 24)
    balancer = None if order == "contiguous" else order
    mesh = init_device_mesh("cpu", (cp,))
    inputs, labels, more = prepare_context_parallel_input(tokens, tokens + 1, {}, mesh, torch.device("cpu"), balancer)
    assert torch.equal(inputs, more["positions"])
    assert torch.equal(labels, inputs + 1)
    chunks = torch.arange(24).chunk(cp * chunks_per_rank(order))
    mine = chunks_of_rank(order, torch.distributed.get_rank(), cp)
    return inputs[0].tolist(), torch.cat([chunks[i] for i in mine]).tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_is_the_trainers(order: str, ranks: RankPool) -> None:
    for cp in (2, 3):
        for dealt, believed in ranks.run(positions_of_the_trainer, cp, order):
            assert dealt == believed


PLANS: list[tuple[dict[str, Any], str | None]] = [
    ({"context_parallel_degree": 4, "seq_len": 32}, None),
    ({"context_parallel_degree": 2, "world_size": 2, "seq_len": 30, "context_parallel_order": "contiguous"}, None),
    (
        {"context_parallel_degree": 2, "world_size": 2, "seq_len": 30},
        r"seq_len=30 must be a multiple of 4 for context_parallel_degree=2, since head-tail order makes 4 chunks; "
        r"use 28 or 32, or set \[mixle\] context_parallel_order=\"contiguous\"",
    ),
    (
        {"context_parallel_degree": 2, "tensor_parallel_degree": 3, "world_size": 6, "seq_len": 36},
        None,
    ),
    (
        {"context_parallel_degree": 2, "tensor_parallel_degree": 3, "world_size": 6, "seq_len": 32},
        r"seq_len=32 must be a multiple of 12 for tensor_parallel_degree=3 and context_parallel_degree=2, since "
        r"head-tail order makes 4 chunks over 2 ranks, each again shared by 3; use 24 or 36",
    ),
    (
        {"context_parallel_degree": 3, "world_size": 3, "seq_len": 32, "context_parallel_order": "contiguous"},
        r"seq_len=32 must be a multiple of 3 for context_parallel_degree=3, since the ranks share the tokens of a "
        r"sequence between them; use 30 or 33",
    ),
    ({"context_parallel_degree": 2, "world_size": 2, "seq_len": 64}, r"seq_len=64: must be between 1 and the 40 rows"),
    (
        {"context_parallel_degree": 4, "context_parallel_method": "ulysses"},
        r"\"ulysses\" shares n_head=6 heads between .*tensor_parallel_degree=1 times context_parallel_degree=4 ranks, "
        r"which does not go; use context_parallel_degree=1, 2, 3 or 6, or the method \"ring\"",
    ),
    (
        {
            "context_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "context_parallel_method": "ulysses",
        },
        r"tensor_parallel_degree=2 times context_parallel_degree=2 ranks, .*use context_parallel_degree=1 or 3, or",
    ),
]


@pytest.mark.parametrize(("changes", "message"), PLANS)
def test_plan(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_plan(SHAPE, plan(**changes))
        return
    with pytest.raises(ConfigError, match=message) as caught:
        check_plan(SHAPE, plan(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mixle.context_parallel_method", "rign", r"must be one of 'allgather', 'ring', 'ulysses'"),
        ("mixle.context_parallel_order", "tailhead", r"must be one of 'headtail', 'contiguous', or not set"),
        ("parallelism.context_parallel_load_balancer", "ptrr", r"must be one of 'headtail', or not set"),
        ("parallelism.context_parallel_rotate_method", "alltoall", r"belongs to torch's own context parallelism"),
    ],
)
def test_values(key: str, value: str, message: str) -> None:
    config = job_config({})
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=re.escape(key) + ".*" + message):
        check_values(config)
