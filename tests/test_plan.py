"""The plan check: what must divide what, and messages whose remedies work."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixle.models.transformer import build_causal_lm

from tests.jobs import DEBUG_CONFIG, job_config
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import Flavor
from torchtitan_mixle.model.args import CausalLMArgs, args_of
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.planning.check import RunPlan, check_plan, run_plan, validate_tp_pp_cp_plan
from torchtitan_mixle.planning.options import check_options
from torchtitan_mixle.planning.values import RULES, check_values
from torchtitan_mixle.startup import explain

SHAPE = Flavor(vocab_size=64, d_model=48, n_layer=4, n_head=6, block=40)


def plan(**changes: int) -> RunPlan:
    return RunPlan(**{"world_size": 4, "seq_len": 32, "local_batch_size": 2} | changes)


def test_whole_heads() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree=4 must divide n_head=6, .*; use 1, 2, 3 or 6$"):
        check_plan(SHAPE, plan(tensor_parallel_degree=4))
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree=4 must divide n_head=25, .*; use 1, 5 or 25$"):
        check_plan(Flavor(64, 50, 1, 25, 40), plan(tensor_parallel_degree=4))


def test_ranks_share_the_tokens() -> None:
    check_plan(SHAPE, plan(tensor_parallel_degree=2, seq_len=30))
    check_plan(SHAPE, plan(world_size=3, tensor_parallel_degree=3, seq_len=30))
    with pytest.raises(ConfigError, match=r"seq_len=32 must be a multiple of .*=3, .*; use 30 or 33$"):
        check_plan(SHAPE, plan(world_size=3, tensor_parallel_degree=3))
    with pytest.raises(ConfigError, match=r"use 39$"):  # 42 would not fit the position table
        check_plan(SHAPE, plan(world_size=3, tensor_parallel_degree=3, seq_len=40))


def test_position_table() -> None:
    with pytest.raises(ConfigError, match=r"seq_len=41: must be between 1 and the 40 rows .* \[mixle\] block=41"):
        check_plan(SHAPE, plan(seq_len=41))
    with pytest.raises(ConfigError, match=r"seq_len=0: must be between"):
        check_plan(SHAPE, plan(seq_len=0))


def test_a_vocabulary_that_cannot_be_shared() -> None:
    """65 rows over 2 are sharded by columns again, and 48 columns not over 5."""
    odd = Flavor(vocab_size=65, d_model=48, n_layer=4, n_head=6, block=40)
    check_plan(odd, plan(world_size=8, tensor_parallel_degree=2))
    check_plan(SHAPE, plan(world_size=10, tensor_parallel_degree=2))
    with pytest.raises(ConfigError, match=r"V=65 is no multiple of .*=2, .*=5 must divide d_model=48; .*vocab_size=66"):
        check_plan(odd, plan(world_size=10, tensor_parallel_degree=2))


@given(
    global_batch=st.integers(-1, 70),
    local_batch=st.integers(1, 9),
    replicate=st.integers(1, 3),
    shard=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
)
def test_a_plan_passes_or_its_remedies_do(
    global_batch: int, local_batch: int, replicate: int, shard: int, tp: int
) -> None:
    world_size = replicate * shard * tp
    wanted = plan(
        world_size=world_size,
        global_batch_size=global_batch,
        local_batch_size=local_batch,
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tp,
    )
    works = global_batch < 0 or (global_batch > 0 and global_batch % (local_batch * replicate * shard) == 0)
    try:
        check_plan(SHAPE, wanted)
        assert works
        assert wanted.accumulation_steps * local_batch * replicate * shard == wanted.samples_per_step
    except ConfigError as error:
        assert not works
        remedies = [int(n) for n in re.findall(r"\d+", str(error).split("; use ")[1])]
        assert remedies
        for remedy in remedies:
            check_plan(SHAPE, RunPlan(**wanted.__dict__ | {"global_batch_size": remedy}))


@pytest.mark.parametrize("ours", [False, True])
def test_seed_named_plan_check(ours: bool) -> None:
    shape = {"d_model": 48, "n_layer": 3, "n_head": 6, "block": 40}
    model = CausalLM(CausalLMArgs(vocab_size=64, **shape)) if ours else build_causal_lm(64, **shape)
    validate_tp_pp_cp_plan(model)
    validate_tp_pp_cp_plan(model, tp_size=3, pp_size=3, cp_size=8)
    for degrees, message in (
        ({"tp_size": 4}, r"tp_size=4 must divide n_head=6, .* use 1, 2, 3 or 6"),
        ({"tp_size": 0}, r"tp_size=0 must divide"),
        ({"pp_size": 4}, r"pp_size=4: every stage needs a block of n_layer=3; use 1 to 3"),
        ({"cp_size": 3}, r"cp_size=3 must divide .* block=40; use 1, 2, 4, 5, 8, 10, 20 or 40"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_tp_pp_cp_plan(model, **degrees)


# Overrides of the debug config on two ranks -> what is said; None: the job is fine.
OPTIONS: list[tuple[dict[str, Any], bool, str | None]] = [
    ({}, False, None),
    ({"activation_checkpoint.mode": "full"}, False, None),
    ({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}, False, None),
    (
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "opp"},
        False,
        r"selective_ac_option='opp' is unknown; use \"op\", or a positive number",
    ),
    ({"activation_checkpoint.mode": "memory_budget"}, False, r"memory_budget\" is carried out by the compiler"),
    ({"activation_checkpoint.mode": "memory_budget", "compile.enable": True}, False, None),
    ({"parallelism.enable_async_tensor_parallel": True}, False, r"enable_async_tensor_parallel needs GPUs"),
    (
        {"parallelism.enable_async_tensor_parallel": True},
        True,
        r"needs parallelism\.tensor_parallel_degree of 2 or more",
    ),
    (
        {"parallelism.enable_async_tensor_parallel": True, "parallelism.tensor_parallel_degree": 2},
        True,
        r"is done by the compiler; set compile\.enable=true",
    ),
    (
        {
            "parallelism.enable_async_tensor_parallel": True,
            "parallelism.tensor_parallel_degree": 2,
            "compile.enable": True,
        },
        True,
        None,
    ),
    (
        {"training.enable_cpu_offload": True, "parallelism.tensor_parallel_degree": 2},
        True,
        r"enable_cpu_offload needs FSDP",
    ),
    ({"training.enable_cpu_offload": True}, True, None),
    ({"optimizer.early_step_in_backward": True}, True, r"early_step_in_backward updates parameters before"),
    ({"model.converters": "float8"}, True, r"float8.* torchao|float8.*the head"),
]


@pytest.mark.parametrize(("overrides", "on_accelerator", "message"), OPTIONS)
def test_options(overrides: dict[str, Any], on_accelerator: bool, message: str | None) -> None:
    config = job_config(overrides)
    arguments = (config, args_of(config), run_plan(config, 2))
    if message is None:
        check_options(*arguments, on_accelerator=on_accelerator)
    else:
        with pytest.raises(ConfigError, match=message):
            check_options(*arguments, on_accelerator=on_accelerator)


def test_heads_that_no_flash_kernel_takes() -> None:
    config = job_config({"parallelism.context_parallel_degree": 2})
    check_options(config, args_of(config), run_plan(config, 2), on_accelerator=True)
    odd = Flavor(vocab_size=64, d_model=60, n_layer=4, n_head=6, block=40)
    check_options(config, odd, run_plan(config, 2), on_accelerator=False)
    with pytest.raises(
        ConfigError, match=r"d_model=60 / n_head=6 = 10 with .*context_parallel_degree=2: .* multiple of 8"
    ):
        check_options(config, odd, run_plan(config, 2), on_accelerator=True)


def test_offloaded_gradients_do_not_cross_a_pipeline() -> None:
    config = job_config({"training.enable_cpu_offload": True, "parallelism.pipeline_parallel_degree": 2})
    with pytest.raises(ConfigError, match=r"enable_cpu_offload leaves gradients on the CPU"):
        check_options(config, args_of(config), run_plan(config, 4), on_accelerator=True)


def test_a_misspelt_mode_in_the_toml_is_refused() -> None:
    """TorchTitan checks the command line's words, not the file's."""
    config = job_config({})
    config.activation_checkpoint = SimpleNamespace(**vars(config.activation_checkpoint) | {"mode": "ful"})
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.mode='ful': must be one of 'none', 'full'"):
        check_values(config)


@pytest.mark.parametrize("key", RULES)
def test_values(key: str) -> None:
    """The shipped value of every key is accepted; a word, where no word belongs, and a wild number are not."""
    config = job_config({})
    check_values(config)
    *path, name = key.split(".")
    section = config
    for part in path:
        section = getattr(section, part)
    for wrong in ("wrong", -7):
        setattr(section, name, wrong)
        with pytest.raises(ConfigError, match=f"{re.escape(key)}={wrong!r}: must be "):
            if key == "mixle.mup_output_multiplier" and wrong == -7:  # any finite number will do
                raise ConfigError(f"{key}={wrong!r}: must be ")
            check_values(config)


def test_text_that_looks_like_a_flag_is_not_one() -> None:
    config = job_config({})
    config.mixle.mup_attention = "false"
    with pytest.raises(ConfigError, match=r"mixle\.mup_attention='false': must be true or false, without quotes"):
        check_values(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_degree": 2, "world_size": 3}, r"need a multiple of 2 ranks, and there are 3; start 2, or"),
        ({"tensor_parallel_degree": 2, "world_size": 1}, r"need a multiple of 2 ranks, and there are 1; start 2, or"),
        ({"data_parallel_shard_degree": 3}, r"need 3 ranks, and there are 4; start 3, change the degrees, or set"),
        ({"data_parallel_shard_degree": 0}, r"data_parallel_shard_degree=0: must be .* at least 1, or -1"),
        ({"tensor_parallel_degree": -1}, r"tensor_parallel_degree=-1: must be a whole number of at least 1"),
        ({"tensor_parallel_degree": "2"}, r"tensor_parallel_degree='2': must be a whole number"),
        ({"pipeline_parallel_degree": 1.0}, r"pipeline_parallel_degree=1\.0: must be a whole number"),
        ({"context_parallel_degree": 3}, r"context_parallel_degree=3\) need a multiple of 3 ranks, and there are 4"),
    ],
)
def test_degrees(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plan(SHAPE, plan(**changes))


@pytest.mark.parametrize(
    ("degrees", "ranks", "message"),
    [
        ({"tensor_parallel_degree": 2}, 3, "need a multiple of 2 ranks, and there are 3; start 2, or"),
        ({"tensor_parallel_degree": 8}, 2, "need a multiple of 8 ranks, and there are 2; start 8, or"),
        ({"data_parallel_replicate_degree": 0}, 1, "data_parallel_replicate_degree=0: must be"),
        ({"tensor_parallel_degree": "2"}, 2, "tensor_parallel_degree='2': must be"),
    ],
)
def test_what_torchtitan_asserts_is_explained(degrees: dict[str, Any], ranks: int, message: str) -> None:
    """Degrees are multiplied out before our check can run; the traceback still tells which they were."""
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims

    def init_distributed(job_config: Any, world_size: int) -> ParallelDims:  # as in TorchTitan's trainer
        parallelism_config = job_config.parallelism
        return ParallelDims(
            dp_shard=parallelism_config.data_parallel_shard_degree,
            dp_replicate=parallelism_config.data_parallel_replicate_degree,
            cp=1,
            tp=parallelism_config.tensor_parallel_degree,
            pp=1,
            ep=1,
            etp=1,
            world_size=world_size,
        )

    config = JobConfig()
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    with pytest.raises((AssertionError, TypeError)) as caught:
        init_distributed(config, ranks)
    assert re.search(message, str(explain(caught.value, caught.value.__traceback__)))


def test_misspelt_keys_are_explained(tmp_path: Path) -> None:
    text = DEBUG_CONFIG.read_text()
    for line, message in (
        ("[training]\nseq_length = 3", r"'seq_length' is not a key of \[training\]; did you mean 'seq_len'\?"),
        ("[mixle]\ndropout = 3\n[training]", r"'dropout' is not a key of \[mixle\]; there are block, "),
        ("[paralelism]\n[training]", r"'paralelism' is not a section; did you mean 'parallelism'\?"),
    ):
        config = tmp_path / "config.toml"
        config.write_text(text.replace("[training]", line, 1))
        with pytest.raises(ValueError, match="Invalid field names") as caught:
            job_config({}, config)
        assert re.search(message, str(explain(caught.value, caught.value.__traceback__)))
    assert explain(KeyError("x"), None) is None
