"""Ranks as threads of one process: tensor parallelism with its real collectives, without other processes."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from services.denoiser.parallel import CollectiveFailed
from services.denoiser.shared_memory import SharedMemoryRanks

Result = TypeVar("Result")

LIMIT_S = 60.0  # a rank that is missed for so long is not coming


def on_ranks(size: int, work: Callable[[SharedMemoryRanks], Result]) -> list[Result]:
    """What each rank's `work` returns, by rank. Raises what the first failing one raised."""

    def run(rank: int) -> Result:
        ranks = SharedMemoryRanks(rank, size, folder=Path(folder), limit_s=LIMIT_S)
        try:
            return work(ranks)
        finally:
            ranks.close()  # the others wait for it no longer

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, CollectiveFailed)):
        raise error
    return [future.result() for future in futures]
