"""What a run will start from, looked at before anything is loaded: its newest whole checkpoint, or given weights."""

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_mixle.checkpoint.gpt2 import INDEX, SUFFIX, GPT2Folder
from torchtitan_mixle.checkpoint.reader import METADATA, Weights
from torchtitan_mixle.checkpoint.record import FILE, ModelRecord, find_record, read_record
from torchtitan_mixle.data.datasets import is_token_source
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import SIZES
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.planning.check import run_plan

logger = logging.getLogger(__name__)

_STATES = {"optimizer": "optimizer.", "lr_scheduler": "lr_scheduler.", "train_state": "train_state"}
_FIXED = (*SIZES, "mup_attention")


def check_start(job_config: Any, args: CausalLMArgs) -> tuple[GPT2Folder | None, str]:
    """What a run will start from: (the GPT-2 if it is one, the activation that its weights were trained with).

    Raises ConfigError on every rank if its names, shapes or flags are not the model's. A run that has checkpoints of
    its own goes on from those, as TorchTitan has it; `checkpoint.load_step` is set to the newest that is whole.
    """
    checkpoint = job_config.checkpoint
    if not checkpoint.enable:
        return None, "gelu"
    found = _decided_once(job_config, args)
    if found.error is not None:
        raise ConfigError(found.error)
    if not found.resumes:
        return _check_given(job_config, args)
    checkpoint.load_step = found.step
    return None, found.activation


@dataclass
class _Found:
    """What rank 0 has seen in the dump folder."""

    resumes: bool = False
    """Whether TorchTitan looks at the checkpoint folder, not at what an initial load names."""
    step: int = -1
    activation: str = "gelu"
    error: str | None = None


def _decided_once(job_config: Any, args: CausalLMArgs) -> _Found:
    """Rank 0 looks and tells the others, which could see another state of a shared file system."""
    together = dist.is_initialized()
    told: list[Any] = [None]
    if not together or dist.get_rank() == 0:
        try:
            told = [_look(job_config, args)]
        except ConfigError as error:
            told = [_Found(error=str(error))]
        except OSError as error:
            told = [_Found(error=f"the checkpoints of job.dump_folder cannot be looked at ({error}); see to that path")]
    if together:
        dist.broadcast_object_list(told, src=0)
    found: _Found = told[0]
    return found


def _look(job_config: Any, args: CausalLMArgs) -> _Found:
    checkpoint = job_config.checkpoint
    dump_folder = Path(job_config.job.dump_folder)
    folder = dump_folder / checkpoint.folder
    _check_record(dump_folder, args)
    if not folder.exists():
        if checkpoint.load_step != -1:
            raise ConfigError(
                f"checkpoint.load_step={checkpoint.load_step}: there is no folder {folder}; "
                f"set it to -1 for a new run, or see to job.dump_folder and checkpoint.folder"
            )
        return _Found()
    step = _choose(folder, checkpoint)
    if not folder.exists():
        return _Found()
    if step == -1:
        _check_not_ignored(folder, checkpoint)
        return _Found(resumes=True)
    weights = Weights.open(folder / f"step-{step}")
    weights.check(ModelRecord.of(args, origin="this config"))
    if step != 0:  # TorchTitan takes the weights alone of step 0
        earlier = [n for n in _steps(folder) if n < step and (folder / f"step-{n}" / METADATA).is_file()]
        go_on = f"set checkpoint.load_step={max(earlier)} to go on from there, or " if earlier else ""
        _check_states(
            weights,
            job_config,
            remedy=f"{go_on}start a new run with another job.dump_folder and "
            f"checkpoint.initial_load_path={str(weights.folder)!r}",
        )
    return _Found(resumes=True, step=step, activation=_recorded_activation(dump_folder))


