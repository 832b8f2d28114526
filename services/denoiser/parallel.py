"""The ranks of one instance, as its model sees them: tensor parallelism over NCCL, or on CPUs over shared memory.

Every rank runs the same engine on its share of the weights, and every rank decides the same: what they decide from is
reduced or gathered, which gives the same bits everywhere. One rank alone needs no process group.
"""

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """Who shares the model: this rank (from 0) of `size`."""

    rank: int
    size: int

    def all_reduce_(self, x: Tensor) -> Tensor:
        """`x`, overwritten with the sum over all ranks: the same bits on each."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: everybody's `x`, by rank."""


class Alone:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


class CollectiveFailed(RuntimeError):
    """A collective that cannot be completed: another rank is gone, or was not there in time."""


class NcclRanks:
    """A rank on a GPU of its own; they find each other through `init_method`.

    A collective that is not complete after `limit_s` raises, and so does one whose peer is gone.
    """

    def __init__(self, rank: int, size: int, *, init_method: str, limit_s: float) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group(
            "nccl", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s)
        )

    def all_reduce_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered), x.contiguous())
        return gathered

    def close(self) -> None:
        """Leave the group. The others' next collective raises."""
        dist.destroy_process_group()
