"""`torchtitan-mixle`, also `python -m torchtitan_mixle`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from torchtitan_mixle.cli.parity import parity
from torchtitan_mixle.cli.prepare import prepare
from torchtitan_mixle.errors import ConfigError

COMMANDS: dict[str, Callable[..., Any]] = {"parity": parity, "prepare": prepare}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, or 2 on a user's mistake (one line on stderr) and 130 on Ctrl-C."""
    try:
        code: int | None = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="torchtitan-mixle", description="Tools around training a mixle CausalLM.", args=argv
        )
    except ConfigError as error:
        print(f"torchtitan-mixle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torchtitan-mixle: interrupted", file=sys.stderr)
        return 130
    return code or 0
