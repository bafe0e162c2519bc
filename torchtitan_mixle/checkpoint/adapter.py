"""TorchTitan's door to Hugging Face files: `initial_load_in_hf` and `last_save_in_hf` in GPT-2 form."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan_mixle.checkpoint.gpt2 import (
    CONFIG,
    FILE_BYTES,
    GPT2Folder,
    config_json,
    file_numbers,
    warn_of_activation,
)
from torchtitan_mixle.checkpoint.record import ModelRecord
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.weights import (
    GPT2_PREFIX,
    MULTIPLIER,
    GPT2Form,
    gpt2_name,
    gpt2_shapes,
    gpt2_tensor,
    is_turned,
    tensor_of_gpt2,
)

logger = logging.getLogger(__name__)


class GPT2Adapter(BaseStateDictAdapter):
    """This rank's weights as GPT-2's and back. Every rank that shares the weights must call it.

    TorchTitan calls `to_hf` before a load too, to learn what to read into, and `from_hf` after it.
    """

    def __init__(
        self,
        model_args: CausalLMArgs,
        hf_assets_path: str | None,
        *,
        source: GPT2Folder | None = None,
        save_folder: Callable[[], Path] | None = None,
        eos_id: int | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """`source`: what the first call will load; `save_folder()`: where the config.json of a save belongs.

        A save fills files up to `file_bytes` of float32.
        """
        self.model_args = model_args
        self.hf_assets_path = hf_assets_path
        sizes = {GPT2_PREFIX + name: 4 * math.prod(shape) for name, shape in gpt2_shapes(model_args).items()}
        self.fqn_to_index_mapping = file_numbers(sizes, file_bytes)
        self._source = source
        self._save_folder = save_folder
        self._eos_id = eos_id
        self._seen: dict[str, Tensor] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our (sharded) weights under GPT-2's names and in its forms."""
        self._seen = dict(state_dict)
        prefix = GPT2_PREFIX if self._source is None else self._source.prefix
        form = self._form(self._multiplier(state_dict))
        result = {}
        for name, value in state_dict.items():
            theirs = gpt2_name(name)
            if theirs is None or (name == "head.weight" and "tok.weight" in state_dict):
                continue
            result[prefix + theirs] = _changed(name, value, partial(gpt2_tensor, name, form=form))
        if self._source is None and self._save_folder is not None and dist.get_rank() == 0:
            self._write_config(next(iter(result.values())).dtype)
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The inverse, for the weights that `to_hf` was last given, sharded as they were."""
        prefix = GPT2_PREFIX if self._source is None else self._source.prefix
        form = self._form(self.model_args.mup_output_multiplier)
        result = {}
        for name, ours in self._seen.items():
            theirs = gpt2_name(name)
            if theirs is not None:
                value = hf_state_dict[prefix + theirs]
                result[name] = _laid_out(_changed(name, value, partial(tensor_of_gpt2, name, form=form)), ours)
        self._seen = {}
        self._source = None  # what comes now is a save
        return result

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        if self._source is not None and (warning := warn_of_activation(self._source.record.activation)):
            logger.warning("%s: %s", path, warning)
        return HuggingFaceStorageReader(path)

    def _form(self, multiplier: float) -> GPT2Form:
        return GPT2Form(self.model_args.n_head, self.model_args.mup_attention, multiplier)

    def _multiplier(self, state_dict: dict[str, Any]) -> float:
        """The model's own, which a checkpoint can have brought; a save in half precision has rounded it."""
        stored = state_dict.get(MULTIPLIER)
        asked = self.model_args.mup_output_multiplier
        if stored is None or torch.tensor(asked, dtype=stored.dtype).item() == stored.item():
            return asked
        return float(stored)

    def _write_config(self, dtype: torch.dtype) -> None:
        assert self._save_folder is not None
        folder = self._save_folder()
        folder.mkdir(parents=True, exist_ok=True)
        record = ModelRecord.of(self.model_args)
        (folder / CONFIG).write_text(config_json(record, dtype, self._eos_id), encoding="utf-8")


def _changed(name: str, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` applied to a weight that may be sharded: a change of rows needs the whole of it, one at a time.

    The result of a sharded matrix is sharded again, by rows.
    """
    if not (is_turned(name) or "wqkv" in name):
        return change(value)
    if not isinstance(value, DTensor):
        return change(value)
    rows = [Replicate() if placement.is_replicate() else Shard(0) for placement in value.placements]
    return distribute_tensor(change(value.full_tensor()), value.device_mesh, rows, src_data_rank=None)


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """`value` sharded as `like` is."""
    if not isinstance(value, DTensor) or not isinstance(like, DTensor) or value.placements == like.placements:
        return value
    return distribute_tensor(value.full_tensor(), like.device_mesh, like.placements, src_data_rank=None)
