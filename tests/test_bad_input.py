"""A user's mistake is one line, the same on every rank, before anything waits for anything."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs import DEBUG_CONFIG, TINY, build_trainer, flags
from tests.ranks import RankPool
from torchtitan_mixle.errors import ConfigError

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TRAIN = ("-m", "torchtitan.train")

# What is wrong -> (overrides, what the line says).
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "sequence longer than the position table": (
        {"training.seq_len": 513},
        r"training\.seq_len=513: must be between 1 and the 512 rows of the position table; .*\[mixle\] block=513",
    ),
    "validation sequence longer than the position table": (
        {"validation.enable": True, "validation.seq_len": 1024},
        r"validation\.seq_len=1024: must be between 1 and the 512 rows",
    ),
    "block smaller than the sequence": (
        {"mixle.block": 16},
        r"training\.seq_len=32: must be between 1 and the 16 rows",
    ),
    "vocabulary smaller than the data's": (
        {"mixle.vocab_size": 200},
        r"token id 256 in \S+\.py, byte \d+ is not below .* V=200; python_stdlib",
    ),
    "unknown flavor": (
        {"model.flavor": "125M"},
        r"model\.flavor='125M' is unknown; use one of debugmodel, 124M, .*70B",
    ),
    "unknown data set": (
        {"training.dataset": "python_stdlb"},
        r"training\.dataset='python_stdlb' is unknown; did you mean 'python_stdlib'\?",
    ),
    "no data path": ({"training.dataset": "tokens"}, r"needs training\.dataset_path"),
    "batch larger than the data set": (
        {"training.global_batch_size": 10_000_000},
        r"a step of 10000000 samples of training\.seq_len=32 tokens is more than the \d+ samples",
    ),
    "batch that the ranks cannot share": (
        {"training.global_batch_size": 7},
        r"global_batch_size=7 must be a multiple of local_batch_size=2 times the data-parallel degree 2; use 4 or 8",
    ),
    "a Hugging Face data set at a path that is not there": (
        {"training.dataset": "c4_test", "training.dataset_path": "no/such/folder"},
        r"training\.dataset_path='no/such/folder' is not a folder with files",
    ),
    "all of a data set of unknown length": (
        {
            "training.dataset": "c4_test",
            "training.dataset_path": ".",
            "validation.enable": True,
            "validation.dataset": "c4_validation",
            "validation.steps": -1,
        },
        r"validation\.steps=-1 .* set validation\.steps to a positive number",
    ),
    "no tokenizer": (
        {"training.dataset": "c4_test", "training.dataset_path": ".", "model.hf_assets_path": "no/such/folder"},
        r"model\.hf_assets_path='no/such/folder': no tokenizer can be read there",
    ),
    "validation with another tokenizer": (
        {
            "validation.enable": True,
            "validation.dataset": "c4_validation",
            "validation.steps": 1,
        },
        r"validation\.dataset='c4_validation' is text, training\.dataset='python_stdlib' are tokens",
    ),
    "parameters and computation in different dtypes": (
        {"training.dtype": "bfloat16", "training.mixed_precision_param": "float32"},
        r"set mixed_precision_param=\"bfloat16\"",
    ),
    "never log": ({"metrics.log_freq": 0}, r"metrics\.log_freq=0: must be a whole number of at least 1"),
    "no such part to exclude": (
        {"checkpoint.exclude_from_loading": "dataloder"},
        r"exclude_from_loading=\['dataloder'\]: must be a list of 'optimizer'",
    ),
    "Hugging Face export of more than weights": (
        {"checkpoint.last_save_in_hf": True},
        r"last_save_in_hf=true: .* set checkpoint\.last_save_model_only=true",
    ),
    "no Hugging Face files": (
        {"checkpoint.enable": True, "checkpoint.initial_load_in_hf": True, "checkpoint.initial_load_path": "tests"},
        r"tests/config\.json cannot be read .*; a GPT-2 folder needs one",
    ),
    "no checkpoint to start from": (
        {"checkpoint.enable": True, "checkpoint.initial_load_path": "tests"},
        r"tests has no \.metadata, so it is not a \(finished\) checkpoint",
    ),
    "not an initial checkpoint": (
        {"checkpoint.initial_load_path": "no/such"},
        r"initial_load_path='no/such' is not a folder",
    ),
    "fewer microbatches than stages": (
        {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 1},
        r"makes 1 microbatches, but 1F1B needs one for each of its 2 stages",
    ),
    "a stage without a block": (
        {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_first_stage_less_layers": 5,
        },
        r"would make \[0, 4\] blocks a stage, and every stage needs one",
    ),
    "a sequence that cannot be dealt out": (
        {"parallelism.context_parallel_degree": 2, "training.seq_len": 30},
        r"training\.seq_len=30 must be a multiple of 4 for context_parallel_degree=2, .*use 28 or 32",
    ),
}


def mistake(overrides: dict[str, Any]) -> str:
    """The ConfigError that the trainer's construction ends in."""
    try:
        build_trainer(overrides).close()
    except ConfigError as error:
        return str(error)
    return "no ConfigError"


