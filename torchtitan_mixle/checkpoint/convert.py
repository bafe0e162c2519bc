"""Whole models from and to other programs' files, in one process, with no more than one copy in memory."""

import json
import math
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_mixle.checkpoint.gpt2 import CONFIG, FILE_BYTES, INDEX, SUFFIX, config_json, file_numbers
from torchtitan_mixle.checkpoint.output import whole
from torchtitan_mixle.checkpoint.reader import METADATA, Weights, same_bits
from torchtitan_mixle.checkpoint.record import FILE, ModelRecord
from torchtitan_mixle.checkpoint.sources import Source, load_without_code
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.weights import (
    GPT2_PREFIX,
    MULTIPLIER,
    GPT2Form,
    gpt2_name,
    gpt2_shapes,
    gpt2_tensor,
    mixle_name,
    mixle_tensor,
    weight_shapes,
)

Track = Callable[[Iterable[str], str], Iterable[str]]
"""track(names, what is done with each): the names again, with progress shown."""

_CHECKPOINT_FILES = re.compile(rf"{re.escape(METADATA)}|{re.escape(FILE)}|__\d+_\d+\.distcp")
_GPT2_FILES = re.compile(rf"{re.escape(CONFIG)}|{re.escape(INDEX)}|tokenizer\.json|model[-\w]*\{SUFFIX}")


def import_model(source: Source, out: Path, *, overwrite: bool, track: Track) -> None:
    """Write `source` as a DCP checkpoint that any layout can start from, with the model's record in it."""
    names = list(weight_shapes(source.record))
    with whole(out, overwrite=overwrite, is_ours=is_imported) as folder:
        state = {name: source.read(name) for name in track(names, "reading") if name != "head.weight"}
        for name, value in state.items():
            _largest(name, value)
        # A copy for DCP to write, as a run has both; in memory they are one.
        state["head.weight"] = state["tok.weight"]
        with _single_process():
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        source.record.write(folder)
        written = Weights.open(folder)
        _check_all(written.shapes, names, folder)
        for name in track(names, "checking"):
            _check_written(same_bits(written.read(name), state[name]), name, out)


def export_mixle(
    weights: Weights, record: ModelRecord, out: Path, *, dtype: torch.dtype | None, overwrite: bool, track: Track
) -> None:
    """Write a file that mixle's `LM.load` opens.

    LM.load knows no muP attention: the flag lies in the file under a key of its own, which `import` reads.
    """
    weights.check_tie()
    names = [name for name in weight_shapes(record) if name != "head.weight"]
    with whole(out, overwrite=overwrite, is_ours=zipfile.is_zipfile) as file:
        state = {}
        for name in track(names, "reading"):
            state[mixle_name(name)] = _cast(name, mixle_tensor(name, weights.read(name), record.n_head), dtype)
        state["head.weight"] = state["tok.weight"]  # one copy, in memory and in the file
        payload: dict[str, Any] = {
            "vocab": record.vocab_size,
            "d_model": record.d_model,
            "n_layer": record.n_layer,
            "n_head": record.n_head,
            "block": record.block,
            "device": "cpu",
            "state_dict": state,
        }
        if record.mup_attention:
            payload["mup_attention"] = True
        with file.open("wb") as stream:  # given a path, torch would write its name into the file
            torch.save(payload, stream)
        written = load_without_code(file)["state_dict"]
        _check_all(written, state, out)
        for name in track(list(state), "checking"):
            _check_written(same_bits(written[name], state[name]), name, out)


