"""A CPU device module for TorchTitan, which knows accelerators only.

Installed on import when PyTorch sees no accelerator, before the trainer chooses its device. On a machine with an
accelerator nothing is replaced.
"""

import os
import platform
import resource
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_PROC = Path("/proc/self")


def resident_bytes() -> tuple[int, int]:
    """The process's resident set in bytes: (now, peak since the last reset)."""
    status = _PROC / "status"
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        current, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return current, peak
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak


def reset_peak() -> None:
    """Let the peak start from the present resident set (Linux; elsewhere the peak is the process's)."""
    clear_refs = _PROC / "clear_refs"
    if clear_refs.exists():
        clear_refs.write_text("5")


def physical_bytes() -> int:
    """Memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_stats(device: Any = None) -> dict[str, int]:
    """The figures that TorchTitan reads, under CUDA's names: the resident set stands for active and reserved."""
    current, peak = resident_bytes()
    return {
        "active_bytes.all.current": current,
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.current": current,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _no_memory_history(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("profiling.enable_memory_snapshot needs an accelerator: a CPU keeps no allocation history")


def cpu_device_module() -> ModuleType:
    """A module with the part of `torch.cuda` that TorchTitan calls."""
    module = ModuleType("torchtitan_mixle_cpu")
    functions = {
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: f"CPU {platform.machine()}",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=physical_bytes()),
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": lambda device=None: reset_peak(),
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "memory": SimpleNamespace(_record_memory_history=_no_memory_history),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def has_accelerator() -> bool:
    return torch.accelerator.is_available()


def install_cpu_device() -> None:
    """Make TorchTitan train on the CPU. TorchTitan binds its device at import, in five modules and one default."""
    from torchtitan.components import metrics
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import profiling, utils

    module = cpu_device_module()
    for user in (utils, metrics, parallel_dims, dist_utils, profiling):
        for name, value in (("device_type", "cpu"), ("device_module", module)):
            if hasattr(user, name):
                setattr(user, name, value)
    metrics.DeviceMemoryMonitor.__init__.__defaults__ = ("cpu:0",)
    # TorchTitan enters autocast for float32 too, which on a CPU does nothing but say so, and seeds DTensor's random
    # operators, which the model does not use.
    for message in (
        "In CPU autocast, but the target dtype is not supported",
        r"DTensor (random operators|manual_seed\(\)) may not have complete support on cpu",
    ):
        warnings.filterwarnings("ignore", message=message)