def messages(ranks: RankPool, overrides: dict[str, Any], folder: Path) -> str:
    """What both ranks of a two-rank job say; they must agree."""
    said = ranks.run(mistake, 2, TINY | {"job.dump_folder": str(folder)} | overrides)
    assert said[0] == said[1]
    assert "\n" not in said[0]
    return str(said[0])


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str, ranks: RankPool, tmp_path: Path) -> None:
    overrides, pattern = MISTAKES[name]
    with pytest.raises(ConfigError, match=pattern):
        raise ConfigError(messages(ranks, overrides, tmp_path))


def prepared(folder: Path) -> Path:
    """A small prepared folder with known ids."""
    from torchtitan_mixle.cli.main import main

    text = folder / "input.txt"
    text.write_bytes(bytes(range(256)) * 40)
    assert main(["prepare", str(text), "--out", str(folder / "data"), "--bytes"]) == 0
    return folder / "data"


def cut_a_shard(data: Path) -> None:
    shard = next(data.glob("shard-*.bin"))
    os.truncate(shard, shard.stat().st_size - 10)


def empty(data: Path) -> None:
    for file in data.iterdir():
        file.unlink()


def foreign(data: Path) -> None:
    (data / "index.json").write_text(json.dumps({"weight_map": {}}))


def replace_by_a_file(data: Path) -> None:
    empty(data)
    data.rmdir()
    data.write_text("hello")


def put_a_large_id(data: Path) -> None:
    shard = next(data.glob("shard-*.bin"))
    ids = np.memmap(shard, dtype="<u2", mode="r+")
    ids[1234] = 60_000
    ids.flush()


def remove_a_shard(data: Path) -> None:
    next(data.glob("shard-*.bin")).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut_a_shard, r"shard-00000\.bin.*\d+ bytes"),
    "empty": (empty, r"data"),
    "foreign": (foreign, r"index\.json"),
    "a file": (replace_by_a_file, r"file"),
    "an id beyond V": (put_a_large_id, r"60000.*shard-00000\.bin|shard-00000\.bin.*60000"),
    "a shard is gone": (remove_a_shard, r"shard-00000\.bin"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_data(name: str, ranks: RankPool, tmp_path: Path) -> None:
    damage, pattern = DAMAGE[name]
    data = prepared(tmp_path)
    damage(data)
    with pytest.raises(ConfigError, match=pattern):
        raise ConfigError(
            messages(ranks, {"training.dataset": "tokens", "training.dataset_path": str(data)}, tmp_path / "out")
        )


def test_missing_data_folder(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    said = messages(ranks, {"training.dataset": "tokens", "training.dataset_path": str(path)}, tmp_path)
    assert str(path) in said


def test_model_smaller_than_the_prepared_data(ranks: RankPool, tmp_path: Path) -> None:
    data = prepared(tmp_path)
    overrides = {"training.dataset": "tokens", "training.dataset_path": str(data), "mixle.vocab_size": 100}
    said = messages(ranks, overrides, tmp_path / "out")
    assert "100" in said
    assert "257" in said


@pytest.mark.slow
def test_every_rank_ends_with_the_line_and_torchrun_fails(tmp_path: Path) -> None:
    """Through torchrun, as a user sees it: no traceback of ours on the console, exit code not zero, nothing hangs."""
    overrides = TINY | {"training.seq_len": 600, "job.dump_folder": str(tmp_path)}
    began = time.monotonic()
    process = subprocess.Popen(
        [*TORCHRUN, "--nproc_per_node", "2", *TRAIN, "--job.config_file", str(DEBUG_CONFIG), *flags(overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    for rank in (0, 1):
        assert f"[rank {rank}] ConfigError: training.seq_len=600: must be between 1 and the 512 rows" in errors
    assert "in check_seq_len" not in errors.split("FAILED")[0], "a traceback hides the one line"
