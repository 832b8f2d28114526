"""Child processes do not outlive the one that started them."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import ROOT, is_gone
from tests.waiting import wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc")

PARENT = """
import asyncio, sys
from pathlib import Path
from tools.up import children

folder = Path(sys.argv[1])
# a child that ignores SIGTERM, with a grandchild in a session of its own
CHILD = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), inner.pid, flush=True)
time.sleep(600)
'''

async def main():
    children.adopt_orphans()
    with (folder / "out").open("ab", buffering=0) as output:
        child = await children.start((sys.executable, "-c", CHILD), {}, output)
    while not (folder / "out").read_text().endswith("\\n"):
        await asyncio.sleep(0.02)
    (folder / "up").touch()
    if sys.argv[2] == "stop":
        assert not await children.stop(child, 0.3)  # it had to be killed
        children.kill_all()
        return
    await child.wait()

asyncio.run(main())
"""


def start_parent(folder: Path, what: str) -> subprocess.Popen[bytes]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), what], cwd=ROOT)
    wait_until((folder / "up").exists)
    return parent


@linux_only
def test_a_child_that_hangs_and_an_orphan_are_killed(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, "stop")
    assert parent.wait(20) == 0
    pids = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


@linux_only
def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, "run")
    child, grandchild = (int(pid) for pid in (tmp_path / "out").read_text().split())
    try:
        parent.kill()
        parent.wait(10)
        wait_until(lambda: is_gone(child))
    finally:
        psutil.Process(grandchild).kill()  # nobody promised to end it: an agent sees to its own children
