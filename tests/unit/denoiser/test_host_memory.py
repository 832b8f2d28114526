"""How much memory a machine or its container leaves."""

from pathlib import Path

import pytest
import torch

from services.denoiser.host_memory import available_bytes

CPU = torch.device("cpu")
MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  4000 kB\n"}
LIMITED = {"sys/fs/cgroup/memory.max": "3000000\n", "sys/fs/cgroup/memory.current": "1200000\n"}
LIMITED_V1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000\n",
}
NESTED = {
    "proc/self/cgroup": "0::/system.slice/agent.service\n",
    "sys/fs/cgroup/system.slice/memory.max": "1000000\n",
    "sys/fs/cgroup/system.slice/memory.current": "100000\n",
    "sys/fs/cgroup/system.slice/agent.service/memory.max": "500000\n",
    "sys/fs/cgroup/system.slice/agent.service/memory.current": "100000\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 4000 << 10),
        (MEMINFO | LIMITED, 1_800_000),
        (MEMINFO | LIMITED | {"sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 300000\n"}, 2_100_000),
        (MEMINFO | LIMITED | {"sys/fs/cgroup/memory.max": "max\n"}, 4000 << 10),
        (MEMINFO | LIMITED | {"sys/fs/cgroup/memory.max": "90000000\n"}, 4000 << 10),
        (MEMINFO | LIMITED | {"sys/fs/cgroup/memory.current": "3100000\n"}, 0),
        (MEMINFO | LIMITED_V1, 500_000),
        (MEMINFO | NESTED, 400_000),
        (MEMINFO | NESTED | {"proc/self/cgroup": "0::/system.slice\n"}, 900_000),
        (MEMINFO | NESTED | {"proc/self/cgroup": "4:memory:/job/step\n3:cpu:/job\n0::/\n"}, 600_000),
        (MEMINFO | NESTED | {"proc/self/cgroup": "0::/../elsewhere\n"}, 4000 << 10),
    ],
)
def test_what_the_kernel_or_the_container_leaves(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(CPU, root=tmp_path) == expected


def test_this_machine_has_some() -> None:
    available = available_bytes(CPU)
    assert available is None or available > 1 << 20
