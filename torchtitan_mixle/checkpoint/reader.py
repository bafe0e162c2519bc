"""The weights of a DCP checkpoint, one tensor at a time, whatever layout wrote it."""

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from torchtitan_mixle.checkpoint.gpt2 import INDEX, SUFFIX
from torchtitan_mixle.checkpoint.record import ModelRecord
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import Flavor
from torchtitan_mixle.model.weights import check_shapes, weight_shapes

METADATA = ".metadata"
_NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
# What the pickle in a checkpoint's .metadata may name; anything else could run code of whoever wrote the file.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_plain = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if is_plain or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """DCP's reader of a folder, with the metadata read once, and without running what is in the pickle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / METADATA).open("rb") as file:
            self.metadata = _load_metadata(file)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _load_metadata(file: BinaryIO) -> Metadata:
    metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise pickle.UnpicklingError("it does not hold a checkpoint's metadata")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class Weights:
    """The weights in a DCP folder: `shapes` and `dtypes` by our names, `read` for one of them."""

    def __init__(self, folder: Path, reader: _Reader) -> None:
        self.folder = folder
        self._reader = reader
        entries = {
            name: entry
            for name, entry in reader.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_WEIGHTS)
        }
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(entry.size) for name, entry in entries.items()}
        self.others = frozenset(reader.metadata.state_dict_metadata) - entries.keys()
        """Names of what is stored beside the weights: the optimizer's state, the data's place and so on."""
        self.dtypes: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in entries.items()}

    @classmethod
    def open(cls, path: str | Path) -> "Weights":
        """The weights in a step-N folder. Raises ConfigError if it is none, or if its files are cut or missing."""
        folder = Path(path).expanduser()
        _require_checkpoint(folder)
        try:
            reader = _Reader(folder)
        except Exception as error:  # a damaged pickle can raise anything
            raise ConfigError(f"{folder / METADATA} cannot be read ({first_line(error)}); use another step") from None
        _check_files(folder, reader.metadata)
        return cls(folder, reader)

    def flavor(self, n_head: int) -> Flavor:
        """The model's size as the tensors show it; the number of heads leaves no trace in them."""
        for name in ("tok.weight", "pos.weight"):
            if len(self.shapes.get(name, ())) != 2:
                raise ConfigError(f"{self.folder} has no matrix {name}, so it is not a checkpoint of a CausalLM")
        vocab_size, d_model = self.shapes["tok.weight"]
        blocks = {match[1] for name in self.shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
        return Flavor(vocab_size, d_model, len(blocks), n_head, self.shapes["pos.weight"][0])

    def check(self, record: ModelRecord) -> None:
        """Raise ConfigError unless these are the weights of that model."""
        check_shapes(
            self.shapes,
            weight_shapes(record),
            where=f"the checkpoint {self.folder}",
            remedy=f"it is not one of the model that {record.origin} describes",
        )

    def read(self, name: str) -> Tensor:
        """One whole tensor, as it was stored."""
        value = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.read_into({name: value})
        return value

    def read_into(self, state_dict: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `state_dict` in place, in their own dtype and on their own device."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.distributed is disabled", category=UserWarning)
                dcp.load(dict(state_dict), storage_reader=self._reader, no_dist=True)
        # torch raises what its zip reader and its unpickler think of; DCP's own exception is no Exception.
        except (Exception, CheckpointException) as error:
            names = ", ".join(list(state_dict)[:3])
            raise ConfigError(
                f"{names} cannot be read from {self.folder} ({first_line(error)}); the checkpoint is damaged, use "
                f"another step"
            ) from None

    def check_tie(self) -> None:
        """Raise ConfigError unless embedding and head, which are one matrix, are stored as the same numbers."""
        if "head.weight" in self.shapes and not same_bits(self.read("tok.weight"), self.read("head.weight")):
            raise ConfigError(
                f"tok.weight and head.weight differ in {self.folder}, but they are one matrix in this model; this "
                f"checkpoint was not written by a run of it"
            )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same in shape, dtype and every bit (a NaN is equal to itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def _require_checkpoint(folder: Path) -> None:
    if (folder / METADATA).is_file():
        return
    if not folder.exists():
        raise ConfigError(f"the checkpoint {folder} does not exist; give the step-N folder of a run")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a checkpoint; give the step-N folder of a run")
    if (folder / INDEX).is_file() or list(folder.glob(f"*{SUFFIX}")):
        raise ConfigError(
            f"{folder} holds safetensors, not a checkpoint; make one of it with `torchtitan-mixle import {folder}`"
        )
    steps = [file.parent for above in ("", "*/") for file in folder.glob(f"{above}step-*/{METADATA}")]
    newest = max(steps, key=lambda step: (_step_number(step), str(step)), default=None)
    hint = f"did you mean {newest}?" if newest else "give the step-N folder of a run"
    raise ConfigError(f"{folder} has no {METADATA}, so it is not a (finished) checkpoint; {hint}")


def _step_number(step: Path) -> int:
    number = step.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Every file has the length that the metadata says, so that a cut one is found before anything is read."""
    ends: dict[str, int] = {}
    for item in metadata.storage_data.values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if folder.resolve() not in file.resolve().parents:
            raise ConfigError(f"{folder / METADATA} points to {name}, outside the checkpoint; use another step")
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            state = "is missing" if size is None else f"has {size} bytes of at least {end}"
            raise ConfigError(f"{file} {state}: the checkpoint is damaged; use another step")


def first_line(error: BaseException) -> str:
    """What an exception says, or the first that DCP's exception over all ranks says."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
