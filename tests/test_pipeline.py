"""Every pipeline is the one-process run: same start, same loss, same norm, same gradients, one tied matrix."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import TINY, hide_three_in_ten, job_config, read_lines, steps_with_gradients, train
from tests.ranks import RankPool
from tests.test_metrics import scalars
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.args import args_of
from torchtitan_mixle.planning.check import run_plan
from torchtitan_mixle.planning.stages import check_pipeline, stage_modules

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
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


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
        assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
    assert final.keys() == reference["final"].keys()
    assert gradients.keys() == reference["gradients"].keys(), "the mirror must have no gradient left"
    for name, gradient in reference["gradients"].items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"gradient of {name}: {error:.1e}"
    for step in zip(*(result["tied"] for result in results), strict=True):
        ends = {name: value for rank in step for name, value in rank.items()}
        assert torch.equal(ends["tok.weight"], ends["head.weight"])


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = TINY | {"training.local_batch_size": TINY["training.global_batch_size"]}
    return ranks.run(steps_with_gradients, 1, job | {"job.dump_folder": str(tmp_path_factory.mktemp("one"))})[0]


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in ("pp2", "pp2xfsdp2") else pytest.mark.slow) for x in LAYOUTS]
)
def test_layout(layout: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    world_size, degrees = LAYOUTS[layout]
    job = sizes(degrees) | {SCHEDULE: "GPipe" if layout.startswith("pp4") else "1F1B"}
    compare(ranks.run(steps_with_gradients, world_size, job | {"job.dump_folder": str(tmp_path)}), one_process)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(schedule: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    job = sizes({PIPELINE: 2}) | {SCHEDULE: schedule, "job.dump_folder": str(tmp_path)}
    compare(ranks.run(steps_with_gradients, 2, job), one_process)


SLOW_CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    # name: (ranks, overrides, accumulation)
    "accumulation 2": (2, {PIPELINE: 2}, 2),
    "accumulation 4": (2, {PIPELINE: 2, SCHEDULE: "GPipe"}, 4),
    "accumulation 2, fsdp2": (4, {PIPELINE: 2, SHARD: 2}, 2),
    "accumulation 2, tp2": (4, {PIPELINE: 2, TENSOR: 2}, 2),
    "ddp2, tp2": (8, {PIPELINE: 2, REPLICATE: 2, SHARD: 1, TENSOR: 2}, 1),
    "zero bubble, fsdp2, full recomputation": (
        4,
        {PIPELINE: 2, SHARD: 2, SCHEDULE: "ZBVZeroBubble", "activation_checkpoint.mode": "full"},
        1,
    ),
    "loss parallel off": (4, {PIPELINE: 2, TENSOR: 2, "parallelism.disable_loss_parallel": True}, 1),
    "full recomputation": (2, {PIPELINE: 2, "activation_checkpoint.mode": "full"}, 1),
    "compile": (2, {PIPELINE: 2, "compile.enable": True, "compile.backend": "aot_eager"}, 1),
    "microbatches of 2": (2, {PIPELINE: 2, "parallelism.pipeline_parallel_microbatch_size": 2}, 1),
    "one stage less by TorchTitan's weights": (
        2,
        {
            PIPELINE: 2,
            "parallelism.pipeline_parallel_first_stage_less_layers": 1,
            "parallelism.pipeline_parallel_last_stage_less_layers": 1,
        },
        1,
    ),
    **{
        f"{schedule}, {name}": (ranks, layout | {SCHEDULE: schedule}, accumulation)
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        for name, ranks, layout, accumulation in (
            ("fsdp2", 4, {PIPELINE: 2, SHARD: 2}, 1),
            ("ddp2", 4, {PIPELINE: 2, REPLICATE: 2, SHARD: 1}, 1),
            ("tp2", 4, {PIPELINE: 2, TENSOR: 2}, 1),
            ("full recomputation", 2, {PIPELINE: 2, "activation_checkpoint.mode": "full"}, 1),
            ("accumulation 2, fsdp2", 4, {PIPELINE: 2, SHARD: 2}, 2),
        )
        if (schedule, accumulation) != ("DualPipeV", 2)  # two microbatches are too few for its four stages
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES)
def test_case(case: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    world_size, overrides, accumulation = SLOW_CASES[case]
    job = sizes(EVEN | overrides, accumulation=accumulation) | {"job.dump_folder": str(tmp_path)}
    if SCHEDULE not in overrides and accumulation > 1:
        job[SCHEDULE] = "GPipe"  # which runs with fewer microbatches than stages
    compare(ranks.run(steps_with_gradients, world_size, job), one_process)


def odd_shape(overrides: dict[str, Any], n_layer: int) -> dict[str, Any]:
    """Blocks that the stages cannot share evenly, an odd vocabulary, an odd length, labels left out."""
    from torchtitan_mixle.flavors import FLAVORS, Flavor

    FLAVORS["odd"] = Flavor(vocab_size=259, d_model=48, n_layer=n_layer, n_head=6, block=31)
    try:
        return steps_with_gradients(overrides | {"model.flavor": "odd", "training.seq_len": 30}, hide_three_in_ten)
    finally:
        del FLAVORS["odd"]


ODD: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {PIPELINE: 2}),
    "pp3": (3, {PIPELINE: 3}),
    "pp4xtp2": (8, {PIPELINE: 4, TENSOR: 2}),
    "three stages a rank, by hand": (
        2,
        {
            PIPELINE: 2,
            SCHEDULE: "Interleaved1F1B",
            "parallelism.module_fqns_per_model_part": [
                ["tok_embeddings", "pos", "layers.0"],
                ["blocks.1"],
                ["blocks.2"],
                ["blocks.3", "blocks.4"],
                ["blocks.5"],
                ["layers.6", "norm", "output"],
            ],
        },
    ),
    "three stages a rank": (
        2,
        {PIPELINE: 2, SCHEDULE: "LoopedBFS", "parallelism.pipeline_parallel_layers_per_stage": 2}
        | {"parallelism.pipeline_parallel_first_stage_less_layers": 1}
        | {"parallelism.pipeline_parallel_last_stage_less_layers": 1},
    ),
}
N_LAYER = {"three stages a rank": 10}  # blocks of the odd model where it has not seven


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in ("pp2", "pp3") else pytest.mark.slow) for x in ODD]
)
def test_odd_sizes(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    world_size, overrides = ODD[layout]
    one = TINY | {"training.local_batch_size": 8, "job.dump_folder": str(tmp_path / "one")}
    reference = ranks.run(odd_shape, 1, one, N_LAYER.get(layout, 7))[0]
    job = sizes(overrides) | overrides | {"job.dump_folder": str(tmp_path / "many")}
    compare(ranks.run(odd_shape, world_size, job, N_LAYER.get(layout, 7)), reference)


@pytest.mark.slow
def test_what_a_pipeline_run_reports(ranks: RankPool, tmp_path: Path) -> None:
    """The last stage's loss on rank 0, in the log and in the files; validation; the same keys as one process saves."""
    from torch.distributed.checkpoint import FileSystemReader

    job = sizes({PIPELINE: 2}) | {"validation.enable": True, "validation.local_batch_size": 8, "validation.seq_len": 32}
    job |= {"validation.steps": 2, "checkpoint.enable": True, "metrics.enable_tensorboard": True, "training.steps": 2}
    one = ranks.run(train, 1, job | {PIPELINE: 1, "job.dump_folder": str(tmp_path / "one")})[0]
    keys = {}
    for schedule in ("1F1B", "ZBVZeroBubble", "DualPipeV"):
        folder = tmp_path / schedule
        two, _ = ranks.run(train, 2, job | {SCHEDULE: schedule, "job.dump_folder": str(folder)})
        for a, b in zip(one, two, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
            assert (b["tokens_seen"], b["step"]) == (a["tokens_seen"], a["step"])
        expected = read_lines(tmp_path / "one" / "validation.jsonl")
        for a, b in zip(expected, read_lines(folder / "validation.jsonl"), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
            assert b["tokens"] == a["tokens"]
        assert scalars(folder, "loss_metrics/global_avg_loss") == pytest.approx([line["loss"] for line in two])
        for name in ("one", schedule):
            reader = FileSystemReader(tmp_path / name / "checkpoint" / "step-2")
            keys[name] = set(reader.read_metadata().state_dict_metadata)
        assert keys[schedule] == keys["one"]


FILE = "parallelism.pipeline_parallel_schedule_csv"
FILES = {
    # Stages by rank, and the name that goes with the file: TorchTitan's for "what the file says", or any schedule.
    "one stage a rank": ("PipelineScheduleSingle", [[0], [1]]),
    "two in turn": ("PipelineScheduleMulti", [[0, 2], [1, 3]]),
    "a V": ("_PipelineScheduleRuntime", [[0, 3], [1, 2]]),
    "beside a name": ("1F1B", [[0, 3], [1, 2]]),
}


def all_forward_then_all_backward(stages: list[list[int]], microbatches: int) -> str:
    rows = [
        [f"{stage}F{m}" for stage in row for m in range(microbatches)]
        + [f"{stage}B{m}" for stage in reversed(row) for m in range(microbatches)]
        for row in stages
    ]
    return "".join(",".join(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "a V" else pytest.mark.slow) for case in FILES]
)
def test_schedule_from_a_file(case: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    """GPipe's order, written down action by action: stage, F or B, microbatch."""
    name, stages = FILES[case]
    file = tmp_path / "schedule.csv"
    file.write_text(all_forward_then_all_backward(stages, TINY["training.global_batch_size"]))
    job = sizes({PIPELINE: 2}) | {FILE: str(file), SCHEDULE: name}
    compare(ranks.run(steps_with_gradients, 2, job | {"job.dump_folder": str(tmp_path / "run")}), one_process)


GOOD_FILE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SPLIT_FILE = "0F0,0F1,,0I0,0I1,0W0,0W1\n1F0,1B0,1F1,1B1\n"
FILE_CASES: list[tuple[str, dict[str, Any], str | None]] = [
    (GOOD_FILE, {}, None),
    (GOOD_FILE, {SCHEDULE: "PipelineScheduleSingle"}, None),
    (SPLIT_FILE, {}, None),
    ("0F0,0F1,3F0,(3F1;3B0)OVERLAP_F_B,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1\n", {}, None),
    ("0F0,0F1,0B0,0B1\n1F0,1B0\n", {}, "runs 1 microbatches forward on stage 1, and the job makes 2"),
    (
        GOOD_FILE,
        {"parallelism.pipeline_parallel_microbatch_size": 2},
        "runs 2 microbatches forward on stage 0, .*makes 1",
    ),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", {}, "does not run each microbatch of stage 1 backward once"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1\n", {}, "does not run each microbatch of stage 1 backward once"),
    ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n", {}, r"cannot be run to its end: 0B0 on rank 0, 1B0 on rank 1 would wait"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", {}, r"cannot be run to its end: 0B0 on rank 0, 1F1 on rank 1 would wait"),
    (
        "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,(1F1;2F1)OVERLAP_F_B,2F0,2B0,2B1,1B0,1B1\n",
        {},
        r"cannot be run to its end: 3F0 on rank 0, 1F1 with 2F1 on rank 1 would wait",
    ),
    ("0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n", {}, "has 3 lines, and pipeline_parallel_degree=2 needs one a rank"),
    ("0F0,0F1,0B0,0B1\n", {}, "has 1 lines, and pipeline_parallel_degree=2 needs one a rank"),
    ("1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n", {}, "runs stages 1 of 2 on rank 0; stages must be dealt out in turn"),
    ("0F0,1F0,0B0\n2F0,2B0\n", {}, "runs stages 0, 1 of 3 on rank 0; stages must be dealt out in turn"),
    ("0F0,0SEND_F0\n1F0,1B0\n", {}, "has a cell '0SEND_F0'; actions are"),
    ("stage,microbatch\n", {}, "has a cell 'stage'; actions are"),
    ("\n", {}, "has no actions"),
    (SPLIT_FILE, {"compile.enable": True}, r"compile\.enable=true does not allow"),
    (GOOD_FILE, {SCHEDULE: "1F1BB"}, "'1F1BB' is unknown; did you mean '1F1B'"),
    (GOOD_FILE, {"parallelism.pipeline_parallel_layers_per_stage": 1}, "makes 2 stages a rank, but .* runs one"),
]


