#!/usr/bin/env python3
"""Throughput of this package through TorchTitan's trainer against what one would otherwise use.

    python scripts/bench.py [--flavor debugmodel] [--steps 10] [--rounds 5] [--compile] [--against plain llama3]

- plain: a plain PyTorch loop of the same model
- fit: the mixle package's own `LM.fit`, as it is (a target a window) and with dense=True (a target a token)
- llama3: TorchTitan's llama3 of the nearest size, through the same trainer
- transformers: GPT-2 of the same shape from Hugging Face transformers, in the plain loop

All run in this one process, in turn, on the same data with the same optimizer, in bfloat16 on an accelerator and in
float32 on a CPU. Figures are medians over the rounds, and a ratio is the median of the rounds' ratios, so that a
machine whose speed drifts does not decide it; many short rounds tell most. Each keeps weights, gradients and moments
(16 bytes a parameter): where they do not fit together, give one rival at a time.
"""

import dataclasses
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro

from torchtitan_mixle.metrics.counting import flops_per_token, recomputed_flops_per_token
from torchtitan_mixle.metrics.hardware import peak_flops
from torchtitan_mixle.metrics.rates import recomputed_by

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "train_configs" / "mixle_debug.toml"
FIT_BATCH = 64  # LM.fit's default
Rival = Literal["plain", "fit", "llama3", "transformers"]


@dataclass(frozen=True)
class Settings:
    """The same for every contestant."""

    flavor: str
    seq_len: int
    batch_size: int
    steps: int
    compile: bool
    recompute: Literal["none", "full"]

    @property
    def tokens(self) -> int:
        """Trained on in a round."""
        return self.steps * self.batch_size * self.seq_len


@dataclass(frozen=True)
class Contestant:
    name: str
    run: Callable[[], Any]
    """One round."""
    tokens: int
    """Trained on in a round, each a label."""
    flops_per_token: int
    recomputed: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of each round that counts."""

    def rates(self) -> list[float]:
        """Tokens/s of each round."""
        return [self.tokens / seconds for seconds in self.seconds]


def main(
    flavor: str = "debugmodel",
    seq_len: int = 256,
    batch_size: int = 8,
    steps: int = 10,
    rounds: int = 5,
    compile: bool = False,
    recompute: Literal["none", "full"] = "none",
    against: tuple[Rival, ...] = ("plain", "fit", "llama3", "transformers"),
    peak_tflops: float | None = None,
) -> None:
    """Measure and print.

    Args:
        flavor: Size of the model.
        seq_len: Tokens in a sample.
        batch_size: Samples in a step.
        steps: Steps in a round.
        rounds: Rounds of each contestant; one more before them is not counted.
        compile: Compile blocks and loss, in all but LM.fit.
        recompute: Activation checkpointing, in all but LM.fit.
        against: Rivals of the trainer.
        peak_tflops: Dense peak of the device, for MFU where it is not known.
    """
    if min(rounds, steps, batch_size, seq_len) < 1:
        raise SystemExit("--rounds, --steps, --batch-size and --seq-len must be at least 1")
    if "transformers" in against and find_spec("transformers") is None:
        raise SystemExit(
            'transformers is not installed: pip install "torchtitan-mixle[bench]", or leave it out of --against'
        )
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    settings = Settings(flavor, seq_len, batch_size, steps, compile, recompute)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(settings, folder)
        contestants = [titan(settings, trainer)]
        for rival in against:
            contestants += RIVALS[rival](settings, trainer, folder)
        measure(contestants, rounds)
        report(contestants, settings, trainer, peak_tflops)
        trainer.close()
    torch.distributed.destroy_process_group()


def build_trainer(settings: Settings, folder: str, name: str = "mixle") -> Any:
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    overrides = {
        "job.dump_folder": folder,
        "model.name": name,
        "model.flavor": settings.flavor,
        "mixle.block": settings.seq_len,
        "training.seq_len": settings.seq_len,
        "training.local_batch_size": settings.batch_size,
        "training.mixed_precision_param": "bfloat16" if torch.accelerator.is_available() else "float32",
        "training.steps": 10**9,
        "lr_scheduler.total_steps": 1000,
        "metrics.log_freq": 10**9,
        "activation_checkpoint.mode": settings.recompute,
    }
    flags = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    flags += ["--validation.no-enable", "--checkpoint.no-enable", "--metrics.no-enable-tensorboard"]
    flags += ["--compile.enable"] if settings.compile else []
    return Trainer(ConfigManager().parse_args(["--job.config_file", str(CONFIG), *flags]))


def trainer_round(trainer: Any, steps: int) -> Callable[[], None]:
    batches = trainer.batch_generator(trainer.dataloader)

    def run() -> None:
        for _ in range(steps):
            trainer.step += 1
            trainer.train_step(batches)

    return run


def titan(settings: Settings, trainer: Any) -> Contestant:
    args = trainer.model_args
    return Contestant(
        "this package, TorchTitan's trainer",
        trainer_round(trainer, settings.steps),
        settings.tokens,
        flops_per_token(args, settings.seq_len).total,
        recomputed_by(trainer.job_config, args) or 0,
    )


def plain(settings: Settings, trainer: Any, folder: str) -> list[Contestant]:
    """What one writes without a trainer: the same model, loader, optimizer, clipping and learning rate."""
    from torchtitan_mixle.model.model import CausalLM
    from torchtitan_mixle.parallel.parallelize import apply_compile, apply_recomputation

    model = CausalLM(trainer.model_args).to(trainer.device)
    model.init_weights()
    apply_recomputation(model, trainer.job_config)
    apply_compile(model, trainer.job_config)
    run = plain_round(model, model, settings, trainer)
    return [dataclasses.replace(titan(settings, trainer), name="plain PyTorch loop", run=run, seconds=[])]


def transformers_gpt2(settings: Settings, trainer: Any, folder: str) -> list[Contestant]:
    """The same shape with the usual library's code, in the same loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    args = trainer.model_args
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.block,
        n_embd=args.d_model,
        n_layer=args.n_layer,
        n_head=args.n_head,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).to(trainer.device).train()
    if settings.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.compile:
        for block in model.transformer.h:
            block.compile()
    run = plain_round(model, lambda tokens: model(input_ids=tokens).logits, settings, trainer)
    # Its blocks are compiled inside what is run again, so that all of a block is.
    recomputed = recomputed_flops_per_token(args, settings.seq_len, mode=settings.recompute) or 0
    return [
        dataclasses.replace(
            titan(settings, trainer),
            name="transformers GPT-2, plain loop",
            run=run,
            recomputed=recomputed,
            seconds=[],
        )
    ]


