"""`torchtitan-mixle parity`: layout names, verdicts, and the command itself."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import DEBUG_CONFIG
from torchtitan_mixle.cli.main import main
from torchtitan_mixle.cli.parity import Result, judge
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.planning.layouts import parse_layout


@pytest.mark.parametrize(
    ("name", "replicate", "shard", "tp"),
    [
        ("1", 1, 1, 1),
        ("fsdp4", 1, 4, 1),
        ("ddp2", 2, 1, 1),
        ("hsdp2x4", 2, 4, 1),
        ("hsdp2", 2, 2, 1),
        ("tp8", 1, 1, 8),
        ("fsdp2xtp2", 1, 2, 2),
        ("hsdp2xtp2", 2, 2, 2),
        ("hsdp2x4xtp2", 2, 4, 2),
        ("ddp2xfsdp4xtp2", 2, 4, 2),
        ("hsdp2xpp3xtp2", 2, 2, 2),
    ],
)
def test_layout_names(name: str, replicate: int, shard: int, tp: int) -> None:
    layout = parse_layout(name)
    assert layout.degrees["data_parallel_replicate_degree"] == replicate
    assert layout.degrees["data_parallel_shard_degree"] == shard
    assert layout.degrees.get("tensor_parallel_degree", 1) == tp
    assert layout.world_size == replicate * shard * tp * layout.degrees.get("pipeline_parallel_degree", 1)
    assert layout.data_parallel_degree == replicate * shard


@pytest.mark.parametrize(
    "name", ["", "2", "fsdp", "zp2", "fsdp2tp2", "fsdp2x", "fsdp0", "tp2xtp2", "fsdp2xhsdp2", "tp-2"]
)
def test_other_words_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood at .* there are 1, fsdpN|use each axis once"):
        parse_layout(name)


def result(loss: list[float], grad_norm: list[float], failure: str | None = None) -> Result:
    return Result(parse_layout("1"), loss, grad_norm, failure)


def test_verdicts() -> None:
    reference = result([4.0, 3.0], [2.0, 1.0])
    assert judge(reference, reference, 1e-5, 1e-4).passed
    close = judge(result([4.0 + 3.9e-5, 3.0 + 2e-4], [2.0, 1.5]), reference, 1e-5, 1e-4)
    assert close.passed, "later norms are shown, not judged"
    assert close.differences == pytest.approx([3.9e-5 / 4, 0.5])
    assert not judge(result([4.0 + 4.1e-5, 3.0], [2.0, 1.0]), reference, 1e-5, 1e-4).passed
    assert not judge(result([4.0, 3.0], [2.0 * 1.1, 1.0]), reference, 1e-5, 1e-4).passed
    assert not judge(result([4.0, 3.1], [2.0, 1.0]), reference, 1e-5, 1e-4).passed
    assert not judge(result([4.0, math.nan], [2.0, 1.0]), reference, 1e-5, 1e-4).passed
    assert not judge(result([], [], "crashed"), reference, 1e-5, 1e-4).passed
    assert not judge(reference, result([], [], "crashed"), 1e-5, 1e-4).passed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.toml"], "cannot read the config nowhere.toml: No such file"),
        ([str(DEBUG_CONFIG), "--layouts", "fsdp2,zp3"], "layout 'zp3' is not understood"),
        ([str(DEBUG_CONFIG), "--override", "seq_len=3"], "--override 'seq_len=3' must be section.key=value"),
        (
            [str(DEBUG_CONFIG), "--layouts", "fsdp3", "--override", "training.global_batch_size=8"],
            "layout 'fsdp3' has 3 data-parallel ranks, which cannot share training.global_batch_size=8",
        ),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *words]) == 2
    assert capsys.readouterr().err.startswith(f"torchtitan-mixle: {message}")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A layout that is the same, one that cannot run, and an exit code that says so."""
    words = [sys.executable, "-m", "torchtitan_mixle", "parity", str(DEBUG_CONFIG), "--steps", "2"]
    words += ["--override", "training.seq_len=32", "training.local_batch_size=2", "--layouts", "cp2,tp3"]
    result = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1  # the README's command shows the other one
    assert result.stdout.count("│ same") == 1, result.stdout
    assert "reference" in result.stdout
    assert "tp3: parallelism.tensor_parallel_degree=3 must divide n_head=8" in result.stdout
