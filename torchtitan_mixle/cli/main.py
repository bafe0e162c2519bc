"""`torchtitan-mixle`, also `python -m torchtitan_mixle`."""

import sys
from collections.abc import Sequence

import tyro

from torchtitan_mixle.cli.prepare import prepare
from torchtitan_mixle.errors import ConfigError

COMMANDS = {"prepare": prepare}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on a user's mistake (one line on stderr), 130 on Ctrl-C."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="torchtitan-mixle", description="Tools around training a mixle CausalLM.", args=argv
        )
    except ConfigError as error:
        print(f"torchtitan-mixle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torchtitan-mixle: interrupted", file=sys.stderr)
        return 130
    return 0
