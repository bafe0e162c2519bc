"""The points of a sweep: every combination of its axes' values that its conditions leave."""

import copy
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_mixle.config_file import read_config
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.planning.layouts import parse_layout
from torchtitan_mixle.sweep.file import LAYOUT, SweepFile, Values, flatten
from torchtitan_mixle.sweep.keys import check_value, key_types
from torchtitan_mixle.whole_file import write_whole

DEFAULTS: Values = {
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "checkpoint.enable": False,
    "validation.enable": False,
}
"""What a sweep changes in its config, unless its file says otherwise."""
_OWN = {"training.steps": "steps", "job.dump_folder": "folder", "job.config_file": "config"}


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """Of its values, for people; the repeats of a point share it."""
    id: str
    """Of its content: the same point of a changed sweep file has the same one."""
    values: Values
    """What distinguishes it from the others."""
    config: dict[str, Any]
    """The whole TOML of its job."""
    repeat: int

    def folder(self, sweep: Path) -> Path:
        return sweep / "points" / self.id


def make_points(sweep: SweepFile, base: Any) -> list[Point]:
    """All points, in the file's order; `base` is the sweep's config as TorchTitan reads it. Raises ConfigError."""
    known = key_types(base)
    _check_keys(sweep, known)
    content = flatten(read_config(sweep.config)) | DEFAULTS | _without_layouts(sweep.override)
    combinations = [_merge(rows) for rows in itertools.product(*sweep.groups)]
    conditions = _Conditions(sweep, base, content)
    kept = [values for values in combinations if conditions.keep(values)]
    conditions.check_used()
    if not kept:
        raise ConfigError(f"{sweep.path}: the conditions leave none of {len(combinations)} points")
    short = _short_names(sweep)
    return [
        _point(sweep, content, values, _name(values, short), repeat)
        for repeat in range(1, sweep.repeats + 1)
        for values in kept
    ]


def job_of(point: Point, base: Any) -> Any:
    """The point's job config: `base` with what its TOML says."""
    return _with(base, flatten(point.config))


def _with(base: Any, values: Values) -> Any:
    job = copy.deepcopy(base)
    for key, value in values.items():
        *path, name = key.split(".")
        section = job
        for part in path:
            section = getattr(section, part)
        setattr(section, name, copy.deepcopy(value))
    return job


def _check_keys(sweep: SweepFile, known: dict[str, Any]) -> None:
    for where, key, value in _all_values(sweep):
        if key == "metrics.log_freq" and isinstance(value, int) and value > 0 and sweep.steps % value:
            raise ConfigError(
                f"{sweep.path}: {where} {key}={value} must divide steps={sweep.steps}, to log the last one"
            )
        if key in _OWN and where not in ("[[skip]]", "[[only]]"):
            raise ConfigError(f"{sweep.path}: {where} gives {key}; a sweep sets it by its own key {_OWN[key]}")
        if key == LAYOUT:
            if not isinstance(value, str):
                raise ConfigError(f'{sweep.path}: layout={value!r} must be text in quotes, as "fsdp2xtp2"')
            parse_layout(value)
        else:
            check_value(key, value, {**known, LAYOUT: str}, where=f"{sweep.path}, {where}")
    varied = set().union(*(_degrees(group[0]) for group in sweep.groups)) if sweep.groups else set()
    if twice := varied & set(_without_layouts(sweep.override)):
        raise ConfigError(f"{sweep.path}: {sorted(twice)[0]} is both varied and in [override]; use one of them")


def _all_values(sweep: SweepFile) -> Iterator[tuple[str, str, Any]]:
    for group in sweep.groups:
        for row in group:
            yield from (("[axes] or [[zip]]", key, value) for key, value in row.items())
    yield from (("[override]", key, value) for key, value in sweep.override.items())
    for where, conditions in (("[[skip]]", sweep.skip), ("[[only]]", sweep.only)):
        for condition in conditions:
            for key, value in condition.items():
                yield from ((where, key, one) for one in (value if isinstance(value, list) else [value]))


def _degrees(values: Values) -> set[str]:
    """Keys of a job that these values set."""
    return set(_without_layouts(values))


