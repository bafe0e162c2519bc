"""One line instead of a traceback for mistakes that TorchTitan meets before any of our code has the job's config.

TorchTitan parses the config and multiplies the degrees out itself, with bare assertions. What it stumbled over lies in
the frames of the traceback, so the process's last words can name the values, the rule and a remedy.
"""

from collections.abc import Iterator
from dataclasses import fields
from types import FrameType, TracebackType
from typing import Any

from torchtitan_mixle.errors import ConfigError, suggestion
from torchtitan_mixle.planning.check import DEGREES, RunPlan, check_degrees


def explain(error: BaseException, trace: TracebackType | None) -> ConfigError | None:
    """The mistake behind an exception of TorchTitan's, or None if it is something else."""
    text = str(error)
    for frame in _frames(trace):
        values = frame.f_locals
        if frame.f_code.co_name == "init_distributed" and "parallelism_config" in values and "world_size" in values:
            return _wrong_degrees(values["parallelism_config"], values["world_size"])
        if text.startswith("Invalid field names in") and frame.f_code.co_name == "_dict_to_dataclass":
            known = {field.name for field in fields(values["cls"])}
            if unknown := sorted(set(values["data"]) - known):
                return _unknown_key(unknown[0], values["cls"].__name__, known)
    if text.startswith("TrainSpec ") and text.endswith(" is not registered."):
        return ConfigError(f'model.name={text.split()[1]!r} is not a model that TorchTitan knows; use "mixle"')
    return None


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _wrong_degrees(parallelism: Any, world_size: int) -> ConfigError | None:
    degrees = {field: getattr(parallelism, field) for field in DEGREES}
    try:
        check_degrees(RunPlan(world_size=world_size, seq_len=1, local_batch_size=1, **degrees))
    except ConfigError as mistake:
        return mistake
    return None


def _unknown_key(key: str, class_name: str, known: set[str]) -> ConfigError:
    section = class_name.removeprefix("Merged")
    where = "section" if section == "JobConfig" else f"key of [{section.lower()}]"
    return ConfigError(f"{key!r} is not a {where}; {suggestion(key, known)}")
