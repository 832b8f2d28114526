"""The devices of a node, by number: GPUs as NVML and `nvidia-smi` count them, or cores.

1. What `[agent] devices` names counts: "cuda", "cpu", or some of them, as in "cuda:0,1".
2. "auto": GPUs, if NVML finds any that `CUDA_VISIBLE_DEVICES` leaves, else cores.
3. Cores are those that this process may run on. One that is named and is none of them is a mistake.
"""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from services.settings import ConfigError

DeviceKind = Literal["cpu", "cuda"]

_NAMED = re.compile(r"(auto|cpu|cuda)|(cpu|cuda):(\d+(?:,\d+)*)")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Devices(NamedTuple):
    """What instances may be placed on."""

    kind: DeviceKind
    numbers: tuple[int, ...]


def check_devices(text: str) -> None:
    """Raises ValueError unless it is a value of `[agent] devices`."""
    named = _NAMED.fullmatch(text)
    if named is None:
        raise ValueError(f'devices: {text!r} is not "auto", "cpu", "cuda", or some of them, as in "cuda:0,1"')
    if named[3] and len(set(_numbers(named[3]))) != len(_numbers(named[3])):
        raise ValueError(f"devices: {text!r} names a device twice")


def find_devices(text: str, environ: Mapping[str, str]) -> Devices:
    """The devices that the setting means here. Raises ConfigError where they are not there."""
    named = _NAMED.fullmatch(text)
    assert named is not None, "checked with the settings"
    if named[2] == "cpu" and (missing := set(_numbers(named[3])) - set(cores())):
        raise ConfigError(f"[agent] devices: {text!r}: no core {min(missing)} here, there are {list(cores())}")
    if named[3]:
        return Devices("cpu" if named[2] == "cpu" else "cuda", _numbers(named[3]))
    gpus = () if named[1] == "cpu" else visible_gpus(count_gpus(), environ)
    if named[1] == "cuda" and not gpus:
        raise ConfigError(f'[agent] devices: "cuda", and NVML finds no GPU here that {_VISIBLE} leaves')
    return Devices("cuda", gpus) if gpus else Devices("cpu", cores())


def cores() -> tuple[int, ...]:
    """That this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def count_gpus() -> int:
    """By NVML, which comes with the driver; 0 without it."""
    count = ctypes.c_uint(0)
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
    return count.value


def visible_gpus(count: int, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Those that are not hidden. Raises ConfigError where they are not named by number."""
    visible = environ.get(_VISIBLE)
    if visible is None or not count:
        return tuple(range(count))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not all(name.lstrip("-").isdecimal() for name in names):
        raise ConfigError(f'{_VISIBLE} is {visible!r}: name the GPUs by number in [agent] devices, as in "cuda:0,1"')
    return tuple(number for number in map(int, names) if 0 <= number < count)


def environment_of(kind: DeviceKind, numbers: Sequence[int]) -> dict[str, str]:
    """What lets a process see these GPUs alone, rank i the i-th of them; nothing for cores, and where none is named."""
    if kind == "cpu" or not numbers:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", _VISIBLE: ",".join(map(str, numbers))}


def pin(pid: int, numbers: Iterable[int]) -> None:
    """Keeps a process that has just been started, and all that it starts, on these cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, numbers)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
