"""The CPU device module tells the process's own memory."""

import os
from pathlib import Path

import pytest
import torch
from torchtitan.components.metrics import build_device_memory_monitor
from torchtitan.tools import utils

import torchtitan_mixle
from torchtitan_mixle import spec
from torchtitan_mixle.device import has_accelerator, physical_bytes, resident_bytes

pytestmark = pytest.mark.skipif(has_accelerator(), reason="nothing is replaced on a machine with an accelerator")
MIB = 2**20


def test_torchtitan_uses_the_cpu() -> None:
    assert torchtitan_mixle is not None
    assert utils.device_type == "cpu"
    assert torch.device(utils.device_type).type == "cpu"


def test_memory_is_the_resident_set_now_and_at_its_peak() -> None:
    monitor = build_device_memory_monitor()
    assert monitor.device_capacity == physical_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    statm = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    before = resident_bytes()[0]
    assert before == pytest.approx(statm, rel=0.02)

    block = torch.ones(200 * MIB // 4)
    assert resident_bytes()[0] - before == pytest.approx(200 * MIB, rel=0.05)
    del block
    now, peak = resident_bytes()
    assert peak - now > 150 * MIB
    assert monitor.get_peak_stats().max_reserved_gib == pytest.approx(peak / 2**30, rel=0.01)
    monitor.reset_peak_stats()
    assert resident_bytes()[1] - resident_bytes()[0] < 10 * MIB


def test_registering_twice_changes_nothing() -> None:
    from torchtitan.protocols.train_spec import get_train_spec

    first = get_train_spec("mixle")
    spec.register()
    assert get_train_spec("mixle") is first
