#!/usr/bin/env python3
"""Throughput of this package through TorchTitan's trainer against a plain PyTorch loop of the same model.

    python scripts/bench.py [--flavor debugmodel] [--steps 20] [--rounds 5] [--compile]

Both run in this one process, in turn, on the same data with the same optimizer; the figures are medians over the
rounds, and the ratio is the median of the rounds' ratios, so that a machine whose speed drifts does not decide it.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro

CONFIG = Path(__file__).parents[1] / "train_configs" / "mixle_debug.toml"


def main(
    flavor: str = "debugmodel",
    seq_len: int = 256,
    batch_size: int = 8,
    steps: int = 20,
    rounds: int = 5,
    compile: bool = False,
) -> None:
    """Measure and print.

    Args:
        flavor: Size of the model.
        seq_len: Tokens in a sample.
        batch_size: Samples in a step.
        steps: Steps in a round.
        rounds: Rounds of each loop.
        compile: Compile the blocks and the loss in both loops.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder, flavor, seq_len, batch_size, compile)
        loops = {
            "TorchTitan trainer": trainer_steps(trainer, steps),
            "plain PyTorch loop": plain_steps(trainer, steps, compile),
        }
        seconds = measure(loops, rounds)
        trainer.close()
    torch.distributed.destroy_process_group()
    report(seconds, tokens=steps * batch_size * seq_len)


def build_trainer(folder: str, flavor: str, seq_len: int, batch_size: int, compile: bool) -> Any:
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    overrides = {
        "job.dump_folder": folder,
        "model.flavor": flavor,
        "training.seq_len": seq_len,
        "training.local_batch_size": batch_size,
        "training.steps": 10**9,
        "lr_scheduler.total_steps": 1000,
        "metrics.log_freq": 10**9,
    }
    flags = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    flags += ["--validation.no-enable", "--checkpoint.no-enable", "--metrics.no-enable-tensorboard"]
    flags += ["--compile.enable"] if compile else []
    return Trainer(ConfigManager().parse_args(["--job.config_file", str(CONFIG), *flags]))


def trainer_steps(trainer: Any, steps: int) -> Callable[[], None]:
    batches = trainer.batch_generator(trainer.dataloader)

    def run() -> None:
        for _ in range(steps):
            trainer.step += 1
            trainer.train_step(batches)

    return run


def plain_steps(trainer: Any, steps: int, compile: bool) -> Callable[[], None]:
    """What one writes without a trainer: the same model, loader, optimizer, clipping and learning rate."""
    from torchtitan_mixle.model.model import CausalLM

    config, device = trainer.job_config, trainer.device
    model = CausalLM(trainer.model_args).to(device)
    model.init_weights()
    step = torch.compile(cross_entropy) if compile else cross_entropy
    if compile:
        for block in model.blocks.values():
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches: Iterator[Any] = iter(trainer.dataloader)

    def run() -> None:
        for _ in range(steps):
            inputs, labels = next(batches)
            optimizer.zero_grad()
            loss = step(model(inputs["input"].to(device)), labels.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
            optimizer.step()

    return run


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def measure(loops: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each loop, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for counted in [False] + [True] * rounds:
        for name, run in loops.items():
            began = time.perf_counter()
            run()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if counted:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} CPU threads, medians of {tokens} tokens a round:")
    for name, times in seconds.items():
        low, high = tokens / max(times), tokens / min(times)
        print(f"  {name}: {tokens / statistics.median(times):,.0f} tokens/s ({low:,.0f} to {high:,.0f})")
    trainer, plain = seconds.values()
    ratios = [b / a for a, b in zip(trainer, plain, strict=True)]
    print(f"  trainer / plain loop: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    tyro.cli(main)
