"""Keys and types of a job's config, as TorchTitan and this package define them."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.sweep.file import check_known


def key_types(section: Any, prefix: str = "") -> dict[str, Any]:
    """{"training.steps": int, ...} of a job config, or of one of its sections."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(section))
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            found |= key_types(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = hints[field.name]
    return found


def check_value(key: str, value: Any, known: dict[str, Any], *, where: str) -> None:
    """Raise ConfigError unless `key` is a job's key, and `value` of its type."""
    check_known(key, known, what=f"a key of a job's config ({where})")
    if not _fits(value, known[key]):
        raise ConfigError(f"{where}: {key}={value!r} must be {_words(known[key])}{_remedy(value, known[key])}")


def _fits(value: Any, wanted: Any) -> bool:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if wanted is float:
        return type(value) in (int, float)
    return type(value) is (origin or wanted)


_NAMES = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false", list: "a list"}


def _words(wanted: Any) -> str:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(argument) for argument in arguments if argument is not type(None)))
    if origin is Literal:
        return f"one of {', '.join(repr(argument) for argument in arguments)}"
    return _NAMES.get(origin or wanted, str(wanted))


def _remedy(value: Any, wanted: Any) -> str:
    """A word for the commonest mistake, a number or a flag in quotes."""
    if isinstance(value, str) and not _fits("", wanted) and get_origin(wanted) is not Literal:
        return ", without quotes"
    return ""
