"""`torchtitan-mixle report`: tables and pictures of sweeps and runs."""

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from torchtitan_mixle.errors import ConfigError


def report(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], /, out: Path | None = None) -> None:
    """Compare sweeps and single runs: a table here, and report.csv, report.md and pictures in a folder.

    Args:
        folders: Folders of sweeps, and dump folders of runs.
        out: Where to write; unset: "report" in the first folder.
    """
    from torchtitan_mixle.report.report import write_report

    if not folders:
        raise ConfigError("there is nothing to report on; name folders of sweeps or of runs")
    write_report(list(folders), out or folders[0] / "report", Console())
