"""Collectives over shared memory, between real threads and sockets."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.denoiser.parallel import CollectiveFailed
from services.denoiser.shared_memory import SharedMemoryRanks
from services.settings import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:  # shorter than pytest's: a socket's address has a hundred characters
        yield Path(name)


def ranks_in(folder: Path, size: int, slot_bytes: int = 64, limit_s: float = 30.0) -> list[SharedMemoryRanks]:
    """All of a group, met."""
    with ThreadPoolExecutor(size) as pool:
        made = [
            pool.submit(SharedMemoryRanks, rank, size, folder=folder, limit_s=limit_s, slot_bytes=slot_bytes)
            for rank in range(size)
        ]
        return [future.result() for future in made]


def values_of(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    return torch.randint(-99, 100, shape, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 4),
    shapes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    slot_bytes=st.sampled_from((8, 64, 1024)),
)
def test_everybody_has_the_sum_and_what_each_brought(
    size: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, slot_bytes: int
) -> None:
    def work(ranks: SharedMemoryRanks) -> None:
        for turn, shape in enumerate(shapes):
            brought = torch.stack([values_of(rank, turn, shape, dtype) for rank in range(size)])
            mine = brought[ranks.rank].clone()
            assert torch.equal(ranks.all_gather(mine), brought)
            reduced = ranks.all_reduce_(mine)
            assert reduced is mine
            assert torch.equal(reduced, brought.double().sum(0).to(dtype)), "small whole numbers: no rounding"

    with TemporaryDirectory() as name:
        on_each(ranks_in(Path(name), size, slot_bytes), work)


def on_each(group: list[SharedMemoryRanks], work: Callable[[SharedMemoryRanks], None]) -> None:
    with ThreadPoolExecutor(len(group)) as pool:
        done = [pool.submit(work, ranks) for ranks in group]
    for future in done:
        future.result()
    for ranks in group:
        ranks.close()


def test_the_sum_has_the_same_bits_everywhere(folder: Path) -> None:
    found: dict[int, Tensor] = {}

    def work(ranks: SharedMemoryRanks) -> None:
        torch.manual_seed(ranks.rank)
        found[ranks.rank] = ranks.all_reduce_(torch.randn(1000))

    on_each(ranks_in(folder, 4, slot_bytes=256), work)
    assert all(torch.equal(found[0], of_rank) for of_rank in found.values())


def test_one_that_is_ahead_overwrites_nothing_that_another_still_reads(folder: Path) -> None:
    """Each is late in turn, by as long as the others take to run into whatever would hold them."""
    seen: list[bool] = []

    def work(ranks: SharedMemoryRanks) -> None:
        for turn in range(60):
            views = ranks._exchange(values_of(ranks.rank, turn, (8,), torch.int64))
            if turn % 3 == ranks.rank:
                time.sleep(0.002)
            seen.append(all(torch.equal(views[r], values_of(r, turn, (8,), torch.int64)) for r in range(3)))

    on_each(ranks_in(folder, 3), work)
    assert seen == [True] * 180


def test_who_waits_for_one_that_is_gone_hears_of_it_at_once(folder: Path) -> None:
    first, second = ranks_in(folder, 2, limit_s=600.0)
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[Tensor] = pool.submit(first.all_reduce_, torch.zeros(1))
        second.close()
        with pytest.raises(CollectiveFailed, match="another rank is gone"):
            waiting.result(timeout=30)
    first.close()


def test_who_waits_for_one_that_hangs_gives_up_at_the_limit(folder: Path) -> None:
    first, second = ranks_in(folder, 2, limit_s=0.5)
    with pytest.raises(CollectiveFailed, match=r"timed out: another rank was not there after 0\.5 s"):
        first.all_gather(torch.zeros(1))
    first.close()
    second.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_is_not_complete_in_time_is_none(folder: Path, rank: int) -> None:
    with pytest.raises(CollectiveFailed, match="timed out"):
        SharedMemoryRanks(rank, 2, folder=folder, limit_s=0.05)


def test_a_folder_whose_path_is_too_long_for_a_socket_is_refused(folder: Path) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match=r"xxx/rank-1 is too long for a socket.*set TMPDIR to a shorter folder"):
        SharedMemoryRanks(1, 2, folder=deep, limit_s=0.05)
