"""Every command in the README is run here as it stands, or is marked as needing a cluster or minutes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT, read_lines
from torchtitan_mixle.flavors import FLAVORS
from torchtitan_mixle.job_config import Mixle

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash(.*?)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
# scripts/test.sh is what runs this test; scripts/train.sh alone is run by test_train.py.
RUN_ELSEWHERE = {"scripts/test.sh\n", "scripts/train.sh\n"}


def commands(block: str) -> str:
    """A block's commands, with the repository's scripts found from any folder."""
    return re.sub(r"(?<![\w/])scripts/", f"{ROOT}/scripts/", block)


@pytest.mark.slow
@pytest.mark.parametrize("block", [body for marks, body in BLOCKS if not marks.strip() and body not in RUN_ELSEWHERE])
def test_block_runs(block: str, tmp_path: Path) -> None:
    for name in ("train_configs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(block)],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "VIRTUAL_ENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for metrics in tmp_path.rglob("metrics.jsonl"):
        assert read_lines(metrics)[-1]["step"] == 20


def test_only_known_marks() -> None:
    assert {marks.strip() for marks, _ in BLOCKS} == {"", "cluster", "minutes"}
    assert {body for _, body in BLOCKS} > RUN_ELSEWHERE


def test_every_file_and_flavor_named_exists() -> None:
    for name in re.findall(r"`((?:train_configs|torchtitan_mixle|scripts)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name
    for path in (ROOT / "train_configs").glob("*.toml"):
        assert f"`train_configs/{path.name}`" in README
    assert all(f"`{flavor}`" in README for flavor in FLAVORS)
    assert all(f"`{key}`" in README for key in Mixle.__dataclass_fields__)
