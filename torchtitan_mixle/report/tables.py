"""The table of a report: on the terminal, as CSV and as Markdown."""

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchtitan_mixle.sweep import status as states

_COLORS = {states.DONE: "green", states.REFUSED: "yellow", states.PENDING: "dim", states.INTERRUPTED: "yellow"}
# Heading, key, form of the number.
_FIGURES = (
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("p10 to p90", "tokens_per_second", "spread"),
    ("MFU %", "mfu_pct", ".2f"),
    ("TFLOP/s each", "tflops_per_device", ",.4g"),
    ("s/step", "step_seconds", ".4g"),
    ("data %", "data_loading_pct", ".1f"),
    ("bubble %", "bubble_pct", ".1f"),
    ("GiB", "memory_gib", ".2f"),
)


def cells(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headings and text of every row; a column that is empty everywhere is left out."""
    figures = [figure for figure in _FIGURES if rows[figure[1]].notna().any()]
    texts = []
    for row in rows.to_dict("records"):
        status = str(row["status"]).replace("_", " ")
        if row["runs"] > 1:
            status += f" ({row['runs_done']} of {row['runs']})"
        head = [row["name"], _whole(row["processes"]), status]
        texts.append(head + [_figure(row, key, form) for _, key, form in figures])
    return ["point", "processes", "status", *(heading for heading, _, _ in figures)], texts


def print_table(rows: pd.DataFrame, console: Console, title: str) -> None:
    """The table, and under it the reason of every point that has one."""
    headings, texts = cells(rows)
    table = Table(title=escape(title), title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i in (0, 2) else "right", overflow="fold")
    for row, state in zip(texts, rows["status"], strict=True):
        color = _COLORS.get(state, "red")
        table.add_row(escape(row[0]), row[1], f"[{color}]{row[2]}", *row[3:])
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file or a pipe has no width of its own
    console.print(table)
    for name, state, reason in rows[["name", "status", "reason"]].itertuples(index=False):
        if isinstance(reason, str):
            console.print(f"{name}: {state.replace('_', ' ')}: {reason}", markup=False, highlight=False, soft_wrap=True)


def write_tables(rows: pd.DataFrame, out: Path, title: str) -> list[Path]:
    """report.csv with every figure, report.md with those of the terminal."""
    paths = [out / "report.csv", out / "report.md"]
    rows.to_csv(paths[0], index=False)
    headings, texts = cells(rows)
    lines = [f"# {title}", "", _line(headings), _line(["---"] * len(headings)), *map(_line, texts)]
    reasons = rows[rows["reason"].notna()]
    if len(reasons):
        lines += ["", *(f"- {_plain(n)}: {_plain(r)}" for n, r in zip(reasons["name"], reasons["reason"], strict=True))]
    paths[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def _line(words: list[str]) -> str:
    return "| " + " | ".join(map(_plain, words)) + " |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _whole(value: Any) -> str:
    return "" if pd.isna(value) else f"{int(value)}"


def _figure(row: dict[Any, Any], key: str, form: str) -> str:
    if pd.isna(row[key]):
        return ""
    if form == "spread":
        return f"{row[f'{key}_p10']:,.0f} to {row[f'{key}_p90']:,.0f}"
    return f"{row[key]:{form}}"
