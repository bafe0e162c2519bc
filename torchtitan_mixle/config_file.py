"""Reading a job's TOML without TorchTitan, for commands that start no run."""

import tomllib
from pathlib import Path
from typing import Any

from torchtitan_mixle.errors import ConfigError


def read_config(config: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {config}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {config} is not TOML: {error}") from None
