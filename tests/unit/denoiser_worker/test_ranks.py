"""Who is to blame when an instance loses a rank. The processes are real, and do nothing."""

import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.denoiser.parallel import CollectiveFailed
from services.denoiser.plan import Failed, FromLeader, Line, RankFailed
from services.denoiser.ranks import OtherRanks, devices_of_ranks
from services.denoiser.spawn import RankProcess
from services.settings import ConfigError

TIMED_OUT = CollectiveFailed("timed out: another rank was not there after 0.05 s")
CLOSED = CollectiveFailed("another rank is gone: it has left")


class Three:
    """Rank 0, and two others that sleep."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in pairs]
        self.ends: list[Line[FromLeader]] = [Line(theirs, FromLeader) for _, theirs in pairs]
        started = [
            RankProcess(rank, process, ours)
            for rank, process, (ours, _) in zip((1, 2), self.processes, pairs, strict=True)
        ]
        self.lost: queue.Queue[RankFailed] = queue.Queue()
        self.others = OtherRanks(started, limit_s=0.05, on_lost=self.lost.put)

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self.processes[rank - 1].pid})"


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    monkeypatch.setattr("services.denoiser.ranks._EXPLAIN_LIMIT_S", 0.1)
    monkeypatch.setattr("services.denoiser.ranks._END_LIMIT_S", 0.1)
    three = Three()
    yield three
    three.others.close()
    assert all(process.poll() is not None for process in three.processes)
    for end in three.ends:
        end.close()


def test_one_that_ends_is_told_at_once_and_blamed_whatever_the_others_suffer(three: Three) -> None:
    three.processes[1].kill()
    assert str(three.lost.get(timeout=30)) == f"{three.name(2)} has ended: killed by SIGKILL"
    three.processes[0].kill()
    three.lost.get(timeout=30)
    for error in (CLOSED, TIMED_OUT, RankFailed(1, "has closed its line")):
        assert str(three.others.explain(error)) == f"{three.name(2)} has ended: killed by SIGKILL"


def test_one_that_hangs_is_blamed_and_not_those_that_wait_for_it_too(three: Three) -> None:
    three.processes[1].send_signal(signal.SIGSTOP)
    three.ends[0].send(Failed(detail="timed out"))
    explained = three.others.explain(TIMED_OUT)
    assert str(explained) == f"{three.name(2)} has not taken part in a step for 0.05 s"


def test_a_mistake_of_our_own_is_nobody_elses_fault(three: Three) -> None:
    mistake = RuntimeError("poison")
    assert three.others.explain(mistake) is mistake
    assert three.others.explain(CLOSED) is CLOSED, "nobody has ended"
    three.ends[0].send(Failed(detail="timed out"))
    three.ends[1].send(Failed(detail="timed out"))
    assert three.others.explain(TIMED_OUT) is TIMED_OUT, "all wait, for nobody"


def test_their_own_end_is_no_loss(three: Three) -> None:
    folder = Path(three.others._folder.name)
    assert folder.stat().st_mode & 0o077 == 0
    three.others.close()
    assert not folder.exists()
    assert three.lost.empty()


def test_ranks_take_a_gpu_each_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices_of_ranks("cpu", 3) == ["cpu"] * 3
    assert devices_of_ranks("cuda", 2) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"engine\.tp_degree = 3 takes as many GPUs, and 2 are visible"):
        devices_of_ranks("cuda", 3)
