"""The sweep's TOML file: what it says, and what is wrong with it as a file."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_mixle.config_file import read_config
from torchtitan_mixle.errors import ConfigError, suggestion
from torchtitan_mixle.planning.values import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Rule

Values = dict[str, Any]
"""TOML values of a job by dotted key; "layout" stands for the degrees of a layout by name."""

LAYOUT = "layout"


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file gives it; its keys are not yet compared with those of a job."""

    path: Path
    config: Path
    """TOML file of the job that every point changes."""
    folder: Path
    """Where the points run; absolute."""
    nodes: int
    nproc: int
    """Processes on each node."""
    steps: int
    warmup: int
    """First steps that no figure counts."""
    repeats: int
    timeout_seconds: float
    """How long one run may take, its start-up included."""
    groups: list[list[Values]]
    """Axes and zipped groups, in the file's order: the alternatives of each."""
    skip: list[Values]
    only: list[Values]
    """Conditions: values, or lists of values, by key."""
    override: Values
    """Of all points."""
    slurm: Values
    """Options of sbatch."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc


_TEXT: Rule = (lambda value: isinstance(value, str) and value != "", "a path in quotes")
# Key -> (rule, default); ... where there is none.
_KEYS: dict[str, tuple[Rule, Any]] = {
    "config": (_TEXT, ...),
    "folder": (_TEXT, None),
    "nodes": (AT_LEAST_ONE, 1),
    "nproc": (AT_LEAST_ONE, ...),
    "steps": (AT_LEAST_ONE, ...),
    "warmup": (AT_LEAST_ZERO, 1),
    "repeats": (AT_LEAST_ONE, 1),
    "timeout_seconds": (POSITIVE, 1800),
}
_TABLES = ("axes", "override", "slurm")
_LISTS_OF_TABLES = ("zip", "skip", "only")


def read_sweep(path: Path) -> SweepFile:
    """The sweep in a TOML file. Raises ConfigError."""
    content = read_config(path)
    for key in content:
        check_known(key, [*_KEYS, *_TABLES, *_LISTS_OF_TABLES], what=f"a key of a sweep ({path})")
    values = {key: _value(path, content, key, rule, default) for key, (rule, default) in _KEYS.items()}
    if values["warmup"] >= values["steps"]:
        raise ConfigError(f"{path}: warmup={values['warmup']} leaves none of steps={values['steps']} to measure")
    tables = {key: _table(path, content.get(key, {}), key) for key in _TABLES}
    _check_slurm(path, tables["slurm"])
    lists = {key: _tables(path, content.get(key, []), key) for key in _LISTS_OF_TABLES}
    groups = [_axis(path, key, alternatives) for key, alternatives in tables["axes"].items()]
    groups += [_zipped(path, rows) for rows in lists["zip"]]
    _check_set_once(path, groups)
    folder = values.pop("folder") or f"outputs/sweeps/{path.stem}"
    config = _find_config(path, values.pop("config"))
    return SweepFile(
        path,
        config,
        Path(folder).absolute(),
        **values,
        groups=groups,
        skip=lists["skip"],
        only=lists["only"],
        override=tables["override"],
        slurm=tables["slurm"],
    )


def check_known(key: str, known: Iterable[str], *, what: str) -> None:
    """Raise ConfigError, with the nearest right word, unless `key` is one of those known."""
    known = list(known)
    if key not in known:
        raise ConfigError(f"{key!r} is not {what}; {suggestion(key, known)}")


def flatten(table: Values, prefix: str = "") -> Values:
    """{"a": {"b": 1}} -> {"a.b": 1}; a key that is written with dots and quotes stays what it is."""
    flat: Values = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _value(path: Path, content: Values, key: str, rule: Rule, default: Any) -> Any:
    if key not in content:
        if default is ...:
            raise ConfigError(f"{path}: a sweep needs {key} = {rule[1]}")
        return default
    holds: Callable[[Any], bool] = rule[0]
    if not holds(content[key]):
        raise ConfigError(f"{path}: {key}={content[key]!r}: must be {rule[1]}")
    return content[key]


def _table(path: Path, table: Any, name: str) -> Values:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be a table, [{name}]")
    return flatten(table)


def _tables(path: Path, tables: Any, name: str) -> list[Values]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) and table for table in tables):
        raise ConfigError(f"{path}: {name} must be tables with at least one key, each under [[{name}]]")
    return [flatten(table) for table in tables]


def _axis(path: Path, key: str, alternatives: Any) -> list[Values]:
    if not isinstance(alternatives, list) or not alternatives:
        raise ConfigError(f"{path}: the axis {key} must be a list of values, as in {key} = [1, 2]")
    for i, value in enumerate(alternatives):
        if value in alternatives[:i] and type(value) in map(type, alternatives[:i]):
            raise ConfigError(f"{path}: the axis {key} has {value!r} twice; use repeats to run a point more than once")
    return [{key: value} for value in alternatives]


def _zipped(path: Path, columns: Values) -> list[Values]:
    for key, column in columns.items():
        if not isinstance(column, list) or not column:
            raise ConfigError(f"{path}: {key} in [[zip]] must be a list of values")
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{key} has {n}" for key, n in lengths.items())
        raise ConfigError(f"{path}: the lists of a [[zip]] go together and must be of equal length; {shown}")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for i, row in enumerate(rows):
        if row in rows[:i]:
            raise ConfigError(f"{path}: a [[zip]] has the row {row} twice; use repeats to run a point more than once")
    return rows


def _check_slurm(path: Path, options: Values) -> None:
    for key, value in options.items():
        if key in ("array", "nodes", "parsable", "wrap", "wait"):
            remedy = "by its own key nodes" if key == "nodes" else "by itself"
            raise ConfigError(f"{path}: [slurm] has {key}, which a sweep sets {remedy}; leave it out")
        if not isinstance(value, str | int):  # true and false are whole numbers to Python
            raise ConfigError(f"{path}: [slurm] {key}={value!r} must be text in quotes, a whole number, true or false")


def _check_set_once(path: Path, groups: list[list[Values]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for key in group[0]:
            if key in seen:
                raise ConfigError(f"{path}: {key} is varied twice; give all its values in one axis or [[zip]]")
            seen.add(key)


def _find_config(path: Path, name: str) -> Path:
    """Beside the sweep file, or else in the working directory."""
    places = [path.parent / name, Path(name)]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise ConfigError(f"{path}: there is no config={name!r}, neither beside the sweep file nor in {Path.cwd()}")
