"""What a run came to: median, 10th and 90th percentile of its steady reports."""

from collections.abc import Mapping

import numpy as np

_KEYS = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "step_seconds",
    "tflops_per_device",
    "mfu_pct",
    "mfu_causal_pct",
    "hfu_pct",
    "data_loading_pct",
)
Spread = dict[str, float]


class Summary:
    """Collects reports' rates; the first step's, which compiles and warms up, are not given to it."""

    def __init__(self) -> None:
        self._reports: list[dict[str, float]] = []
        self.steps = 0

    def add(self, rates: Mapping[str, float], steps: int) -> None:
        """One report over `steps` steps."""
        self._reports.append({key: rates[key] for key in _KEYS if key in rates})
        self.steps += steps

    def spreads(self) -> dict[str, Spread]:
        """{"median", "p10", "p90"} by figure, over the reports; empty without any."""
        if not self._reports:
            return {}
        table = {key: [report[key] for report in self._reports] for key in self._reports[0]}
        return {key: _spread(values) for key, values in table.items()}

    def line(self) -> str | None:
        """For the console; None without a steady report."""
        spreads = self.spreads()
        if not spreads:
            return None
        shown = [
            _shown("tokens/s", spreads["tokens_per_second"], ",.0f"),
            _shown("per device", spreads["tokens_per_second_per_device"], ",.0f"),
            _shown("s/step", spreads["step_seconds"], ".4g"),
            _shown("TFLOP/s", spreads["tflops_per_device"], ",.4g"),
        ]
        names = {"mfu_pct": "MFU %", "mfu_causal_pct": "causal MFU %", "hfu_pct": "HFU %"}
        shown += [_shown(name, spreads[key], ".2f") for key, name in names.items() if key in spreads]
        return f"Summary of {self.steps} steady steps, median (p10 to p90): {'; '.join(shown)}"


def _spread(values: list[float]) -> Spread:
    low, median, high = (float(x) for x in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": low, "p90": high}


def _shown(name: str, spread: Spread, form: str) -> str:
    return f"{name} {spread['median']:{form}} ({spread['p10']:{form}} to {spread['p90']:{form}})"
