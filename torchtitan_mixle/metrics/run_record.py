"""run.json: what was run, with what, on what, and what it came to."""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_mixle.whole_file import write_whole

_PACKAGES = ("torch", "torchtitan", "torchtitan-mixle", "mixle", "triton", "torchao", "numpy", "tokenizers")


class RunRecord:
    """One start of a run. An earlier start's record moves to a line of `run.earlier.jsonl`."""

    def __init__(self, path: Path, job_config: JobConfig, parallel_dims: ParallelDims, **facts: Any) -> None:
        self.path = path
        self._job_config = job_config
        self._facts = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "versions": versions(),
            "git": git_state(),
            "layout": layout(parallel_dims),
            **facts,
        }
        self._keep_earlier()

    def write(self, **more: Any) -> None:
        """Write the record whole or not at all; what is given stays in it. The config is as it now stands."""
        self._facts |= more
        record = self._facts | {"config": self._job_config.to_dict()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(record, indent=2, default=str) + "\n")

    def _keep_earlier(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8", errors="replace")
        try:
            line = json.dumps(json.loads(text))
        except ValueError:
            line = json.dumps({"unreadable": text})
        with self.path.with_name("run.earlier.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def versions() -> dict[str, str | None]:
    """Of Python, of what computes, and of the device's libraries; None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"cuda": torch.version.cuda, "hip": torch.version.hip}


def git_state() -> dict[str, Any] | None:
    """{"commit", "changed"} of the repository that this package's files belong to; None if they belong to none."""
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed, even if below a folder that happens to be a repository
    changed = _git(package, "status", "--porcelain", "--", ".")
    return {"commit": _git(package, "rev-parse", "HEAD"), "changed": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def layout(dims: ParallelDims) -> dict[str, Any]:
    """The degrees, and their name as `parity` writes it."""
    data = {
        (False, False): [],
        (False, True): [f"fsdp{dims.dp_shard}"],
        (True, False): [f"ddp{dims.dp_replicate}"],
        (True, True): [f"hsdp{dims.dp_replicate}x{dims.dp_shard}"],
    }[dims.dp_replicate > 1, dims.dp_shard > 1]
    others = [f"{axis}{degree}" for axis in ("tp", "pp", "cp") if (degree := getattr(dims, axis)) > 1]
    degrees = {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
    return {"name": "x".join(data + others) or "1", "world_size": dims.world_size, **degrees}
