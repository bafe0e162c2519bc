"""What a checkpoint's tensors do not say: the number of heads, the muP flag, the tokenizer.

A run writes it into its dump folder as `mixle_model.json`, an import into the checkpoint that it makes.
"""

import json
import reprlib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from torchtitan_mixle.config_file import read_config
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import FLAVORS, SIZES
from torchtitan_mixle.metrics.counting import ModelShape, count_parameters
from torchtitan_mixle.whole_file import write_whole

FILE = "mixle_model.json"
FORMAT = "torchtitan-mixle model"
VERSION = 1
_LEVELS = 4  # from OUT/checkpoint/step-N up to OUT, and two more for a checkpoint.folder of several parts


@dataclass(frozen=True)
class RunData:
    """Where a run's text came from, in the words of its TOML."""

    dataset: str | None = None
    dataset_path: str | None = None
    validation_dataset: str | None = None
    validation_path: str | None = None
    seq_len: int | None = None
    """Of the validation, or else of the training."""
    hf_assets_path: str | None = None
    tokenizer: str | None = None
    """Hash of the tokenizer.json that the run's tokens are of, or "bytes"."""


@dataclass(frozen=True)
class ModelRecord:
    """Size and flags of a model (a `ModelShape`), and the data of the run behind it."""

    vocab_size: int
    d_model: int
    n_layer: int
    n_head: int
    block: int
    mup_attention: bool = False
    activation: str = "gelu"
    """The activation that the weights were first trained with: "gelu", or "gelu_new" for most imported GPT-2s."""
    data: RunData = field(default_factory=RunData)
    origin: str = ""
    """Where this was read, for messages."""

    @classmethod
    def of(cls, shape: ModelShape, **others: Any) -> "ModelRecord":
        return cls(**{name: getattr(shape, name) for name in SIZES}, **others)

    def describe(self) -> str:
        """The size in words, for the end of a command."""
        return (
            f"a CausalLM of {count_parameters(self):,} parameters (V={self.vocab_size}, d_model={self.d_model}, "
            f"n_layer={self.n_layer}, n_head={self.n_head}, block={self.block})"
        )

    def flags(self) -> list[str]:
        """What makes the model of any job's config this one, on TorchTitan's command line."""
        sizes = [word for name in SIZES for word in (f"--mixle.{name}", str(getattr(self, name)))]
        return [*sizes, "--mixle.mup_attention" if self.mup_attention else "--mixle.no-mup_attention"]

    def require_same(self, other: ModelShape, *, what: str) -> None:
        """Raise ConfigError unless `other`, the model in `what`, has this record's size."""
        for name in SIZES:
            there, here = getattr(other, name), getattr(self, name)
            if there != here:
                raise ConfigError(
                    f"{what} has {name}={there}, and the model of {self.origin} {name}={here}; "
                    f"set [mixle] {name}={there}"
                )

    def require_same_use(self, other: "ModelRecord") -> None:
        """Raise ConfigError unless both use the same weights in the same way, which weights do not show."""
        for name in ("n_head", "mup_attention"):
            there, here = getattr(other, name), getattr(self, name)
            if there != here:
                raise ConfigError(
                    f"{self.origin} says {name}={here}, and {other.origin} {name}={there}; make them agree"
                )

    def write(self, folder: Path) -> None:
        """Leave the record in a folder, whole or not at all."""
        table = {"format": FORMAT, "version": VERSION} | asdict(self)
        del table["origin"]
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(table, indent=1) + "\n")


def find_record(checkpoint: Path) -> ModelRecord | None:
    """The record in the checkpoint's folder or in the nearest folder above it that has one."""
    folder = checkpoint.expanduser().resolve()
    for place in [folder, *folder.parents][: _LEVELS + 1]:
        if (place / FILE).is_file():
            return read_record(place / FILE)
    return None


