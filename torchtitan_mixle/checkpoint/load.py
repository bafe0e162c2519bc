"""A trained model in one process, from a checkpoint of any layout."""

from pathlib import Path

import torch

from torchtitan_mixle.checkpoint.reader import Weights
from torchtitan_mixle.checkpoint.record import FILE, ModelRecord, record_for
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.model import CausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_checkpoint(
    checkpoint: Path, *, config: Path | None = None, n_head: int | None = None, mup_attention: bool = False
) -> tuple[Weights, ModelRecord]:
    """The weights in a step-N folder and the model that they are of, checked against each other.

    The number of heads cannot be seen in the weights: it comes from `config`, from the record that the run left, or
    from `n_head`. Raises ConfigError.
    """
    weights = Weights.open(checkpoint)
    record = record_for(checkpoint, config=config, n_head=n_head, mup_attention=mup_attention)
    if record is None:
        if n_head is None:
            raise ConfigError(
                f"there is no {FILE} in {checkpoint} or above it, and the weights do not show the number of heads; "
                f"give --config with the run's TOML, or --n-head"
            )
        record = ModelRecord.of(weights.flavor(n_head), mup_attention=mup_attention, origin=f"--n-head {n_head}")
    if record.n_head < 1 or record.d_model % record.n_head:
        raise ConfigError(f"n_head={record.n_head} does not divide d_model={record.d_model} ({record.origin})")
    weights.check(record)
    return weights, record


def load_model(weights: Weights, record: ModelRecord, *, device: str | None, dtype: str) -> CausalLM:
    """The model with its weights, in evaluation mode; a weight is read straight to its place on the device."""
    weights.check_tie()
    target = _device(device)
    args = CausalLMArgs(
        vocab_size=record.vocab_size,
        d_model=record.d_model,
        n_layer=record.n_layer,
        n_head=record.n_head,
        block=record.block,
        mup_attention=record.mup_attention,
    )
    with torch.device("meta"):
        model = CausalLM(args)
    model.to(DTYPES[dtype]).to_empty(device=target)
    model.tie_weights()
    model.mup_output_multiplier = torch.ones((), device=target)  # one number, which stays exact
    state = model.state_dict()
    del state["head.weight"]
    weights.read_into(state)
    return model.eval()


def _device(name: str | None) -> torch.device:
    """The device of that name; unset: the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is not a device; use cpu or cuda") from None
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise ConfigError(f"--device {name}: there is none on this machine; use {accelerator or 'cpu'}")
    return device
