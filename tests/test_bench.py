"""The benchmark script runs every rival, prints the ratios of what it measured, and counts what they compute."""

import contextlib
import importlib.util
import io
import re
import runpy
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.jobs import ROOT
from tests.ranks import RankPool

BENCH = str(ROOT / "scripts" / "bench.py")


def printed() -> str:
    """What the whole script prints for one short round of everything."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(BENCH)["main"](seq_len=16, batch_size=2, steps=1, rounds=1)
    return output.getvalue()


@pytest.mark.slow
def test_every_rival_runs(ranks: RankPool) -> None:
    text = ranks.run(printed, 1)[0]
    rates = {name: float(rate.replace(",", "")) for name, rate in re.findall(r"  (.+): ([\d,]+) \(.*tokens/s", text)}
    ours, *rivals = rates
    assert ours == "this package, TorchTitan's trainer"
    assert rivals == [
        "plain PyTorch loop",
        "mixle LM.fit",
        "mixle LM.fit, dense=True",
        "TorchTitan's llama3",
        "transformers GPT-2, plain loop",
    ]
    at = r"(?: at equal FLOPs per token \(theirs: ([\d,]+)\))?"
    ratios = re.findall(rf"  this package / (.+?){at}: ([\d,.]+) \(", text)
    assert [name for name, *_ in ratios] == rivals
    flops_of_ours = 72 * 4 * 128**2 + 12 * 4 * 128 * 16 + 6 * 257 * 128
    for name, flops, ratio in ratios:
        equal = flops_of_ours / int(flops.replace(",", "")) if flops else 1
        assert float(ratio.replace(",", "")) == pytest.approx(equal * rates[ours] / rates[name], rel=0.02), name


def test_the_benchmark_refuses_at_once_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bench = runpy.run_path(BENCH)
    with pytest.raises(SystemExit, match=r"pip install \"torchtitan-mixle\[bench\]\", or leave it out of --against"):
        bench["main"](against=("transformers",))
    with pytest.raises(SystemExit, match=r"--rounds, .* must be at least 1"):
        bench["main"](rounds=0, against=("plain",))


def compiled_llama3(folder: str) -> tuple[int, int]:
    """FLOPs per token of the benchmark's llama3 without its head: counted in its compiled blocks, and as it says."""
    from torch._dynamo import reset
    from torchtitan.config import ConfigManager

    from tests.flops import counting_backend

    reset()
    name, runs = counting_backend()
    bench = runpy.run_path(BENCH)
    settings = bench["Settings"]("debugmodel", seq_len=32, batch_size=2, steps=1, compile=True, recompute="full")
    parse = ConfigManager.parse_args
    with patch.object(
        ConfigManager, "parse_args", lambda self, words: parse(self, [*words, "--compile.backend", name])
    ):
        trainer = bench["build_trainer"](settings, folder)
        (rival,) = bench["llama3"](settings, trainer, folder)
    for _ in range(2):
        runs.clear()
        rival.run()
    trainer.close()
    head = 6 * trainer.model_args.vocab_size * trainer.model_args.d_model
    return sum(runs), (rival.flops_per_token - head + rival.recomputed) * settings.tokens


@pytest.mark.slow
def test_the_benchmark_counts_what_llama3_recomputes(ranks: RankPool, tmp_path: Path) -> None:
    counted, closed = ranks.run(compiled_llama3, 1, str(tmp_path))[0]
    assert counted == closed > 0
