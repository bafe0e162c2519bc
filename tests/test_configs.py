"""Every shipped config loads and fits the machine it is written for."""

from pathlib import Path

import pytest
import torch

from tests.jobs import ROOT, job_config
from torchtitan_mixle.data.datasets import check_dataset_name
from torchtitan_mixle.model.args import args_of
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.planning.check import check_plan, run_plan

WORLD_SIZE = {"mixle_debug": 1, "mixle_124m": 8, "mixle_7b": 8, "mixle_70b": 512}


def test_no_config_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "train_configs").glob("*.toml")} == set(WORLD_SIZE)


@pytest.mark.parametrize("name", WORLD_SIZE)
def test_config(name: str) -> None:
    config = job_config({}, ROOT / "train_configs" / f"{name}.toml")
    args = args_of(config)
    check_plan(args, run_plan(config, WORLD_SIZE[name]))
    check_dataset_name(config.training.dataset, key="training.dataset")
    with torch.device("meta"):
        model = CausalLM(args)
    parameters, _ = args.get_nparams_and_flops(model, config.training.seq_len)
    assert parameters == sum(p.numel() for p in model.parameters())
    assert config.validation.seq_len <= args.block
    assert config.checkpoint.enable
    assert not config.checkpoint.last_save_model_only, "a finished run must be continuable"
    assert Path(config.job.dump_folder).parts[0] == "outputs"


def test_the_debug_config_runs_at_any_small_number_of_ranks() -> None:
    config = job_config({})
    for world_size in (1, 2, 4, 8):
        check_plan(args_of(config), run_plan(config, world_size))
