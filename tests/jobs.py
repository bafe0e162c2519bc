"""Jobs of the debug config, and functions that run them on a rank of the pool."""

import copy
import json
import zlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX

ROOT = Path(__file__).parents[1]
DEBUG_CONFIG = ROOT / "train_configs" / "mixle_debug.toml"

TINY = {
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 5,
    "training.max_norm": 1e9,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "validation.enable": False,
    "checkpoint.enable": False,
    "debug.seed": 42,
}
"""Small steps of the debug model whose gradient norm is reported unclipped."""

BRIEF = {"model.flavor": "shallow", "training.steps": 3}
"""With TINY: fewer steps of a model of two blocks, for what needs no more."""


def flags(overrides: dict[str, Any]) -> list[str]:
    """TorchTitan's command line for overrides: {"training.steps": 5} -> ["--training.steps", "5"]."""
    words: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, bool):
            section, name = key.rsplit(".", 1)
            words.append(f"--{key}" if value else f"--{section}.no-{name}")
        else:
            words += [f"--{key}", str(value)]
    return words


@cache
def base_config(config: Path = DEBUG_CONFIG) -> Any:
    """The config file as TorchTitan reads it (which takes most of a second)."""
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--job.config_file", str(config)])


def job_config(overrides: dict[str, Any], config: Path = DEBUG_CONFIG) -> Any:
    """The config with overrides, as from the command line."""
    result = copy.deepcopy(base_config(config))
    for key, value in overrides.items():
        *path, name = key.split(".")
        section = result
        for part in path:
            section = getattr(section, part)
        old = getattr(section, name)
        setattr(section, name, value.split(",") if isinstance(old, list) and isinstance(value, str) else value)
    return result


def build_trainer(overrides: dict[str, Any]) -> Any:
    """A real TorchTitan trainer inside this rank's process group."""
    from torchtitan.train import Trainer

    from torchtitan_mixle.flavors import FLAVORS

    FLAVORS.setdefault("shallow", replace(FLAVORS["debugmodel"], n_layer=2))
    return Trainer(job_config(overrides))


def train(overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a whole job as TorchTitan does; the lines of metrics.jsonl (on every rank, as rank 0 wrote them)."""
    trainer = build_trainer(overrides)
    trainer.train()
    trainer.close()
    return metrics_of(overrides)


def metrics_of(overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that rank 0 wrote, once it has written them."""
    torch.distributed.barrier()
    return read_lines(Path(overrides["job.dump_folder"]) / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


HideLabels = Callable[[Tensor, list[int]], Tensor]
"""A sample's labels (T,) and its tokens -> the labels with some of them -100."""


def steps_with_gradients(overrides: dict[str, Any], hide: HideLabels | None = None) -> dict[str, Any]:
    """Initial weights, per-step loss and pre-clip norm, step-1 gradients, and the ids each step's batches held.

    What `hide` makes of a sample's labels must depend on the sample alone, so that it is the same in every layout.
    """
    from torchtitan_mixle.model.init import plain_name

    trainer = build_trainer(overrides)
    initial = whole_state(trainer)
    gradients: dict[str, Tensor] = {}
    tied: list[dict[str, Tensor]] = []
    ids: list[list[int]] = []

    def keep_gradients(*_: Any) -> None:
        if not gradients:
            named = [item for part in trainer.model_parts for item in part.named_parameters()]
            gradients.update({plain_name(n): full(p.grad) for n, p in named if p.grad is not None})

    trainer.optimizers.register_step_pre_hook(keep_gradients)
    norms: list[float] = []
    report = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, max_loss, norm, **kw: (
        norms.append(norm),
        report(step, loss, max_loss, norm, **kw),
    )
    batches = trainer.batch_generator(_watch(trainer.dataloader, ids, hide))
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(batches)
        tied.append(whole_state(trainer, only=("tok.weight", "head.weight")))
    trainer.close()
    lines = metrics_of(overrides)
    return {
        "initial": initial,
        "gradients": gradients,
        "loss": [line["loss"] for line in lines],
        "grad_norm": norms,
        "batches": ids,
        "dp_rank": trainer.dataloader.dp_rank,
        "optimizer_parameters": sum(p.numel() for o in trainer.optimizers for g in o.param_groups for p in g["params"]),
        "tied": tied,
        "final": whole_state(trainer),
    }


def whole_state(trainer: Any, only: Collection[str] = ()) -> dict[str, Tensor]:
    """Full weights of this rank's stages, by their names in the bare model: all, or those that are named."""
    from torchtitan_mixle.model.init import plain_name

    named = ((plain_name(n), p) for part in trainer.model_parts for n, p in part.state_dict().items())
    return {name: full(p) for name, p in named if not only or name in only}


def _watch(loader: Any, seen: list[list[int]], hide: HideLabels | None) -> Any:
    """Pass batches on, with labels ignored, and note each sample's tokens as one row."""
    for inputs, labels in loader:
        rows = torch.cat([inputs["input"], labels[:, -1:]], dim=1).tolist()
        seen += rows
        if hide is not None:
            labels = torch.stack([hide(y, row) for y, row in zip(labels, rows, strict=True)])
        yield inputs, labels


def hide_three_in_ten(labels: Tensor, sample: list[int]) -> Tensor:
    """Labels without 30 % of them, and one sample in four without any."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(sample).encode()))
    if torch.rand((), generator=generator) < 0.25:
        return torch.full_like(labels, IGNORE_INDEX)
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORE_INDEX)