@pytest.mark.parametrize(("text", "more", "message"), FILE_CASES)
def test_a_schedule_file_is_read_before_it_is_run(
    text: str, more: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    config = job_config(TINY | EVEN | {PIPELINE: 2, "training.local_batch_size": 2, FILE: str(file)} | more)
    if message is None:
        check_pipeline(config, args_of(config), run_plan(config, 2))
        return
    with pytest.raises(ConfigError, match=message) as caught:
        check_pipeline(config, args_of(config), run_plan(config, 2))
    assert "\n" not in str(caught.value)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({PIPELINE: 5}, r"4 blocks on 5 pipeline stages .* every stage needs one"),
    (
        {PIPELINE: 2, SCHEDULE: "1F1BB"},
        r"pipeline_parallel_schedule='1F1BB' is unknown; did you mean '1F1B'\? use one of GPipe",
    ),
    (
        {PIPELINE: 2, "training.local_batch_size": 1},
        r"makes 1 microbatches, but 1F1B needs one for each of its 2 stages",
    ),
    (
        {PIPELINE: 2, "training.local_batch_size": 3, "parallelism.pipeline_parallel_microbatch_size": 2},
        r"local_batch_size=3 .*microbatch_size=2: the microbatch size must divide the batch",
    ),
    (
        {PIPELINE: 2, SCHEDULE: "Interleaved1F1B", "training.local_batch_size": 5},
        r"makes 5 microbatches, but Interleaved1F1B runs them in 2 rounds",
    ),
    (
        {PIPELINE: 2, SCHEDULE: "ZBVZeroBubble", SHARD: 2, "parallelism.fsdp_reshard_after_forward": "always"},
        r"fsdp_reshard_after_forward=\"always\" does not allow",
    ),
    ({PIPELINE: 2, SCHEDULE: "ZBVZeroBubble", "compile.enable": True}, r"compile\.enable=true does not allow; use"),
    (
        {
            PIPELINE: 2,
            SCHEDULE: "InterleavedZeroBubble",
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        },
        r"selective_ac_option=\"op\" does not allow",
    ),
    ({PIPELINE: 2, FILE: "no.csv"}, r"schedule_csv='no\.csv' cannot be read \(No such file"),
    ({PIPELINE: 2, SCHEDULE: "PipelineScheduleMulti"}, r"='PipelineScheduleMulti' needs a file, in pipeline_parallel"),
    ({PIPELINE: 2, "validation.enable": True}, r"validation\.local_batch_size=8 must be training\.local_batch_size=4"),
    ({PIPELINE: 2, "parallelism.pipeline_parallel_layers_per_stage": 1}, r"but 1F1B runs one; use Interleaved1F1B"),
    (
        {
            PIPELINE: 2,
            "parallelism.module_fqns_per_model_part": [
                ["tok", "blocks.0", "blocks.1"],
                ["blocks.2", "blocks.3", "ln", "head"],
            ],
        },
        r"leaves out pos; every module must be on one stage",
    ),
    (
        {
            PIPELINE: 2,
            "parallelism.module_fqns_per_model_part": [
                ["tok", "pos", "blocks.0", "blocks.1"],
                ["blocks.1", "blocks.2", "blocks.3", "ln", "head"],
            ],
        },
        r"gives blocks\.1 more than once",
    ),
    (
        {
            PIPELINE: 2,
            "parallelism.module_fqns_per_model_part": [["tok", "pos", "blocks.0", "blocks.9"], ["ln", "head"]],
        },
        r"names blocks\.9; the modules are tok, pos, blocks\.0 to blocks\.3, ln, head",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSALS)
def test_refusals(overrides: dict[str, Any], message: str) -> None:
    config = job_config(TINY | EVEN | {"training.local_batch_size": 4} | overrides)
    with pytest.raises(ConfigError, match=message) as caught:
        check_pipeline(config, args_of(config), run_plan(config, overrides[PIPELINE] * overrides.get(SHARD, 1)))
    assert "\n" not in str(caught.value)


@given(n_layer=st.integers(1, 40), pp=st.integers(1, 6), first=st.integers(0, 3), last=st.integers(0, 3))
def test_every_block_is_on_one_stage(n_layer: int, pp: int, first: int, last: int) -> None:
    parallelism = SimpleNamespace(
        module_fqns_per_model_part=None,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_schedule_csv="",
        pipeline_parallel_layers_per_stage=None,
        pipeline_parallel_first_stage_less_layers=first,
        pipeline_parallel_last_stage_less_layers=last,
    )
    try:
        stages = stage_modules(n_layer, parallelism)
    except ConfigError:
        each, rest = divmod(n_layer + first + last, pp)
        counts = [each + (i < rest) for i in range(pp)]
        assert counts[0] - first - (last if pp == 1 else 0) < 1 or counts[-1] - last < 1 or min(counts) < 1
        return
    assert [name for stage in stages for name in stage] == [
        "tok",
        "pos",
        *(f"blocks.{i}" for i in range(n_layer)),
        "ln",
        "head",
    ]
    assert len(stages) == pp
    if first == last == 0:  # the seed module's split
        each, rest = divmod(n_layer, pp)
        blocks = [sum(name.startswith("blocks") for name in stage) for stage in stages]
        assert blocks == [each + (i < rest) for i in range(pp)]
