"""What `import` reads: a mixle `LM.save` file, a mixle state dict, or a GPT-2 folder, as our weights one by one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan_mixle.checkpoint.gpt2 import SUFFIX, GPT2Folder
from torchtitan_mixle.checkpoint.reader import same_bits
from torchtitan_mixle.checkpoint.record import ModelRecord
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import Flavor
from torchtitan_mixle.model.weights import (
    GPT2Form,
    check_shapes,
    gpt2_name,
    mixle_name,
    tensor_of_gpt2,
    tensor_of_mixle,
    weight_shapes,
)

_LM_KEYS = {"vocab": "vocab_size", "d_model": "d_model", "n_layer": "n_layer", "n_head": "n_head", "block": "block"}


@dataclass(frozen=True)
class Source:
    """A model to import: `read(name)` gives each of our weights once (head.weight is tok.weight), and forgets it."""

    record: ModelRecord
    read: Callable[[str], Tensor]
    kind: str


def open_source(path: Path, *, n_head: int | None, mup_attention: bool) -> Source:
    """Raises ConfigError for anything that is not a whole model of this architecture.

    `n_head` is needed where the file does not say it; given, it must agree with what the file says.
    """
    path = path.expanduser()
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a file of mixle's LM.save, a state dict or a GPT-2 folder")
    if path.is_dir() and mup_attention:
        raise ConfigError(f"--mup-attention: a GPT-2 as in {path} has no muP attention; leave it out")
    source = _gpt2(path) if path.is_dir() else _mixle(path, n_head, mup_attention)
    if n_head not in (None, source.record.n_head):
        raise ConfigError(f"--n-head {n_head}: {source.record.origin} says n_head={source.record.n_head}; leave it out")
    return source


def _gpt2(path: Path) -> Source:
    folder = GPT2Folder.open(path)
    form = GPT2Form(folder.record.n_head)

    def read(name: str) -> Tensor:
        theirs = gpt2_name(name)
        if theirs is None:
            return torch.tensor(1.0)
        return tensor_of_gpt2(name, folder.read(theirs), form)

    return Source(folder.record, read, "GPT-2")


def _mixle(path: Path, n_head: int | None, mup_attention: bool) -> Source:
    """A payload of LM.save, or a bare state dict."""
    if path.suffix == SUFFIX:
        payload: Any = _safetensors(path)
    else:
        payload = load_without_code(path)
    if not isinstance(payload, Mapping):
        raise ConfigError(f"{path} holds a {type(payload).__name__}, not a mixle model")
    if "state_dict" in payload:
        record, state = _lm_record(payload, path), payload["state_dict"]
    else:
        record, state = _bare_record(payload, path, n_head), payload
    if mup_attention and payload.get("mup_attention") is False:
        raise ConfigError(f"--mup-attention: {path} says mup_attention=False; leave it out")
    record = replace(record, mup_attention=record.mup_attention or mup_attention)
    _check_state(state, record, path)
    left = dict(state)
    del left["head.weight"]

    def read(name: str) -> Tensor:
        return tensor_of_mixle(name, left.pop(mixle_name(name)), record.n_head)

    return Source(record, read, "mixle")


def load_without_code(path: Path) -> Any:
    """torch.load of a file that may be anybody's: tensors and plain values only, mapped if it can be."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpicklers and zip readers raise anything on a wrong file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path} is not a file of tensors that torch can load without running code from it ({reason})"
        ) from None


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file ({error}); copy it again") from None


def _lm_record(payload: Mapping[str, Any], path: Path) -> ModelRecord:
    sizes = {}
    for theirs, ours in _LM_KEYS.items():
        value = payload.get(theirs)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{path}: {theirs} = {value!r}, but a file of mixle's LM.save has a whole number there")
        sizes[ours] = value
    return ModelRecord.of(Flavor(**sizes), mup_attention=payload.get("mup_attention") is True, origin=str(path))


def _bare_record(state: Mapping[str, Any], path: Path, n_head: int | None) -> ModelRecord:
    if n_head is None:
        raise ConfigError(f"{path} is a state dict, which does not say how many heads there are; give --n-head")
    tables = [state.get(name) for name in ("tok.weight", "pos.weight")]
    if not all(isinstance(table, Tensor) and table.dim() == 2 for table in tables):
        raise ConfigError(f"{path} has no matrices tok.weight and pos.weight, so it is not a mixle CausalLM's")
    (vocab_size, d_model), (block, _) = (table.shape for table in tables if isinstance(table, Tensor))
    blocks = {name.split(".")[1] for name in state if isinstance(name, str) and name.startswith("blocks.")}
    return ModelRecord(vocab_size, d_model, len(blocks), n_head, block, origin=str(path))


def _check_state(state: Any, record: ModelRecord, path: Path) -> None:
    """Raise ConfigError unless the state dict is whole, of the record's size, and tied."""
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{path}: its state_dict is not one of tensors")
    if record.d_model % record.n_head or record.n_head < 1:
        raise ConfigError(f"n_head={record.n_head} does not divide d_model={record.d_model} of {path}")
    expected = {mixle_name(name): shape for name, shape in weight_shapes(record).items()}
    check_shapes(
        {str(name): tuple(value.shape) for name, value in state.items()},
        expected,
        where=str(path),
        remedy="it does not hold the mixle CausalLM that its sizes say",
    )
    if wrong := [name for name, value in state.items() if not value.is_floating_point()]:
        raise ConfigError(f"{path}: {wrong[0]} has the dtype {state[wrong[0]].dtype}; weights are floating-point")
    if not same_bits(state["tok.weight"], state["head.weight"]):
        raise ConfigError(f"{path}: tok.weight and head.weight differ, but in this model they are one matrix")
