"""Memory: how much there is to take, and keeping large freed blocks in the process, for passes on the CPU.

glibc gives every block of some 100 KB and more back to the system when it is freed, and each pass takes its activations
anew, page by page: at 1,500 rows of a small model that was a tenth to a fifth of the pass. Memory stays at its peak
instead, which the largest pass sets anyway.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the allocator to keep freed memory, process-wide; says whether it could."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(option, LARGE) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


def available_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory on this device that can be taken now; None where the system does not say. `root` is for tests.

    A CPU's is what the kernel could free up, or what a control group that we are in (a container's limit, a service's)
    leaves, if that is less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    found = [_machine_bytes(root)]
    for group in _control_groups(root):
        found.append(_group_bytes(group, "memory.max", "memory.current"))
        found.append(_group_bytes(group, "memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 1
    return min((available for available in found if available is not None), default=None)


def _machine_bytes(root: Path) -> int | None:
    kilobytes = _table(root / "proc/meminfo").get("MemAvailable:")
    return kilobytes and kilobytes << 10


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of the groups that may limit us: those that we are in and all above them, of either version."""
    top = root / "sys/fs/cgroup"
    yield from (top, top / "memory")  # in a container these are its own, however deep it lies
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                mount = top / controllers
                group = mount / path.lstrip("/")
                yield from (level for level in (group, *group.parents) if mount in level.parents)


def _group_bytes(group: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _number(group / limit_name), _number(group / used_name)
    if limit is None or used is None:
        return None
    statistics = _table(group / "memory.stat")
    return max(0, limit - used + statistics.get("inactive_file", 0))  # pages of files are dropped when need be


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such group; "max": no limit
        return int(path.read_text())
    return None


def _table(path: Path) -> dict[str, int]:
    """The file's lines `name number ...`."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in path.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    return {}
