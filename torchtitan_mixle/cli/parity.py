"""`torchtitan-mixle parity`: is every layout the same run on this machine?"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from torchtitan_mixle.config_file import read_config
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.failures import first_error, last_lines
from torchtitan_mixle.planning.layouts import Layout, parse_layout

# Relative tolerances of (loss and norm at step 1, loss at later steps) by the dtype that the job computes in.
_TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 2e-2)}
_GRACE_S = 40  # torchrun kills workers that do not end within 30 s
_DEFAULTS: dict[str, Any] = {
    "local_batch_size": 8,
    "global_batch_size": -1,
    "mixed_precision_param": "bfloat16",
}  # TorchTitan's


@dataclass(frozen=True)
class Result:
    """What a layout's run logged, or why it did not."""

    layout: Layout
    loss: list[float]
    grad_norm: list[float]
    failure: str | None = None


@dataclass(frozen=True)
class Verdict:
    differences: list[float]
    """Largest relative difference to the reference at each step, of loss and gradient norm."""
    passed: bool


def parity(
    config: Annotated[Path, tyro.conf.Positional],
    /,
    layouts: str = "fsdp2,tp2",
    reference: str = "1",
    steps: int = 5,
    tolerance: float | None = None,
    later_tolerance: float | None = None,
    override: tuple[str, ...] = (),
    timeout: float = 600.0,
) -> int:
    """Run layouts from the same weights on the same data and compare them; exit code 1 if one differs.

    Every layout is a short training run of CONFIG through torchrun on this machine, with the same global batch. The
    gradient norm is the one before clipping.

    Args:
        config: TOML file of the job.
        layouts: Comma-separated: fsdpN, ddpN, hsdpRxS, tpN, ppN, cpN, and products of them like fsdp2xtp2.
        reference: The layout that the others are compared with.
        steps: Optimizer steps of each run.
        tolerance: Largest relative difference of loss and gradient norm at the first step; unset: 1e-5 for a job that
            computes in float32, 1e-2 in bfloat16.
        later_tolerance: Largest relative difference of the loss at later steps; unset: 1e-4, or 2e-2 in bfloat16.
        override: More TOML keys, as section.key=value.
        timeout: Seconds that one run may take.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps}: must be at least 1")
    training = _training_section(config, override)
    first, later = _TOLERANCES[training["mixed_precision_param"]]
    bars = (first if tolerance is None else tolerance, later if later_tolerance is None else later_tolerance)
    wanted = [parse_layout(name.strip()) for name in [reference, *layouts.split(",")]]
    global_batch = _global_batch(training, wanted)
    console = Console()
    results = []
    for layout in wanted:
        with console.status(f"running {layout.name} on {layout.world_size} processes"):
            results.append(_run(layout, config, steps, global_batch, training["local_batch_size"], override, timeout))
    verdicts = [judge(result, results[0], *bars) for result in results]
    console.print(_table(results, verdicts, steps, global_batch, bars))
    for result in results:
        if result.failure:
            console.print(f"{result.layout.name}: {result.failure}", soft_wrap=True, markup=False)
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def judge(result: Result, reference: Result, tolerance: float, later_tolerance: float) -> Verdict:
    """Compare a run with the reference run; a run that failed or logged something not finite does not pass."""
    if result.failure or reference.failure:
        return Verdict([], passed=False)  # with nothing to compare with, nothing is the same
    losses = _relative(result.loss, reference.loss)
    norms = _relative(result.grad_norm, reference.grad_norm)
    passed = max(losses[0], norms[0]) <= tolerance and all(d <= later_tolerance for d in losses[1:])
    return Verdict([max(pair) for pair in zip(losses, norms, strict=True)], passed)


def _relative(values: Iterable[float], reference: Iterable[float]) -> list[float]:
    """|a - b| / |b|, infinite where that is not a number."""
    pairs = zip(values, reference, strict=True)
    return [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) and b else math.inf for a, b in pairs]


def _training_section(config: Path, override: tuple[str, ...]) -> dict[str, Any]:
    training: dict[str, Any] = _DEFAULTS | read_config(config).get("training", {})
    for assignment in override:
        key, equals, value = assignment.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"--override {assignment!r} must be section.key=value")
        name = key.removeprefix("training.")
        if name in _DEFAULTS:
            training[name] = value if name == "mixed_precision_param" else _whole(key, value)
    if training["mixed_precision_param"] not in _TOLERANCES:
        raise ConfigError(f"training.mixed_precision_param must be one of {', '.join(_TOLERANCES)}")
    if training["local_batch_size"] < 1:
        raise ConfigError(f"training.local_batch_size={training['local_batch_size']}: must be at least 1")
    return training


def _whole(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--override {key}={value}: must be a whole number") from None


def _global_batch(training: dict[str, Any], layouts: list[Layout]) -> int:
    """The config's, or else one local batch on each rank of the layout with the most data-parallel ranks."""
    degrees = [layout.data_parallel_degree for layout in layouts]
    batch: int = training["global_batch_size"]
    if batch < 0:
        batch = math.lcm(training["local_batch_size"], *degrees)
    for layout in layouts:
        if batch % layout.data_parallel_degree:
            raise ConfigError(
                f"layout {layout.name!r} has {layout.data_parallel_degree} data-parallel ranks, which cannot share "
                f"training.global_batch_size={batch}; use a multiple of {math.lcm(*degrees)} "
                f"(--override training.global_batch_size={math.lcm(*degrees)})"
            )
    return batch


