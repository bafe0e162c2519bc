"""Whole runs, as a user starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import ROOT, TINY, build_trainer, read_lines, train
from tests.ranks import RankPool
from torchtitan_mixle.errors import ConfigError

DCP_KEYS = ("tok.weight", "head.weight", "pos.weight", "blocks.3.attn.wqkv.weight", "mup_output_multiplier")


def test_continued_equals_unbroken(ranks: RankPool, tmp_path: Path) -> None:
    """Five steps and five more on another layout are the ten steps of one process, with every sample once."""
    job = TINY | {"checkpoint.interval": 5, "lr_scheduler.total_steps": 10}
    unbroken = ranks.run(train, 1, job | {"training.steps": 10, "job.dump_folder": str(tmp_path / "one")})[0]
    job |= {"job.dump_folder": str(tmp_path / "two"), "checkpoint.enable": True}
    ranks.run(train, 2, job | {"training.steps": 5})
    continued = ranks.run(train, 4, job | {"training.steps": 10, "training.local_batch_size": 1})[0]
    assert [line["step"] for line in continued] == list(range(1, 11))
    for a, b in zip(unbroken, continued, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (b["tokens_seen"], b["lr"]) == (a["tokens_seen"], pytest.approx(a["lr"]))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_same_layout_continues_bitwise(world_size: int, ranks: RankPool, tmp_path: Path) -> None:
    job = TINY | {"checkpoint.enable": True, "checkpoint.interval": 3, "lr_scheduler.total_steps": 6}
    unbroken = ranks.run(train, world_size, job | {"training.steps": 6, "job.dump_folder": str(tmp_path / "one")})[0]
    job |= {"job.dump_folder": str(tmp_path / "two")}
    ranks.run(train, world_size, job | {"training.steps": 3})
    continued = ranks.run(train, world_size, job | {"training.steps": 6})[0]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in continued] == [line[key] for line in unbroken]


@pytest.mark.slow
def test_tokens_seen_go_on_when_the_data_starts_anew(ranks: RankPool, tmp_path: Path) -> None:
    """The remedy for another sequence length: the position in the data is given up, the count is not."""
    job = TINY | {"checkpoint.enable": True, "training.steps": 4, "job.dump_folder": str(tmp_path)}
    ranks.run(train, 2, job)
    anew = {"checkpoint.exclude_from_loading": "dataloader", "training.seq_len": 64, "training.steps": 6}
    lines = ranks.run(train, 2, job | anew)[0]
    assert [line["tokens_seen"] for line in lines] == [256, 512, 768, 1024, 1024 + 512, 1024 + 1024]


@pytest.mark.slow
def test_checkpoint_keys_do_not_depend_on_the_layout(ranks: RankPool, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    keys = []
    for name, world_size, ac in (("a", 1, "none"), ("b", 2, "full")):
        job = TINY | {"training.steps": 1, "checkpoint.enable": True, "activation_checkpoint.mode": ac}
        ranks.run(train, world_size, job | {"job.dump_folder": str(tmp_path / name)})
        metadata = FileSystemReader(tmp_path / name / "checkpoint" / "step-1").read_metadata()
        keys.append(set(metadata.state_dict_metadata))
    assert keys[0] == keys[1]
    assert keys[0].issuperset(DCP_KEYS)
    assert "dataloader.samples_consumed" in keys[0]
    assert not any("optimizer" in key and "head.weight" in key for key in keys[0]), "one state for the tied matrix"


@pytest.mark.slow
def test_validation_loss_is_the_token_weighted_mean(ranks: RankPool, tmp_path: Path) -> None:
    """On 1 and 4 ranks, whatever the batches, over a data set whose last window is short."""
    job = TINY | {"training.steps": 1, "validation.enable": True, "validation.seq_len": 32, "optimizer.lr": 0.0}
    data = small_data(tmp_path)
    job |= {"validation.dataset": "tokens", "validation.dataset_path": str(data)}
    runs = {}
    for name, world_size, batch in (("a", 1, 5), ("b", 4, 3)):
        overrides = {"validation.local_batch_size": batch, "training.local_batch_size": 2}
        ranks.run(train, world_size, job | overrides | {"job.dump_folder": str(tmp_path / name)})
        runs[name] = read_lines(tmp_path / name / "validation.jsonl")[0]
    expected, tokens = ranks.run(loss_by_hand, 1, str(data))[0]
    for line in runs.values():
        assert line["tokens"] == tokens
        assert line["loss"] == pytest.approx(expected, abs=1e-5)


def small_data(folder: Path) -> Path:
    from torchtitan_mixle.cli.main import main

    text = folder / "input.txt"
    text.write_bytes((ROOT / "pyproject.toml").read_bytes()[:1717])
    assert main(["prepare", str(text), "--out", str(folder / "data"), "--bytes"]) == 0
    return folder / "data"


def loss_by_hand(data: str) -> tuple[float, int]:
    """Mean loss of the fresh debug model, one window of 32 after the other."""
    from torchtitan_mixle.data.store import TokenStore
    from torchtitan_mixle.model.args import CausalLMArgs
    from torchtitan_mixle.model.model import CausalLM

    store = TokenStore.open(Path(data))
    ids = torch.from_numpy(store.read(torch.zeros(1, dtype=torch.int64).numpy(), store.n_tokens)[0])
    model = CausalLM(CausalLMArgs(seed=TINY["debug.seed"]))
    model.init_weights()
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            window = ids[start : start + 33]
            logits = model(window[None, :-1])[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    return total / count, count


@pytest.mark.slow
def test_hugging_face_text(ranks: RankPool, tmp_path: Path) -> None:
    """A data set that TorchTitan knows, from local files, with a tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [f"line {i} of {i * i} lines, and so on" for i in range(300)]
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4" / "data.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    job = TINY | {"training.dataset": "c4_test", "training.dataset_path": str(tmp_path / "c4")}
    job |= {"model.hf_assets_path": str(tmp_path), "mixle.vocab_size": 200, "job.dump_folder": str(tmp_path / "out")}
    lines = ranks.run(train, 2, job)[0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["loss"] == pytest.approx(torch.tensor(200.0).log().item(), abs=0.3)

    # Its place is that of each rank, so it goes on on as many, and says so to any other number.
    job |= {"checkpoint.enable": True, "training.steps": 2, "job.dump_folder": str(tmp_path / "saved")}
    ranks.run(train, 2, job)
    sharded = {"parallelism.data_parallel_shard_degree": 2, "parallelism.tensor_parallel_degree": 2}
    ranks.run(train, 4, job | sharded | {"training.steps": 3})
    said = ranks.run(refusal, 1, job | {"training.steps": 4})[0]
    assert "the place in their text of each of 2 data-parallel ranks, and this job has 1; " in said
    ranks.run(train, 1, job | {"training.steps": 4, "checkpoint.exclude_from_loading": ["dataloader"]})
    assert [line["step"] for line in read_lines(tmp_path / "saved" / "metrics.jsonl")] == [1, 2, 3, 4]


def refusal(overrides: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_trainer(overrides)
    return str(caught.value)


def run(words: list[str], cwd: Path, **env: str) -> str:
    result = subprocess.run(
        words, cwd=cwd, env=os.environ | {"VIRTUAL_ENV": sys.prefix} | env, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout + result.stderr


@pytest.mark.slow
def test_one_command_learns(tmp_path: Path) -> None:
    """`scripts/train.sh` as it stands: from ln V to under 3.0 in under three minutes."""
    output = run([str(ROOT / "scripts" / "train.sh")], tmp_path, OMP_NUM_THREADS="2")
    lines = read_lines(tmp_path / "outputs" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(torch.tensor(257.0).log().item(), abs=0.3)
    assert lines[-1]["loss"] < 3.0
    assert list((tmp_path / "outputs" / "tb").rglob("events.out.tfevents.*"))
    assert (tmp_path / "outputs" / "checkpoint" / "step-500" / ".metadata").exists()
    assert re.search(r"step: 500 .*tokens/s: [\d,]+", strip_colors(output))

    # Once more: it has nothing left to do, loses nothing, and goes on when asked to.
    run([str(ROOT / "scripts" / "train.sh")], tmp_path)
    assert read_lines(tmp_path / "outputs" / "metrics.jsonl") == lines
    run([str(ROOT / "scripts" / "train.sh"), "--training.steps", "510"], tmp_path, NGPU="2")
    steps = [line["step"] for line in read_lines(tmp_path / "outputs" / "metrics.jsonl")]
    assert steps == [line["step"] for line in lines] + [510]


def strip_colors(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.slow
def test_train_script_refuses_a_config_that_is_not_there(tmp_path: Path) -> None:
    result: Any = subprocess.run(
        [str(ROOT / "scripts" / "train.sh"), "nowhere.toml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.endswith("No config file nowhere.toml; the ones of this repository are in train_configs/\n")