def _check_record(dump_folder: Path, args: CausalLMArgs) -> None:
    """Raise ConfigError if checkpoints below the dump folder are of another model, as their record says.

    The number of heads and the muP flag leave no trace in the weights. A damaged record is no reason not to go on.
    """
    file = dump_folder / FILE
    try:
        record = read_record(file)
    except ConfigError:
        return
    name = _difference(record, args)
    if name is None or not _describes_a_checkpoint(dump_folder):
        return
    raise ConfigError(
        f"{file} says {name}={getattr(record, name)}, and this config makes {name}={getattr(args, name)}: the "
        f"checkpoints there are of another model; set it back, or use another job.dump_folder"
    )


def _difference(record: ModelRecord, args: CausalLMArgs) -> str | None:
    """The first number or flag in which a recorded model is not the config's."""
    return next((name for name in _FIXED if getattr(record, name) != getattr(args, name)), None)


def _describes_a_checkpoint(dump_folder: Path) -> bool:
    """Whether the dump folder's record is the nearest one above any saved step."""
    own = (dump_folder / FILE).resolve()
    for name in (METADATA, INDEX):
        for file in dump_folder.glob(f"**/step-*/{name}"):
            nearest = next((p / FILE for p in file.resolve().parents if (p / FILE).is_file()), None)
            if nearest == own:
                return True
    return False


def _steps(folder: Path) -> list[int]:
    """The steps that have a folder, whole or not, newest first."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    numbers = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
    return sorted((n for n in numbers if f"step-{n}" in names), reverse=True)


def _choose(folder: Path, checkpoint: Any) -> int:
    """The step to go on from: as asked, or the newest that is whole; -1 if no save was ever finished."""
    steps = _steps(folder)
    asked = checkpoint.load_step
    if asked != -1:
        if asked not in steps:
            there = ", ".join(str(n) for n in steps[:10]) or "none"
            raise ConfigError(f"checkpoint.load_step={asked} is not in {folder}; the steps there are: {there}")
        _refuse_hf(folder, asked, steps)
        return int(asked)
    broken: dict[int, str] = {}
    for step in steps:
        _refuse_hf(folder, step, steps)
        try:
            Weights.open(folder / f"step-{step}")
        except ConfigError as error:
            broken[step] = str(error)
            continue
        for number, why in broken.items():
            _set_aside(folder, number, why, f"the run goes on from step {step}")
        return step
    if all(_never_finished(folder / f"step-{number}") for number in broken):
        for number, why in broken.items():
            _set_aside(folder, number, why, "no save of this run was finished, so IT STARTS FROM ITS BEGINNING")
        if broken and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf) and not folder.is_symlink():
            folder.rename(_unused(folder.with_name(f"broken-{folder.name}")))  # see _check_not_ignored
    elif broken:
        raise ConfigError(
            f"no checkpoint in {folder} is whole ({next(iter(broken.values()))}); to train from the start, remove that "
            f"folder or use another job.dump_folder"
        )
    return -1


def _never_finished(step: Path) -> bool:
    """Whether a save was broken off: DCP writes the metadata last, and without it nothing can be read."""
    return not (step / METADATA).exists() and not any(step.glob(f"*{SUFFIX}"))


def _set_aside(folder: Path, step: int, why: str, then: str) -> None:
    """Rename a damaged step, which TorchTitan would count among the latest k and write into.

    A new save over old metadata, broken off, could look whole. The new name holds no "step-", by which it finds steps.
    """
    source, target = folder / f"step-{step}", _unused(folder / f"broken-{step}")
    source.rename(target)
    logger.warning("CHECKPOINT %s IS DAMAGED: %s. It is now %s; %s.", source, why, target.name, then)


def _unused(path: Path) -> Path:
    """The path, with a number after it where there is such a file."""
    names = (path.with_name(f"{path.name}.{n}" if n else path.name) for n in itertools.count())
    return next(name for name in names if not name.exists())


def _refuse_hf(folder: Path, step: int, steps: list[int]) -> None:
    """Raise ConfigError for the Hugging Face files that an earlier start ended in."""
    path = folder / f"step-{step}"
    if (path / METADATA).is_file() or not (path / INDEX).is_file():
        return
    others = [n for n in steps if (folder / f"step-{n}" / METADATA).is_file()]
    go_on = f"set checkpoint.load_step={max(others)} to go on from there, or " if others else ""
    raise ConfigError(
        f"{path} holds Hugging Face files (checkpoint.last_save_in_hf), from which a run cannot go on; "
        f"{go_on}start a new run from them with another job.dump_folder, checkpoint.initial_load_in_hf=true and "
        f"checkpoint.initial_load_path={str(path)!r}"
    )


def _check_not_ignored(folder: Path, checkpoint: Any) -> None:
    """TorchTitan loads nothing at all once the folder is there, even if no step is in it."""
    key = "initial_load_path" if checkpoint.initial_load_path else "initial_load_in_hf"
    if getattr(checkpoint, key):
        raise ConfigError(
            f"checkpoint.{key}={getattr(checkpoint, key)!r} would not be loaded, since {folder} exists, without a "
            f"checkpoint in it; remove that folder"
        )


def _check_states(weights: Weights, job_config: Any, *, remedy: str) -> None:
    """Raise ConfigError unless a checkpoint holds all that a run goes on with, not the weights alone."""
    excluded = job_config.checkpoint.exclude_from_loading
    for state, prefix in _STATES.items():
        if state not in excluded and not any(name.startswith(prefix) for name in weights.others):
            raise ConfigError(f"{weights.folder} holds no {state}, so a run cannot go on from it; {remedy}")
    if "dataloader" not in excluded:
        _check_place_in_data(weights, job_config, remedy=remedy)


def _check_place_in_data(weights: Weights, job_config: Any, *, remedy: str) -> None:
    """Raise ConfigError unless a checkpoint says where the job's data goes on, for as many ranks as it has."""
    dataset = job_config.training.dataset
    wanted = "dataloader.samples_consumed" if is_token_source(dataset) else "dataloader.world_size"
    if wanted not in weights.others:
        raise ConfigError(
            f"{weights.folder} does not say where training.dataset={dataset!r} was left: its data was of another kind, "
            f'or none; set checkpoint.exclude_from_loading=["dataloader"] to begin that data anew, or {remedy}'
        )
    saved = sum(name.startswith("dataloader.dp_rank_") for name in weights.others)  # none for tokens
    here = run_plan(job_config, dist.get_world_size()).data_parallel_degree if dist.is_initialized() else saved
    if saved not in (0, here):
        raise ConfigError(
            f"{weights.folder} holds the place in their text of each of {saved} data-parallel ranks, "
            f"and this job has {here}; text that is read as it comes cannot be shared out anew: use {saved} of them, "
            f'or begin it anew with checkpoint.exclude_from_loading=["dataloader"]'
        )