def _without_layouts(values: Values) -> Values:
    """The values of a job: a layout's name gives its degrees."""
    job = {key: value for key, value in values.items() if key != LAYOUT}
    if LAYOUT in values:
        degrees = parse_layout(values[LAYOUT]).degrees
        job |= {f"parallelism.{key}": degree for key, degree in degrees.items()}
    return job


def _merge(rows: tuple[Values, ...]) -> Values:
    merged: Values = {}
    jobs: Values = {}
    for row in rows:
        if twice := set(jobs) & _degrees(row):
            raise ConfigError(f"{sorted(twice)[0]} is set by two axes, one of them the layout; use one of them")
        jobs |= _without_layouts(row)
        merged |= row
    return merged


class _Conditions:
    """Which points the file's [[skip]] and [[only]] leave; a condition that no point meets is a mistake."""

    def __init__(self, sweep: SweepFile, base: Any, content: Values) -> None:
        self._sweep = sweep
        self._base = _with(base, content)
        self._met: Counter[tuple[str, int]] = Counter()

    def keep(self, values: Values) -> bool:
        job = _with(self._base, _without_layouts(values))
        skipped = [self._meets(job, values, "skip", i) for i in range(len(self._sweep.skip))]
        chosen = [self._meets(job, values, "only", i) for i in range(len(self._sweep.only))]
        return not any(skipped) and (not chosen or any(chosen))

    def check_used(self) -> None:
        for kind in ("skip", "only"):
            for i, condition in enumerate(getattr(self._sweep, kind)):
                if not self._met[kind, i]:
                    raise ConfigError(f"{self._sweep.path}: no point meets the condition [[{kind}]] {condition}")

    def _meets(self, job: Any, values: Values, kind: str, i: int) -> bool:
        def value_of(key: str) -> Any:
            if key == LAYOUT:
                return values.get(key)
            place = job
            for part in key.split("."):
                place = getattr(place, part)
            return place

        condition = getattr(self._sweep, kind)[i]
        met = all(
            value_of(key) in (wanted if isinstance(wanted, list) else [wanted]) for key, wanted in condition.items()
        )
        self._met[kind, i] += met
        return met


def _point(sweep: SweepFile, content: Values, values: Values, name: str, repeat: int) -> Point:
    config = content | _without_layouts(values) | {"training.steps": sweep.steps}
    config.pop("job.dump_folder", None)
    facts = [config, sweep.nodes, sweep.nproc, repeat]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:10]
    slug = re.sub(r"[^\w=.+-]+", "_", name, flags=re.ASCII)[:80]
    # The name is a matter of the file's axes and their order, the point is not.
    earlier = sorted(path.name for path in (sweep.folder / "points").glob(f"*-{digest}"))
    folder = earlier[0] if earlier else f"{slug}-{digest}"
    config["job.dump_folder"] = str(sweep.folder / "points" / folder)
    return Point(name, folder, values, nest(config), repeat)


def nest(flat: Values) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return nested


def _short_names(sweep: SweepFile) -> dict[str, str]:
    """Of varied keys: the last word, where that tells them apart."""
    keys = [key for group in sweep.groups for key in group[0]]
    words = Counter(key.rsplit(".", 1)[-1] for key in keys)
    return {key: word if words[word := key.rsplit(".", 1)[-1]] == 1 else key for key in keys}


def _name(values: Values, short: dict[str, str]) -> str:
    shown = [value if key == LAYOUT else f"{short[key]}={_text(value)}" for key, value in values.items()]
    return ", ".join(shown) or "as configured"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(map(_text, value)) or "none"
    return str(value)


def write_point(point: Point, sweep: SweepFile) -> None:
    """Make the point's folder, with its job's config.toml and what its launcher must know in point.json."""
    import tomli_w

    folder = point.folder(sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(point.config), encoding="utf-8")
    facts = {
        "name": point.name,
        "values": point.values,
        "repeat": point.repeat,
        "nodes": sweep.nodes,
        "nproc": sweep.nproc,
        "steps": sweep.steps,
        "timeout_seconds": sweep.timeout_seconds,
    }
    write_json(folder / "point.json", facts)


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(content, indent=2, default=str) + "\n")
