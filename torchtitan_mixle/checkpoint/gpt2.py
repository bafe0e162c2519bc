"""GPT-2 folders of Hugging Face `transformers`: config.json and safetensors."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan_mixle.checkpoint.record import ModelRecord
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import Flavor
from torchtitan_mixle.model.weights import GPT2_PREFIX, check_shapes, gpt2_shapes

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
HEAD = "lm_head.weight"
FILE_BYTES = 5 * 2**30
"""Size that one safetensors file is filled up to, and so what an export holds in memory."""
EXACT_GELU = ("gelu", "gelu_python")
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh")
_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks that old releases stored beside the weights."""
_SIZES = {"vocab_size": "vocab_size", "n_embd": "d_model", "n_layer": "n_layer", "n_head": "n_head"}
_SIZES["n_positions"] = "block"
_DEFAULTS: dict[str, Any] = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None}
_REQUIRED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Settings that change the function in a way that this model has not; the values are GPT-2's defaults."""


class GPT2Folder:
    """A GPT-2 whose config and tensors have been checked against each other. Tensors are read one at a time."""

    def __init__(self, folder: Path, record: ModelRecord, files: dict[str, Path], prefix: str) -> None:
        self.folder = folder
        self.record = record
        self.prefix = prefix
        """What the names of the weights begin with: "transformer." or nothing."""
        self._files = files

    @classmethod
    def open(cls, path: str | Path) -> "GPT2Folder":
        """Raises ConfigError for what is not a GPT-2 that this model can compute, and for cut or missing files."""
        folder = Path(path).expanduser()
        record = _read_config(folder)
        files, shapes = _read_headers(folder)
        prefix = GPT2_PREFIX if any(name.startswith(GPT2_PREFIX) for name in shapes) else ""
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        head = bare.pop(HEAD, None)
        check_shapes(
            {name: shape for name, shape in bare.items() if not _MASKS.fullmatch(name)},
            gpt2_shapes(record),
            where=str(folder),
            remedy=f"it does not hold the GPT-2 that its {CONFIG} describes",
        )
        result = cls(folder, record, files, prefix)
        if head is not None:
            result._check_tie()
        return result

    def read(self, name: str) -> Tensor:
        """One tensor by its name without "transformer."."""
        return self._read(name if name == HEAD else self.prefix + name)

    def _read(self, key: str) -> Tensor:
        try:
            with safe_open(self._files[key], framework="pt") as file:
                return file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{key} cannot be read from {self._files[key]} ({error}); copy the file again") from None

    def _check_tie(self) -> None:
        if not torch.equal(self.read("wte.weight"), self.read(HEAD)):
            raise ConfigError(
                f"{self.folder}: {HEAD} is not {self.prefix}wte.weight, but this model's head is tied to its embedding"
            )


def file_numbers(sizes: Mapping[str, int], file_bytes: int) -> dict[str, int]:
    """Which file, from 1, each tensor of so many bytes goes to: each is filled up, in order, to `file_bytes`."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def warn_of_activation(activation: str) -> str | None:
    """What to say about weights that were trained with that activation, if it is not the one computed here."""
    if activation in EXACT_GELU:
        return None
    return (
        f"the weights were trained with {activation}, the tanh approximation of GELU, and this model computes exact "
        f"GELU: logits differ slightly (about 1e-3 a block) from those of `transformers`"
    )


def config_json(record: ModelRecord, dtype: torch.dtype, eos_id: int | None) -> str:
    """The config.json with which `transformers` computes what this model computes."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",
        "layer_norm_epsilon": _DEFAULTS["layer_norm_epsilon"],
        **{theirs: getattr(record, ours) for theirs, ours in _SIZES.items()},
        **_REQUIRED,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _read_config(folder: Path) -> ModelRecord:
    file = folder / CONFIG
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of a GPT-2 with its {CONFIG} and safetensors")
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); a GPT-2 folder needs one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); copy the folder again") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "gpt2":
        raise ConfigError(f"{file} is of a model of the type {kind!r}; only 'gpt2' has this model's architecture")
    config = _DEFAULTS | _REQUIRED | config
    sizes = {}
    for theirs, ours in _SIZES.items():
        value = config.get(theirs)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{file}: {theirs} = {value!r} must be a whole number of at least 1")
        sizes[ours] = value
    _check_settings(config, file)
    if sizes["d_model"] % sizes["n_head"]:
        raise ConfigError(f"{file}: n_head = {sizes['n_head']} does not divide n_embd = {sizes['d_model']}")
    return ModelRecord.of(Flavor(**sizes), activation=config["activation_function"], origin=str(file))


def _check_settings(config: dict[str, Any], file: Path) -> None:
    """Raise ConfigError for settings under which GPT-2 is another function than this model."""
    required = _REQUIRED | {"layer_norm_epsilon": _DEFAULTS["layer_norm_epsilon"]}
    for key, value in required.items():
        if config[key] != value:
            raise ConfigError(f"{file}: {key} = {config[key]!r}, but this model computes with {value!r}")
    if config["n_inner"] not in (None, 4 * config["n_embd"]):
        raise ConfigError(f"{file}: n_inner = {config['n_inner']!r}, but this model's MLP has 4 * n_embd hidden units")
    if config["activation_function"] not in EXACT_GELU + TANH_GELU:
        raise ConfigError(f"{file}: activation_function = {config['activation_function']!r}, but this model has GELU")


def _read_headers(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """(file, shape) of every tensor, from the beginnings of the files."""
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    if key in files:
                        raise ConfigError(f"{key} is in {files[key]} and in {file}; keep one set of files in {folder}")
                    files[key], shapes[key] = file, tuple(opened.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a whole safetensors file ({error}); copy it again") from None
    return files, shapes


def _weight_files(folder: Path) -> list[Path]:
    """All safetensors of the folder, as DCP's reader takes them; those that the index names must be there."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    index = folder / INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not an index of safetensors ({error!r}); copy the folder again") from None
        if missing := sorted(named - {file.name for file in files}):
            raise ConfigError(f"{folder} lacks {missing[0]}, which its {INDEX} names; copy the folder again")
    if not files:
        other = next((name for name in ("pytorch_model.bin", "tf_model.h5") if (folder / name).exists()), None)
        hint = f" ({other} is not read; save the model as safetensors)" if other else ""
        raise ConfigError(f"{folder} holds no *{SUFFIX} file{hint}")
    return files
