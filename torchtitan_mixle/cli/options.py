"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class ModelOptions:
    """What a checkpoint's weights do not say."""

    config: Path | None = None
    """The run's TOML file; unset: what the run left in its dump folder."""
    n_head: int | None = None
    """Heads of the model, where neither is there."""
    mup_attention: Flag = False
    """The model scales its scores by 1/head_dim, where neither is there."""


# --config, not --model.config.
AboutModel = Annotated[ModelOptions, tyro.conf.OmitArgPrefixes]
NOTHING_SAID = ModelOptions()
