"""`torchtitan-mixle`, also `python -m torchtitan_mixle`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from torchtitan_mixle.cli.convert import export, import_
from torchtitan_mixle.cli.generate import generate
from torchtitan_mixle.cli.parity import parity
from torchtitan_mixle.cli.prepare import prepare
from torchtitan_mixle.cli.report import report
from torchtitan_mixle.cli.score import score
from torchtitan_mixle.cli.sweep import sweep, sweep_point
from torchtitan_mixle.errors import ConfigError

COMMANDS: dict[str, Callable[..., Any]] = {
    "export": export,
    "generate": generate,
    "import": import_,
    "parity": parity,
    "prepare": prepare,
    "report": report,
    "score": score,
    "sweep": sweep,
    "sweep-point": sweep_point,
}


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