def plain_round(
    model: torch.nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor], settings: Settings, trainer: Any
) -> Callable[[], None]:
    config, device = trainer.job_config, trainer.device
    loss_fn = torch.compile(cross_entropy) if settings.compile else cross_entropy
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches: Iterator[Any] = iter(trainer.dataloader)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")

    def run() -> None:
        for _ in range(settings.steps):
            inputs, labels = next(batches)
            optimizer.zero_grad()
            with autocast:
                loss = loss_fn(logits_of(inputs["input"].to(device)), labels.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
            optimizer.step()

    return run


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def fit(settings: Settings, trainer: Any, folder: str) -> list[Contestant]:
    """mixle's trainer: by default each window of `block` tokens trains on the one that follows it."""
    from mixle.models.language_model import LM

    args = trainer.model_args
    inputs, labels = next(iter(trainer.dataloader))
    ids = torch.cat([inputs["input"], labels[:, -1:]], dim=1).flatten().repeat(1 + FIT_BATCH // len(labels)).numpy()

    def language_model() -> Any:
        return LM(
            args.vocab_size,
            d_model=args.d_model,
            n_layer=args.n_layer,
            n_head=args.n_head,
            block=settings.seq_len,
            device=str(trainer.device),
        )

    windows, rows = language_model(), language_model()
    few, many = ids[: settings.seq_len + FIT_BATCH], ids[: FIT_BATCH * (settings.seq_len + 1)]
    flops = flops_per_token(args, settings.seq_len).total
    return [
        Contestant("mixle LM.fit", lambda: windows.fit(few, batch_size=FIT_BATCH), FIT_BATCH, flops),
        Contestant(
            "mixle LM.fit, dense=True",
            lambda: rows.fit(many, batch_size=settings.batch_size, dense=True),
            FIT_BATCH * settings.seq_len,
            flops,
        ),
    ]


def llama3(settings: Settings, trainer: Any, folder: str) -> list[Contestant]:
    """TorchTitan's llama3 with our width, depth, heads, vocabulary and data; its MLP is the nearest in FLOPs."""
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    from torchtitan_mixle.spec import Run

    args = trainer.model_args
    shape = TransformerModelArgs(
        dim=args.d_model,
        n_layers=args.n_layer,
        n_heads=args.n_head,
        vocab_size=args.vocab_size,
        multiple_of=32,
        max_seq_len=settings.seq_len,
    )
    spec = dataclasses.replace(
        get_train_spec("llama3"),
        model_args={settings.flavor: shape},
        build_tokenizer_fn=None,
        build_dataloader_fn=Run().build_dataloader,
    )
    name = f"llama3_like_{settings.flavor}_of_{settings.seq_len}"
    register_train_spec(name, spec)
    rival = build_trainer(settings, folder, name)
    hidden = rival.model_parts[0].layers["0"].feed_forward.w1.weight.shape[0]
    block = 4 * args.d_model**2 + 3 * args.d_model * hidden
    attention = 2 * args.d_model * settings.seq_len
    forward = args.n_layer * (2 * block + 2 * attention)
    flops = 3 * forward + 6 * args.vocab_size * args.d_model
    again = forward if settings.recompute == "full" else 0
    if again and settings.compile:  # the compiler leaves out each block's last product, which no gradient needs
        again -= args.n_layer * 2 * args.d_model * hidden
    run = trainer_round(rival, settings.steps)
    return [Contestant("TorchTitan's llama3", run, settings.tokens, flops, again)]


RIVALS: dict[str, Callable[[Settings, Any, str], list[Contestant]]] = {
    "plain": plain,
    "fit": fit,
    "llama3": llama3,
    "transformers": transformers_gpt2,
}


def measure(contestants: list[Contestant], rounds: int) -> None:
    """Note the seconds of each round, after one that is not counted.

    Each round has an order of its own: whoever runs after itself, or after a rival that uses less memory, finds more
    in the caches.
    """
    order = random.Random(0)
    for number in range(rounds + 1):
        for contestant in order.sample(contestants, len(contestants)):
            began = time.perf_counter()
            contestant.run()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if number:
                contestant.seconds.append(time.perf_counter() - began)


def loader_rate(trainer: Any, batches: int = 200) -> float:
    """Tokens/s of one process that does nothing but load."""
    loader = iter(trainer.dataloader)
    next(loader)
    began = time.perf_counter()
    tokens = sum(next(loader)[1].numel() for _ in range(batches))
    return tokens / (time.perf_counter() - began)


def report(contestants: list[Contestant], settings: Settings, trainer: Any, peak_tflops: float | None) -> None:
    device = trainer.metrics_processor.device_memory_monitor.device_name
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(device)
    dtype = trainer.job_config.training.mixed_precision_param
    print(f"\ncommit {commit()}, torch {torch.__version__}, {device}, {torch.get_num_threads()} CPU threads")
    print(
        f"{settings.flavor}, {settings.batch_size} samples of {settings.seq_len} tokens, {dtype}, "
        f"{'compiled' if settings.compile else 'eager'}, recomputation {settings.recompute}; "
        f"medians of {len(contestants[0].seconds)} rounds of {settings.steps} steps (lowest to highest)"
    )
    first = contestants[0]
    for contestant in contestants:
        rates = contestant.rates()
        line = f"  {contestant.name}: {shown(rates, ',.0f')} tokens/s"
        if peak is not None and contestant.name.find("LM.fit") < 0:
            share = 100 * statistics.median(rates) / peak
            mfu, hfu = (
                share * flops
                for flops in (contestant.flops_per_token, contestant.flops_per_token + contestant.recomputed)
            )
            line += f", MFU {mfu:.2f} %, HFU {hfu:.2f} %"
        print(line)
    for rival in contestants[1:]:
        equal = first.flops_per_token / rival.flops_per_token
        ratios = [equal * ours / theirs for ours, theirs in zip(first.rates(), rival.rates(), strict=True)]
        at = "" if equal == 1 else f" at equal FLOPs per token (theirs: {rival.flops_per_token:,})"
        low, high = interval(ratios)
        print(f"  this package / {rival.name}{at}: {shown(ratios, ',.3f')}, 95 % of medians {low:,.3f} to {high:,.3f}")
    print(f"  the loader alone: {loader_rate(trainer):,.0f} tokens/s in one process")


def shown(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def interval(values: list[float], share: float = 0.95, draws: int = 2000) -> tuple[float, float]:
    """Where the median of as many rounds would lie in `share` of all cases: the bootstrap's percentile interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    outside = round(draws * (1 - share) / 2)
    return medians[outside], medians[-1 - outside]


def commit() -> str:
    """Short hash of the repository, or "unknown"."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


if __name__ == "__main__":
    tyro.cli(main)
