"""What the ranks of a tensor-parallel instance tell each other besides tensors, and the engine that leads them.

Rank 0 decides what is admitted, removed and turned; the others do the same in the same order, and so run the same
batches.
1. Changes are kept until the next step and go out with it: one `Plan` a step, before rank 0 takes that step itself.
   While nothing runs nothing is sent, and the others sleep.
2. What is committed follows from scores that are the same, bit for bit, on every rank. At each block's end all compare
   a checksum of everything committed so far, before anyone outside hears of the block.
3. A line that is closed means that its other end is gone.
"""

import contextlib
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from services.denoiser.engine import Engine, EngineConfig, Job, StepResult
from services.denoiser.kernels import KernelsName, Quantization
from services.denoiser.models.base import Model
from services.settings import ConfigError

# --- messages -----------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the messages between ranks. Both ends run the same code: no versions."""


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to load its share of the model."""

    folder: str
    device: str
    dtype: str
    threads: int  # of each rank, on the CPU
    kernels: KernelsName
    quantization: Quantization


class Join(Message, frozen=True, kw_only=True):
    """Join the group and load this rank's share of the model."""

    rank: int
    size: int
    folder: str  # where the group's members find each other
    limit_s: float  # of a collective
    source: ModelSource


class Begin(Message, frozen=True, kw_only=True):
    """Make the engine, of the same sizes on all ranks."""

    config: EngineConfig


class Admit(Message, frozen=True, kw_only=True):
    """Engine.admit."""

    job: Job


class Remove(Message, frozen=True, kw_only=True):
    """Engine.remove."""

    request_id: str


class SetThreshold(Message, frozen=True, kw_only=True):
    """Engine.set_threshold."""

    request_id: str
    value: float


Change: TypeAlias = Admit | Remove | SetThreshold


class Plan(Message, frozen=True, kw_only=True):
    """Make these changes, in order, and take a step."""

    changes: list[Change]


class Up(Message, frozen=True, kw_only=True):
    """The process runs and waits for orders."""


class Loaded(Message, frozen=True, kw_only=True):
    """The model is loaded."""

    free_bytes: int  # of memory, on this rank's device


class Ready(Message, frozen=True, kw_only=True):
    """The engine is made."""


class Check(Message, frozen=True, kw_only=True):
    """A block has ended; `checksum` is of all that was committed so far."""

    checksum: int


class Failed(Message, frozen=True, kw_only=True):
    """This rank cannot go on."""

    detail: str
    wrong_config: bool = False


FromLeader: TypeAlias = Join | Begin | Plan
FromFollower: TypeAlias = Up | Loaded | Ready | Check | Failed


class RankFailed(Exception):
    """Another rank is gone, silent or wrong: this instance cannot go on."""

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(f"rank {rank} {detail}")
        self.rank, self.detail = rank, detail


# --- lines --------------------------------------------------------------------------------------------------------

Heard = TypeVar("Heard")
M = TypeVar("M", bound=Message)

_HEADER_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class LineClosed(Exception):
    """The other end is gone."""


@contextlib.contextmanager
def _closed_is_said() -> Iterator[None]:
    try:
        yield
    except TimeoutError:  # an OSError too
        raise
    except OSError as error:
        raise LineClosed from error


