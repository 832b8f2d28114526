"""The processes of a tensor-parallel instance. Rank 0 is the worker itself; it starts the others (`spawn.py`).

1. Each other rank is a child process with a line to rank 0 (`plan.py`). It dies with its parent, and ends by itself
   when its line is closed. It ignores SIGTERM and SIGINT: when the instance ends is rank 0's to say.
2. The ranks join in a group: over NCCL with rank i on the i-th visible GPU, or over shared memory on the CPU. They meet
   in a folder that only this user can read.
3. A rank that ends is noticed at once, also while nothing runs; one that hangs, when a collective is not complete
   after its limit. Either way the instance is over: `on_lost` is called, or the step raises. A rank whose collective
   failed says so and waits for its end, so that the one to blame is the one that is gone, or silent.
"""

import contextlib
import logging
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from msgspec.structs import replace

from services.denoiser.engine import Engine, EngineConfig
from services.denoiser.host_memory import available_bytes
from services.denoiser.lifeline import describe_exit
from services.denoiser.loader import load_model
from services.denoiser.models.base import Model
from services.denoiser.parallel import CollectiveFailed, NcclRanks, Ranks
from services.denoiser.plan import (
    Begin,
    Failed,
    Follower,
    FromFollower,
    FromLeader,
    Join,
    LeadingEngine,
    Line,
    LineClosed,
    Loaded,
    ModelSource,
    RankFailed,
    Ready,
    Up,
    follow,
)
from services.denoiser.shared_memory import SharedMemoryRanks
from services.denoiser.spawn import RankProcess
from services.settings import ConfigError

logger = logging.getLogger(__name__)

Group: TypeAlias = NcclRanks | SharedMemoryRanks

_START_LIMIT_S = 120.0  # until a child has imported torch, on a busy machine
_LOAD_LIMIT_S = 1800.0  # from rank 0's having loaded to the others'
_END_LIMIT_S = 2.0  # from closing the lines to the killing of who is left
_EXPLAIN_LIMIT_S = 1.0
_UNKNOWN_BYTES = 2 << 30  # taken to be free where the system does not say


