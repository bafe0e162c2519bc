"""Layouts by name: "fsdp2xtp2" -> TorchTitan's parallel degrees."""

import math
import re
from dataclasses import dataclass

from torchtitan_mixle.errors import ConfigError

_PARTS = {
    "fsdp": "data_parallel_shard_degree",
    "ddp": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
}
_NAMES = "1, fsdpN, ddpN, hsdpRxS, tpN, ppN, cpN, and products of them like fsdp2xtp2"
_PART = re.compile(r"hsdp(?P<replicate>\d+)(?:x(?P<shard>\d+))?|(?P<axis>[a-z]+)(?P<degree>\d+)")


@dataclass(frozen=True)
class Layout:
    """Parallel degrees by TOML key (without their section), and what they multiply to."""

    name: str
    degrees: dict[str, int]
    world_size: int
    data_parallel_degree: int


def parse_layout(name: str) -> Layout:
    """The layout of a name; hsdp2 is hsdp2x2. Raises ConfigError, with the names there are, for any other word."""
    degrees = dict.fromkeys(_PARTS.values(), 1)  # also those of the config that the name does not mention
    if name != "1":
        for part in _split(name):
            clash = [key for key in part if degrees[key] != 1]
            if clash:
                raise ConfigError(f"layout {name!r} gives {clash[0]} twice; use each axis once")
            degrees |= part
    data_parallel = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    return Layout(name, degrees, math.prod(degrees.values()), data_parallel)


def _split(name: str) -> list[dict[str, int]]:
    parts: list[dict[str, int]] = []
    rest = name
    while True:
        match = _PART.match(rest)
        degrees = _degrees(match) if match else None
        if match is None or not degrees or min(degrees.values()) < 1:
            raise ConfigError(f"layout {name!r} is not understood at {rest!r}; there are {_NAMES}")
        parts.append(degrees)
        rest = rest[match.end() :]
        if not rest:
            return parts
        if not rest.startswith("x"):
            raise ConfigError(f"layout {name!r} is not understood at {rest!r}; there are {_NAMES}")
        rest = rest[1:]


def _degrees(match: re.Match[str]) -> dict[str, int] | None:
    if match["replicate"]:
        replicate = int(match["replicate"])
        return {
            "data_parallel_replicate_degree": replicate,
            "data_parallel_shard_degree": int(match["shard"] or replicate),
        }
    key = _PARTS.get(match["axis"])
    return {key: int(match["degree"])} if key else None