def _run(
    layout: Layout,
    config: Path,
    steps: int,
    global_batch: int,
    local_batch: int,
    override: tuple[str, ...],
    timeout: float,
) -> Result:
    share = global_batch // layout.data_parallel_degree
    local = max(n for n in range(1, min(share, local_batch) + 1) if share % n == 0)
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = dict(assignment.split("=", 1) for assignment in override)
        values |= {
            "training.steps": steps,
            "training.global_batch_size": global_batch,
            "training.local_batch_size": local,
            "metrics.log_freq": 1,
            "metrics.enable_tensorboard": False,
            "checkpoint.enable": False,
            "validation.enable": False,
            "job.dump_folder": folder,
            **{f"parallelism.{key}": degree for key, degree in layout.degrees.items()},
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        command = [*launcher, str(layout.world_size), "-m", "torchtitan.train", "--job.config_file", str(config)]
        ended = _run_to_end([*command, *_flags(values)], timeout)
        if ended is None:
            return Result(layout, [], [], f"did not end within {timeout:.0f} s")
        returncode, errors = ended
        lines = Path(folder, "metrics.jsonl")
        records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if returncode or len(records) != steps:
        unknown = f"ended with exit code {returncode}; its last words:\n{last_lines(errors)}"
        return Result(layout, [], [], first_error(errors) or unknown)
    return Result(layout, _series(records, "loss"), _series(records, "grad_norm"))


def _run_to_end(command: list[str], timeout: float) -> tuple[int, str] | None:
    """(exit code, stderr), or None if it took too long. torchrun is asked to end, so that it ends its workers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
    return process.returncode, errors


def _flags(values: dict[str, Any]) -> list[str]:
    """TorchTitan's command line for TOML values; a boolean is a flag that its section can negate."""
    words: list[str] = []
    for key, value in values.items():
        section, name = key.rsplit(".", 1)
        match str(value).lower():
            case "true":
                words.append(f"--{key}")
            case "false":
                words.append(f"--{section}.no-{name}")
            case _:
                words += [f"--{key}", str(value)]
    return words


def _series(records: list[dict[str, Any]], key: str) -> list[float]:
    return [math.nan if record[key] is None else record[key] for record in records]


def _table(
    results: list[Result], verdicts: list[Verdict], steps: int, global_batch: int, bars: tuple[float, float]
) -> Table:
    title = (
        f"{steps} steps of {global_batch} samples; the same means within {bars[0]:g} at step 1 and the loss within "
        f"{bars[1]:g} later"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("layout", "ranks", "loss 1", "norm 1"):
        table.add_column(heading, justify="left" if heading == "layout" else "right", no_wrap=True)
    table.add_column("largest difference, step by step")
    table.add_column("verdict", no_wrap=True)
    for result, verdict in zip(results, verdicts, strict=True):
        row = [result.layout.name, str(result.layout.world_size)]
        if result.failure:
            row += ["", "", "", "[red]failed"]
        else:
            differences = " ".join(f"{difference:.0e}" for difference in verdict.differences)
            row += [f"{result.loss[0]:.6f}", f"{result.grad_norm[0]:.6f}", differences]
            row.append(_word(result is results[0], results[0].failure is not None, verdict.passed))
        table.add_row(*row)
    return table


def _word(is_reference: bool, reference_failed: bool, passed: bool) -> str:
    if reference_failed:
        return "[red]no reference"
    if is_reference:
        return "reference" if passed else "[red]failed"
    return "[green]same" if passed else "[red]differs"