class OtherRanks:
    """Ranks 1 and up, as processes that run (`start_ranks`): `join` them, load rank 0's share, and `lead`.

    `on_lost` is called, on a thread of its own, when one of them ends.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        limit_s: float,
        on_lost: Callable[[RankFailed], None] = lambda _: None,
    ) -> None:
        self.size = 1 + len(processes)
        self._processes, self._limit_s, self._on_lost = processes, limit_s, on_lost
        self._followers = [Follower(p.rank, Line(p.line, FromFollower), limit_s) for p in processes]
        self._folder = tempfile.TemporaryDirectory(prefix="tediserve-ranks-")
        self._group: Group | None = None
        self._free: list[int] | None = None  # None: they have not loaded
        self._changed = threading.Condition()
        self._ended: list[RankFailed] = []  # in order
        self._closing = False
        for process in processes:
            name = f"watch rank {process.rank}"
            threading.Thread(target=self._watch, args=(process,), name=name, daemon=True).start()

    def _watch(self, watched: RankProcess) -> None:
        code = watched.process.wait()
        failure = RankFailed(watched.rank, f"(process {watched.process.pid}) has ended: {describe_exit(code)}")
        with self._changed:
            if self._closing:
                return
            self._ended.append(failure)
            self._changed.notify_all()
        self._on_lost(failure)

    # --- start ---

    def join(self, source: ModelSource) -> Group:
        """Has the others load their shares and joins them. Raises RankFailed, and ConfigError without enough GPUs."""
        devices = devices_of_ranks(source.device, self.size)
        for follower in self._followers:
            follower.expect(Up, _START_LIMIT_S)
        orders = [
            Join(
                rank=rank,
                size=self.size,
                folder=self._folder.name,
                limit_s=self._limit_s,
                source=replace(source, device=device),
            )
            for rank, device in enumerate(devices)
        ]
        for follower in self._followers:
            follower.tell(orders[follower.rank])
        self._group = join_group(orders[0])
        return self._group

    def least_free_bytes(self, model: Model) -> int:
        """Bytes that every rank has free once all have loaded. Raises RankFailed, and ConfigError if one cannot load.

        On the CPU they take from the same memory, and each gets an equal part.
        """
        others = self._until_loaded()
        if model.device.type == "cpu":
            return free_bytes(model.device) // self.size  # what another measured may be taken by now
        return min(free_bytes(model.device), *others)

    def lead(self, model: Model, config: EngineConfig) -> LeadingEngine:
        """The engine, once all have theirs. Raises RankFailed, and ConfigError if one cannot load."""
        self._until_loaded()
        for follower in self._followers:
            follower.tell(Begin(config=config))
        engine = LeadingEngine(model, config=config, followers=self._followers)
        for follower in self._followers:
            follower.expect(Ready, _LOAD_LIMIT_S)
        if model.device.type == "cpu":
            self._folder.cleanup()  # all are connected; NCCL connects, and looks there, later
        return engine

    def _until_loaded(self) -> list[int]:
        """What each has free then, in bytes."""
        if self._free is None:
            self._free = [follower.expect(Loaded, _LOAD_LIMIT_S).free_bytes for follower in self._followers]
        return self._free

    # --- end ---

    def explain(self, error: BaseException) -> BaseException:
        """Which rank is to blame for what a step raised, where one is, else the error. Takes a second or two."""
        if not isinstance(error, RankFailed) and not is_of_collective(error):
            return error
        with self._changed:
            if self._changed.wait_for(lambda: self._ended, _EXPLAIN_LIMIT_S):
                return self._ended[0]
        if is_of_collective(error) and "timed out" in str(error).lower():
            for follower, other in zip(self._followers, self._processes, strict=True):
                if not follower.complains(_EXPLAIN_LIMIT_S):
                    detail = f"(process {other.process.pid}) has not taken part in a step for {self._limit_s:g} s"
                    return RankFailed(follower.rank, detail)
        return error

    def close(self) -> None:
        """Ends them all. Rank 0 must be between steps; the engine is of no use any more."""
        with self._changed:
            self._closing = True
        for follower in self._followers:
            follower.close()
        if self._group is not None:
            self._group.close()
        for other in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.process.wait(_END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """Ends them at once; a collective that waits for them raises. After it `close` has nothing to wait for."""
        with self._changed:
            self._closing = True
        self._group = None  # a group without them is not left in order
        for other in self._processes:
            other.process.kill()
        for other in self._processes:
            other.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "OtherRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def devices_of_ranks(device: str, size: int) -> list[str]:
    """By rank. Raises ConfigError where there are not enough GPUs."""
    if device != "cuda":
        return [device] * size
    if (visible := torch.cuda.device_count()) < size:
        raise ConfigError(f"engine.tp_degree = {size} takes as many GPUs, and {visible} are visible")
    return [f"cuda:{rank}" for rank in range(size)]


def free_bytes(device: torch.device) -> int:
    """Memory that the device has free."""
    found = available_bytes(device)
    return _UNKNOWN_BYTES if found is None else found


def join_group(join: Join) -> Group:
    """This process as that rank; returns when all are there. Raises CollectiveFailed where one is not in time."""
    if join.source.device == "cpu":
        return SharedMemoryRanks(join.rank, join.size, folder=Path(join.folder), limit_s=join.limit_s)
    torch.cuda.set_device(torch.device(join.source.device))
    return NcclRanks(join.rank, join.size, init_method=f"file://{join.folder}/group", limit_s=join.limit_s)


def load_share(source: ModelSource, ranks: Ranks) -> Model:
    """This rank's share of the model. Raises ConfigError."""
    try:
        return load_model(
            source.folder,
            device=source.device,
            dtype=source.dtype,
            ranks=ranks,
            kernels=source.kernels,
            quantization=source.quantization,
        )
    except ValueError as error:
        raise ConfigError(f"cannot load the model: {error}") from error


def is_of_collective(error: BaseException) -> bool:
    """Whether another rank may be to blame for it."""
    return isinstance(error, CollectiveFailed | dist.DistError)


# --- the other ranks ----------------------------------------------------------------------------------------------


def serve(line_fd: int) -> int:
    """The life of a rank other than 0, at this end of its line. Returns its exit code."""
    line: Line[FromLeader] = Line(socket.socket(fileno=line_fd), FromLeader)
    try:
        _serve(line)
    except LineClosed:
        return 0
    except ConfigError as error:
        _complain(line, Failed(detail=str(error), wrong_config=True))
        return 2
    except Exception as error:
        if is_of_collective(error):
            logger.warning("another rank is missing: %s", error)
            _complain(line, Failed(detail=str(error)))
        else:
            logger.exception("this rank has failed")
        return 1
    return 0


def _complain(line: Line[FromLeader], failed: Failed) -> None:
    """Waits until the line is closed: rank 0, which may still be loading, says what is told about it."""
    with contextlib.suppress(LineClosed, TimeoutError):
        line.send(failed, _EXPLAIN_LIMIT_S)
        line.receive(_LOAD_LIMIT_S)


def _serve(line: Line[FromLeader]) -> None:
    line.send(Up())
    join = line.receive()
    assert isinstance(join, Join)
    torch.set_num_threads(join.source.threads)
    group = join_group(join)
    model = load_share(join.source, group)
    line.send(Loaded(free_bytes=free_bytes(model.device)))
    begin = line.receive()
    assert isinstance(begin, Begin)
    engine = Engine(model, config=begin.config)
    line.send(Ready())
    try:
        follow(line, engine)
    except LineClosed:
        group.close()  # in order, as rank 0 does; on a mistake not, or who still joins would fail of that
        raise