def _check_given(job_config: Any, args: CausalLMArgs) -> tuple[GPT2Folder | None, str]:
    """The same for a run without checkpoints of its own: what its initial load names."""
    checkpoint, record = job_config.checkpoint, ModelRecord.of(args, origin="this config")
    if checkpoint.initial_load_in_hf:
        folder = checkpoint.initial_load_path or job_config.model.hf_assets_path
        source = GPT2Folder.open(folder)
        record.require_same(source.record, what=folder)
        return source, source.record.activation
    if not checkpoint.initial_load_path:
        return None, "gelu"
    path = Path(checkpoint.initial_load_path)
    weights = Weights.open(path)
    theirs = find_record(path)
    if theirs is not None and (name := _difference(theirs, args)):
        raise ConfigError(
            f"checkpoint.initial_load_path={str(path)!r} is of a model with {name}={getattr(theirs, name)} "
            f"({theirs.origin}), and this model has {name}={getattr(args, name)}; start with {' '.join(theirs.flags())}"
        )
    weights.check(record)
    if not checkpoint.initial_load_model_only:
        _check_states(weights, job_config, remedy="set checkpoint.initial_load_model_only=true")
    return None, "gelu" if theirs is None else theirs.activation


def _recorded_activation(dump_folder: Path) -> str:
    """What the earlier start of this run has noted; a damaged note is no reason not to go on."""
    try:
        return read_record(dump_folder / FILE).activation
    except ConfigError:
        return "gelu"
