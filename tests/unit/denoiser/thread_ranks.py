"""Ranks as threads of one process: the arithmetic of tensor parallelism without processes or a network."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from services.denoiser.parallel import Ranks

Result = TypeVar("Result")

LIMIT_S = 60.0  # a rank that is missed for so long is not coming


class Meeting:
    """Where the ranks meet, all at every exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.brought: list[Tensor] = [torch.empty(0)] * size


class ThreadRanks:
    """One rank's view of the meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_gather(self, x: Tensor) -> Tensor:
        self.meeting.brought[self.rank] = x
        self.meeting.barrier.wait()
        gathered = torch.stack(self.meeting.brought)
        self.meeting.barrier.wait()  # nobody overwrites what another still reads
        return gathered

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x.copy_(self.all_gather(x).sum(0))


def on_ranks(size: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """What each rank's `work` returns, by rank. Raises what the first failing one raised."""
    meeting = Meeting(size)

    def run(rank: int) -> Result:
        try:
            return work(ThreadRanks(meeting, rank))
        except BaseException:
            meeting.barrier.abort()  # the others wait for it no longer
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