class Line(Generic[Heard]):
    """A stream socket that carries messages, each after its length in four bytes. `hears`: the union that arrives.

    After a TimeoutError in the middle of a message the line is of no use any more.
    """

    def __init__(self, end: socket.socket, hears: Any) -> None:
        self._socket = end
        self._decoder = msgspec.msgpack.Decoder(hears)

    def send(self, message: Message, limit_s: float | None = None) -> None:
        """Raises LineClosed, and TimeoutError where the other end does not take it in time."""
        data = _encoder.encode(message)
        with _closed_is_said():
            self._socket.settimeout(limit_s)
            self._socket.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)

    def receive(self, limit_s: float | None = None) -> Heard:
        """The next message. Raises LineClosed, and TimeoutError where none comes in time."""
        with _closed_is_said():
            self._socket.settimeout(limit_s)
            length = int.from_bytes(self._read(_HEADER_BYTES), "big")
            heard: Heard = self._decoder.decode(self._read(length))
            return heard

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._socket.recv(num_bytes - len(data))
            if not part:
                raise LineClosed
            data += part
        return data

    def close(self) -> None:
        """The other end finds it closed, even if another thread still waits here."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Follower:
    """Another rank, as rank 0 sees it. `limit_s`: what it may take to answer within a step."""

    def __init__(self, rank: int, line: Line[FromFollower], limit_s: float) -> None:
        self.rank, self._line, self._limit_s = rank, line, limit_s

    def tell(self, message: Message) -> None:
        """Raises RankFailed."""
        try:
            self._line.send(message, self._limit_s)
        except TimeoutError:
            raise self._silent(self._limit_s) from None
        except LineClosed:
            raise self._gone() from None

    def expect(self, kind: type[M], limit_s: float | None = None) -> M:
        """Its next message, which must be of this kind. Raises RankFailed, and ConfigError if it says so."""
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            heard = self._line.receive(limit_s)
        except TimeoutError:
            raise self._silent(limit_s) from None
        except LineClosed:
            raise self._gone() from None
        if isinstance(heard, kind):
            return heard
        if isinstance(heard, Failed):
            raise ConfigError(heard.detail) if heard.wrong_config else RankFailed(self.rank, f"failed: {heard.detail}")
        raise RankFailed(self.rank, f"said {type(heard).__name__} where {kind.__name__} was due")

    def complains(self, limit_s: float) -> bool:
        """Whether it says within the limit that it cannot go on; other messages are skipped."""
        give_up_at = time.monotonic() + limit_s
        with contextlib.suppress(TimeoutError, LineClosed):
            while (left_s := give_up_at - time.monotonic()) > 0:
                if isinstance(self._line.receive(left_s), Failed):
                    return True
        return False

    def close(self) -> None:
        self._line.close()

    def _silent(self, limit_s: float) -> RankFailed:
        return RankFailed(self.rank, f"has not answered within {limit_s:g} s")

    def _gone(self) -> RankFailed:
        return RankFailed(self.rank, "has closed its line")


# --- leading and following ----------------------------------------------------------------------------------------


class LeadingEngine(Engine):
    """Rank 0's engine: whatever it is told, and each step that it takes, its followers do too.

    `step` raises RankFailed besides what the model raises.
    """

    def __init__(self, model: Model, *, config: EngineConfig, followers: Sequence[Follower]) -> None:
        super().__init__(model, config=config)
        self._followers = followers
        self._changes: list[Change] = []  # since the last step
        self._checksum = 0

    def admit(self, job: Job) -> None:
        super().admit(job)
        self._changes.append(Admit(job=job))

    def remove(self, request_id: str) -> None:
        super().remove(request_id)
        self._changes.append(Remove(request_id=request_id))

    def set_threshold(self, request_id: str, value: float) -> None:
        super().set_threshold(request_id, value)
        self._changes.append(SetThreshold(request_id=request_id, value=value))

    def step(self) -> StepResult:
        plan = Plan(changes=self._changes)
        self._changes = []
        for follower in self._followers:
            follower.tell(plan)
        result = super().step()
        self._checksum = checksum(result, self._checksum)
        if ends_block(result):
            self._compare()
        return result

    def _compare(self) -> None:
        for follower in self._followers:
            if follower.expect(Check).checksum != self._checksum:
                raise RankFailed(follower.rank, "has committed other tokens than rank 0")


def follow(line: Line[FromLeader], engine: Engine) -> None:
    """Does what rank 0 does, until the line is closed: raises LineClosed then, and whatever the engine raises."""
    total = 0
    while True:
        plan = line.receive()
        assert isinstance(plan, Plan), "the engine is made: plans are all that comes"
        for change in plan.changes:
            _make(change, engine)
        result = engine.step()
        total = checksum(result, total)
        if ends_block(result):
            line.send(Check(checksum=total))


def _make(change: Change, engine: Engine) -> None:
    match change:
        case Admit():
            engine.admit(change.job)
        case Remove():
            engine.remove(change.request_id)
        case SetThreshold():
            engine.set_threshold(change.request_id, change.value)


def ends_block(result: StepResult) -> bool:
    """Whether somebody's block has ended in the step."""
    return any(step.block_done for step in result.requests)


def checksum(result: StepResult, before: int) -> int:
    """Of what the step committed, where, and all that came `before`."""
    committed = [
        (step.request_id, step.block_index, step.commits.positions, step.commits.token_ids, step.finished)
        for step in result.requests
    ]
    return zlib.crc32(_encoder.encode(committed), before)
