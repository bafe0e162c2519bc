"""A report: the table on the terminal and in files, and the pictures."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.report.records import read_runs, table_of
from torchtitan_mixle.report.tables import print_table, write_tables


def write_report(folders: Sequence[Path], out: Path, console: Console) -> pd.DataFrame:
    """Print the table of the folders' points and runs, write it and the pictures to `out`; its rows."""
    runs = read_runs(folders)
    rows = table_of(runs)
    devices = sorted(set(rows["device"].dropna()))
    title = " and ".join(folder.resolve().name for folder in folders[:3]) + (" and more" if len(folders) > 3 else "")
    if devices:
        title += f", on {', '.join(devices)}"
    print_table(rows, console, title)
    from torchtitan_mixle.report.plots import draw_plots

    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = [*write_tables(rows, out, title), *draw_plots(rows, runs, out, title)]
    except OSError as error:
        raise ConfigError(f"cannot write to the folder {out}: {error.strerror}; give another one as --out") from None
    console.print(
        f"wrote {', '.join(path.name for path in paths)} to {out}", highlight=False, markup=False, soft_wrap=True
    )
    return rows