def record_for(
    checkpoint: Path, *, config: Path | None = None, n_head: int | None = None, mup_attention: bool = False
) -> ModelRecord | None:
    """The record of a checkpoint's model: of `config` if given, else the one beside it; None if neither is there.

    Raises ConfigError if `config`, `n_head` or `mup_attention` contradicts what else is known of the model: a wrong
    number of heads or scale fits the weights as well, and makes another model of them.
    """
    record = find_record(checkpoint) if config is None else _undisputed(record_of_config(config), checkpoint)
    if record is None:
        return None
    if n_head not in (None, record.n_head):
        raise ConfigError(f"--n-head {n_head}: {record.origin} says n_head={record.n_head}; leave it out")
    if mup_attention and not record.mup_attention:
        raise ConfigError(f"--mup-attention: {record.origin} says mup_attention=false; leave it out")
    return record


def _undisputed(record: ModelRecord, checkpoint: Path) -> ModelRecord:
    """A config's record, unless a readable one beside the checkpoint differs in what the weights do not show."""
    try:
        beside = find_record(checkpoint)
    except ConfigError:  # the reason for giving a config
        return record
    if beside is not None:
        record.require_same_use(beside)
        return replace(record, activation=beside.activation)
    return record


def read_record(file: Path) -> ModelRecord:
    """A record as `write` left it. Raises ConfigError for anything else."""
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); give --config instead") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT or table.get("version") != VERSION:
        raise ConfigError(f"{file} is not a record of this release ({FORMAT!r}, version {VERSION}); give --config")
    data = table.get("data")
    record = _fill(ModelRecord, table, file)
    return replace(record, data=_fill(RunData, data if isinstance(data, dict) else {}, file), origin=str(file))


def _fill(cls: type, table: dict[str, Any], file: Path) -> Any:
    """An instance from the table's keys of the right type."""
    values = {}
    for f in fields(cls):
        if f.name in ("data", "origin") or f.name not in table:
            continue
        value, kinds = table[f.name], get_args(f.type) or (f.type,)
        if type(value) not in kinds:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"{file}: {f.name} = {reprlib.repr(value)} must be of type {names}; give --config")
        values[f.name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{file} is not whole ({error}); give --config instead") from None


def record_of_config(config: Path) -> ModelRecord:
    """The record that a run of this TOML would leave (command-line overrides are not in it)."""
    table = read_config(config)
    name = table.get("model", {}).get("flavor")
    if name not in FLAVORS:
        raise ConfigError(f"{config}: model.flavor={name!r} is unknown; use one of {', '.join(FLAVORS)}")
    mixle = table.get("mixle", {})
    sizes = {key: mixle[key] for key in SIZES if key in mixle}
    if bad := [f"[mixle] {key}={value!r}" for key, value in sizes.items() if type(value) is not int or value < 1]:
        raise ConfigError(f"{config}: {bad[0]} must be a whole number of at least 1")
    training, validation = table.get("training", {}), table.get("validation", {})
    validated = validation if validation.get("enable") else {}
    data = RunData(
        dataset=training.get("dataset"),
        dataset_path=training.get("dataset_path"),
        validation_dataset=validated.get("dataset"),
        validation_path=validated.get("dataset_path"),
        seq_len=validated.get("seq_len", training.get("seq_len")),
        hf_assets_path=table.get("model", {}).get("hf_assets_path"),
    )
    record = ModelRecord.of(FLAVORS[name], mup_attention=bool(mixle.get("mup_attention")), data=data)
    return replace(record, **sizes, origin=str(config))


def record_of_job(job_config: Any, args: Any, tokenizer: str | None) -> ModelRecord:
    """The record of a run; paths are made absolute, since the tools are started elsewhere."""
    training, validation = job_config.training, job_config.validation
    data = RunData(
        dataset=training.dataset,
        dataset_path=_absolute(training.dataset_path),
        validation_dataset=validation.dataset if validation.enable else None,
        validation_path=_absolute(validation.dataset_path) if validation.enable else None,
        seq_len=validation.seq_len if validation.enable else training.seq_len,
        hf_assets_path=_absolute(job_config.model.hf_assets_path),
        tokenizer=tokenizer,
    )
    return ModelRecord.of(args, mup_attention=args.mup_attention, data=data)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())