def export_gpt2(
    weights: Weights,
    record: ModelRecord,
    out: Path,
    *,
    dtype: torch.dtype | None,
    overwrite: bool,
    track: Track,
    tokenizer: Path | None = None,
    eos_id: int | None = None,
) -> None:
    """Write a folder that `transformers` opens as a GPT2LMHeadModel; muP factors are folded into the weights."""
    weights.check_tie()
    form = GPT2Form(record.n_head, record.mup_attention, float(weights.read(MULTIPLIER)))
    names = [name for name in weight_shapes(record) if name not in ("head.weight", MULTIPLIER)]

    def read(name: str) -> Tensor:
        return _cast(name, gpt2_tensor(name, weights.read(name), form), dtype)

    with whole(out, overwrite=overwrite, is_ours=is_gpt2_export) as folder:
        folder.mkdir()
        where = _file_of(names, weights, dtype)
        shapes = gpt2_shapes(record)
        for file, group in groupby(names, where.__getitem__):
            # The room for all of a file first: made one by one, tensors would leave holes where what they were made
            # from has been, half as much again.
            tensors = {
                name: torch.empty(shapes[str(gpt2_name(name))], dtype=dtype or weights.dtypes[name]) for name in group
            }
            for name in track(tensors, f"writing {file}"):
                tensors[name].copy_(read(name))
            save_file({_gpt2_key(name): x for name, x in tensors.items()}, folder / file, metadata={"format": "pt"})
        _write_index(folder, where, weights, dtype)
        config = folder / CONFIG
        config.write_text(config_json(record, dtype or weights.dtypes["tok.weight"], eos_id), encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / tokenizer.name)
        for file, group in groupby(track(names, "checking"), where.__getitem__):
            shutil.copymode(config, folder / file)  # safetensors makes them for the owner alone
            with safe_open(folder / file, framework="pt") as opened:
                for name in group:
                    _check_written(same_bits(opened.get_tensor(_gpt2_key(name)), read(name)), name, out)


def is_imported(path: Path) -> bool:
    """Whether a folder holds what `import` writes, and nothing else."""
    return (path / FILE).is_file() and _holds_only(path, _CHECKPOINT_FILES)


def is_gpt2_export(path: Path) -> bool:
    """Whether a folder holds what `export` writes, and nothing else."""
    return (path / CONFIG).is_file() and _holds_only(path, _GPT2_FILES)


def _holds_only(folder: Path, names: re.Pattern[str]) -> bool:
    return folder.is_dir() and all(file.is_file() and names.fullmatch(file.name) for file in folder.iterdir())


def _cast(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """To the asked-for dtype; the muP multiplier is one number and stays exact.

    Raises ConfigError if the weight is not finite, or would not be in that dtype.
    """
    largest = _largest(name, value)
    if dtype is None or name == MULTIPLIER:
        return value
    if torch.tensor(largest, dtype=torch.float64).to(dtype).isinf():
        raise ConfigError(
            f"{name} has a weight of magnitude {largest:.6g}, beyond the {torch.finfo(dtype).max:.6g} of "
            f"{str(dtype).removeprefix('torch.')}; nothing is written, use --dtype bfloat16 or float32"
        )
    return value.to(dtype)


def _largest(name: str, value: Tensor) -> float:
    """The largest magnitude in a weight, without a copy of it. Raises ConfigError if it is NaN or infinite."""
    low, high = (x.item() for x in value.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{name} holds NaN or infinite numbers; nothing is written, use weights of an earlier step")
    return max(abs(low), abs(high))


def _gpt2_key(name: str) -> str:
    return f"{GPT2_PREFIX}{gpt2_name(name)}"


def _bytes(name: str, weights: Weights, dtype: torch.dtype | None) -> int:
    return torch.Size(weights.shapes[name]).numel() * (dtype or weights.dtypes[name]).itemsize


def _file_of(names: list[str], weights: Weights, dtype: torch.dtype | None) -> dict[str, str]:
    """Which file holds which weight, filled in the model's order; one file for a model that fits into one."""
    numbers = file_numbers({name: _bytes(name, weights, dtype) for name in names}, FILE_BYTES)
    count = max(numbers.values())
    if count == 1:
        return dict.fromkeys(names, f"model{SUFFIX}")
    return {name: f"model-{i:05d}-of-{count:05d}{SUFFIX}" for name, i in numbers.items()}


def _write_index(folder: Path, where: dict[str, str], weights: Weights, dtype: torch.dtype | None) -> None:
    """Which tensor is where, for a model of several files."""
    if len(set(where.values())) == 1:
        return
    total = sum(_bytes(name, weights, dtype) for name in where)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {_gpt2_key(name): file for name, file in where.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _check_all(found: Iterable[str], expected: Iterable[str], out: Path) -> None:
    difference = set(found) ^ set(expected)
    _check_written(not difference, ", ".join(sorted(difference)[:3]), out)


def _check_written(same: bool, name: str, out: Path) -> None:
    if not same:
        raise ConfigError(f"{name} is not what was written to {out}; nothing is left there, see to the disk")


@contextmanager
def _single_process() -> Iterator[None]:
    """DCP warns where there is no process group, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled", category=UserWarning)
        yield
