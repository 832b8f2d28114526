"""What a measurement ran on."""

import os
import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """The processor and the cores that this process may use."""
    return f"{_cpuinfo('model name') or platform.processor() or platform.machine()}, {usable_cores()} cores"


def describe_matrix_units() -> str:
    """What it has for bfloat16: matrix products in it are several times faster where there is `amx_bf16`."""
    flags = (_cpuinfo("flags") or "").split()
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return f"torch {torch.__version__}; {', '.join(found) or 'no flags known'}" + ("" if has_amx() else "; no amx_bf16")


def has_amx() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware (Intel's AMX)."""
    return "amx_bf16" in (_cpuinfo("flags") or "").split()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _cpuinfo(name: str) -> str | None:
    """The first value of that name, on Linux."""
    if not _CPUINFO.exists():
        return None
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
