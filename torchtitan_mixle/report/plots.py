"""The pictures of a report, readable without the code that made them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from torchtitan_mixle.report.records import Run

# Okabe and Ito's colors, which people who do not tell red from green see apart.
_BLUE, _ORANGE, _GREY, _DARK = "#0072B2", "#E69F00", "#BBBBBB", "#444444"
_ROW_INCHES = 0.3
_WIDTH_INCHES = 11.0
_DPI = 110


def draw_plots(rows: pd.DataFrame, runs: Sequence[Run], out: Path, title: str) -> list[Path]:
    """The pictures that the records allow; their paths."""
    paths = []
    if rows["tokens_per_second"].notna().any():
        paths.append(_throughput(rows, out / "throughput.png", title))
        paths.append(_step_time(rows, out / "step_time.png", title))
    if curves := [(run.name, curve) for run in runs if len(curve := curve_of(run)) > 1]:
        paths.append(_loss(curves, out / "loss.png", title))
    return paths


def _throughput(rows: pd.DataFrame, path: Path, title: str) -> Path:
    """Bars, the best on top: MFU (or the rate of one device) and tokens/s, and at the end what has no figure."""
    rows = rows.sort_values("tokens_per_second", ascending=False, na_position="last", kind="stable")
    has_mfu = rows["mfu_pct"].notna().any()
    first = ("mfu_pct", "MFU (%), attention in full", "{x:.1f}")
    if not has_mfu:
        first = ("tflops_per_device", "TFLOP/s a device (its peak is not known: no MFU)", "{x:.3g}")
    panels = (first, ("tokens_per_second", "tokens/s, all devices", "{x:,.0f}"))
    figure, axes = _rows_of_bars(rows, len(panels))
    for ax, (key, label, form), color in zip(axes, panels, (_BLUE, _ORANGE), strict=True):
        _bars(ax, rows, key, form, color)
        ax.set_xlabel(label)
    note = "bars: median of the steady steps; lines: 10th to 90th percentile"
    return _save(figure, path, f"{title}: throughput", note)


def _bars(ax: Axes, rows: pd.DataFrame, key: str, form: str, color: str) -> None:
    values = rows[key].to_numpy(dtype=float)
    places = np.arange(len(rows))
    low, high = (rows[f"{key}_{mark}"].to_numpy(dtype=float) for mark in ("p10", "p90"))
    drawn = ~np.isnan(values)
    spread = [np.maximum(values - low, 0)[drawn], np.maximum(high - values, 0)[drawn]]
    ax.barh(places[drawn], values[drawn], height=0.7, color=color, xerr=spread, ecolor=_DARK, capsize=2)
    widest = np.nanmax(np.fmax(values, high)) if drawn.any() else 1.0
    ax.set_xlim(0, (widest or 1.0) * 1.22)  # room for the numbers
    for place, value, end, state in zip(places.tolist(), values, high, rows["status"], strict=True):
        if math.isnan(value):
            ax.text(0.01 * widest, place, state.replace("_", " "), va="center", fontsize=8, color=_DARK, style="italic")
        else:
            ax.text(max(value, end) + 0.015 * widest, place, form.format(x=value), va="center", fontsize=8)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}") if widest < 1e4 else EngFormatter(sep=""))
    ax.tick_params(axis="x", labelsize=8)
    ax.locator_params(axis="x", nbins=6)


def _step_time(rows: pd.DataFrame, path: Path, title: str) -> Path:
    """Stacked bars, the shortest step on top; what the records do not tell apart stays together."""
    rows = rows[rows["step_seconds"].notna()].sort_values("step_seconds", kind="stable")
    seconds = rows["step_seconds"].to_numpy(dtype=float)
    data = seconds * rows["data_loading_pct"].fillna(0).to_numpy(dtype=float) / 100
    bubble = (seconds - data) * rows["bubble_pct"].fillna(0).to_numpy(dtype=float) / 100
    figure, (ax,) = _rows_of_bars(rows, 1)
    left = np.zeros(len(rows))
    parts = (
        ("computation and communication", seconds - data - bubble, _BLUE),
        ("pipeline bubble, by the schedule", bubble, _GREY),
        ("waiting for data", data, _ORANGE),
    )
    for label, length, color in parts:
        if length.max() > 0:
            ax.barh(np.arange(len(rows)), length, left=left, height=0.7, color=color, label=label)
        left += length
    for place, value in enumerate(seconds):
        ax.text(value + 0.01 * seconds.max(), place, f"{value:.3g} s", va="center", fontsize=8)
    ax.set_xlim(0, seconds.max() * 1.12)
    ax.set_xlabel("seconds a step (median)")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return _save(figure, path, f"{title}: where a step's time goes", "")


Curve = list[tuple[float, float, float]]
"""Tokens, seconds by the clock and loss, report by report."""


def curve_of(run: Run) -> Curve:
    """Of the first of the run's repeats that has a loss; a report without tokens or loss has no point.

    The clock starts where the first report's steps do; it is NaN in records that do not have it.
    """
    for records in run.records:
        curve: Curve = []
        began = math.nan
        for record in records:
            tokens, loss, now = record.get("tokens_seen"), record.get("loss"), record.get("time", math.nan)
            if math.isnan(began):
                began = now - (record.get("step_seconds") or 0.0) * (record.get("steps") or 1)
            if tokens is not None and loss is not None:
                curve.append((tokens, now - began, loss))
        if curve:
            return curve
    return []


def _loss(curves: Sequence[tuple[str, Curve]], path: Path, title: str) -> Path:
    """Loss against tokens, and against the time that passed."""
    figure = Figure(figsize=(_WIDTH_INCHES, max(4.5, 1.5 + 0.17 * len(curves))), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for i, (name, curve) in enumerate(curves):
        look: dict[str, Any] = {"color": _color(i, len(curves)), "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}
        tokens, seconds, loss = zip(*curve, strict=True)
        axes[0].plot(tokens, loss, label=_short(name), linewidth=1.4, **look)
        axes[1].plot(seconds, loss, linewidth=1.4, **look)
    axes[0].set_xlabel("tokens")
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_ylabel("training loss (nats a token)")
    axes[1].set_xlabel("wall time (s) from the first step on, pauses between starts included")
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return _save(figure, path, f"{title}: loss", "")


def _color(i: int, n: int) -> Any:
    return colormaps["tab10"](i % 10) if n <= 40 else colormaps["viridis"](i / n)


def _rows_of_bars(rows: pd.DataFrame, panels: int) -> tuple[Figure, list[Axes]]:
    """Panels side by side with a row for each name, from the top down."""
    height = 1.9 + _ROW_INCHES * len(rows)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, panels, sharey=True)))
    axes[0].set_yticks(np.arange(len(rows)), list(map(_short, rows["name"])), fontsize=9)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    for ax in axes:
        ax.grid(axis="x", alpha=0.3)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _short(name: str) -> str:
    """The name on one line of a picture, and as text: matplotlib takes what is between two $ for a formula."""
    name = name.replace("$", r"\$")
    return name if len(name) <= 60 else f"{name[:40]}...{name[-17:]}"


def _save(figure: Figure, path: Path, title: str, note: str) -> Path:
    figure.suptitle(title.replace("$", r"\$"), fontsize=12, x=0.01, ha="left")
    if note:
        figure.supxlabel(note, fontsize=8, color=_DARK)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=_DPI)
    return path
