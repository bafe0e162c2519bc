"""The plan check: what must divide what, and messages whose remedies work."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixle.models.transformer import build_causal_lm

from tests.jobs import job_config
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import Flavor
from torchtitan_mixle.model.args import CausalLMArgs, args_of
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.planning.check import RunPlan, check_plan, run_plan, validate_tp_pp_cp_plan
from torchtitan_mixle.planning.options import check_options

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
    with pytest.raises(
        ConfigError, match=r"seq_len=32 must be a multiple of .*=3, .*; use training\.seq_len=30 or 33$"
    ):
        check_plan(SHAPE, plan(world_size=3, tensor_parallel_degree=3))
    with pytest.raises(ConfigError, match=r"use training\.seq_len=39$"):  # 42 would not fit the position table
        check_plan(SHAPE, plan(world_size=3, tensor_parallel_degree=3, seq_len=40))


def test_position_table() -> None:
    with pytest.raises(ConfigError, match=r"seq_len=41: must be between 1 and the 40 rows .* \[mixle\] block=41"):
        check_plan(SHAPE, plan(seq_len=41))
    with pytest.raises(ConfigError, match=r"seq_len=0: must be between"):
        check_plan(SHAPE, plan(seq_len=0))


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


def test_a_misspelt_mode_in_the_toml_is_refused() -> None:
    """TorchTitan checks the command line's words, not the file's."""
    config = job_config({})
    config.activation_checkpoint = SimpleNamespace(**vars(config.activation_checkpoint) | {"mode": "ful"})
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.mode='ful' is unknown; use \"none\", \"full\""):
        check_options(config, args_of(config), run_plan(config, 1), on_accelerator=False)
