"""The ranks of an instance on CPUs: tensors change hands in memory that the ranks share, bytes on sockets say when.

1. Every two ranks have a socket between them. Rank r listens in the folder where they meet, and connects to those below
   it; rank 0 hands the memory out, which has no name.
2. An exchange: each rank copies what it brings into its slot, sends every other a byte, and waits for one from each.
   Then what all brought can be read, by rank.
3. Slots are used in turn, two a rank. A byte about one exchange says that its sender has read what was brought to the
   one before: that slot is free.
4. What does not fit a slot is exchanged in pieces.
5. Whoever waits longer than the limit raises, and so does who waits for a rank that is gone.

The socket's system calls order the memory's reads and writes; and a peer that dies is seen at once.
"""

import contextlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from services.denoiser.parallel import CollectiveFailed
from services.settings import ConfigError

_SLOT_BYTES = 1 << 20  # stays in a core's cache until the others have read it
_RETRY_S = 0.005  # until a peer listens
_LONGEST_ADDRESS = 103  # bytes, where it is least (macOS)


class SharedMemoryRanks:
    """One rank of a group on this machine; returns when all have met in `folder`, which nobody else can read.

    A collective that is not complete after `limit_s` raises CollectiveFailed, and so does one whose peer is gone.
    Meeting raises that too, and ConfigError for a folder whose path is too long.
    """

    def __init__(self, rank: int, size: int, *, folder: Path, limit_s: float, slot_bytes: int = _SLOT_BYTES) -> None:
        self.rank, self.size = rank, size
        self._limit_s, self._slot_bytes = limit_s, slot_bytes
        self._turn = 0
        self._peers: list[socket.socket] = []  # those below first
        try:
            with self._named_failures():
                give_up_at = time.monotonic() + limit_s
                self._meet(folder, give_up_at)
                self._slots = self._share_memory(give_up_at)
                self._limit_waits()
        except BaseException:
            self.close()
            raise

    def all_reduce_(self, x: Tensor) -> Tensor:
        for piece in self._pieces(x.view(-1)):
            torch.sum(self._exchange(piece), 0, out=piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, x.numel()))
        mine = x.reshape(-1)
        for theirs, piece in zip(self._pieces(gathered), self._pieces(mine), strict=True):
            theirs.copy_(self._exchange(piece))
        return gathered.view(self.size, *x.shape)

    def close(self) -> None:
        """Leave the group. The others' next collective raises."""
        for peer in self._peers:
            peer.close()

    # --- exchanges ---

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rule 4, along the last dimension."""
        return torch.split(x, self._slot_bytes // x.element_size(), -1)

    def _exchange(self, mine: Tensor) -> Tensor:
        """[size, len(mine)]: what all brought, until the exchange after the next (rules 2 and 3)."""
        self._turn = 1 - self._turn
        brought = self._slots[self._turn].view(mine.dtype)[:, : len(mine)]
        brought[self.rank].copy_(mine)
        with self._named_failures():
            for peer in self._peers:
                peer.send(b".")
            for peer in self._peers:
                if not peer.recv(1):
                    raise ConnectionResetError("it has left")
        return brought

    @contextlib.contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Rule 5."""
        try:
            yield
        except (TimeoutError, BlockingIOError):  # the latter is what SO_RCVTIMEO makes of it
            raise CollectiveFailed(f"timed out: another rank was not there after {self._limit_s:g} s") from None
        except OSError as error:
            raise CollectiveFailed(f"another rank is gone: {error}") from None

    # --- meeting ---

    def _meet(self, folder: Path, give_up_at: float) -> None:
        """Rule 1. Raises OSError."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(_address(folder, self.rank))
            listener.listen(self.size)
            for lower in range(self.rank):
                self._peers.append(_connect(_address(folder, lower), give_up_at))
            for _ in range(self.rank + 1, self.size):
                listener.settimeout(_left_s(give_up_at))
                self._peers.append(listener.accept()[0])

    def _share_memory(self, give_up_at: float) -> Tensor:
        """[2, size, slot_bytes]: the slots. Raises OSError."""
        num_bytes = 2 * self.size * self._slot_bytes
        if self.rank == 0:
            memory = _new_memory(num_bytes)
            for peer in self._peers:
                socket.send_fds(peer, [b"."], [memory])
        else:
            self._peers[0].settimeout(_left_s(give_up_at))
            memory = _descriptor_from(self._peers[0])
        try:
            return torch.frombuffer(mmap.mmap(memory, num_bytes), dtype=torch.uint8).view(2, self.size, -1)
        finally:
            os.close(memory)

    def _limit_waits(self) -> None:
        """By the kernel's own limit: Python's takes another system call for each byte."""
        limit = struct.pack("@ll", int(self._limit_s), int(self._limit_s % 1 * 1e6))
        for peer in self._peers:
            peer.setblocking(True)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _address(folder: Path, rank: int) -> str:
    """Raises ConfigError for a path that no socket can have."""
    address = str(folder / f"rank-{rank}")
    if len(os.fsencode(address)) > _LONGEST_ADDRESS:
        raise ConfigError(
            f"{address} is too long for a socket, which takes {_LONGEST_ADDRESS} bytes: set TMPDIR to a shorter folder"
        )
    return address


def _connect(address: str, give_up_at: float) -> socket.socket:
    """Raises TimeoutError where nobody listens there in time."""
    while True:
        left_s = _left_s(give_up_at)
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.settimeout(left_s)
            peer.connect(address)
            return peer
        except OSError as error:
            peer.close()
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                raise
        time.sleep(_RETRY_S)


def _descriptor_from(peer: socket.socket) -> int:
    """Raises OSError."""
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    if not descriptors:
        raise ConnectionResetError("it has left")
    return descriptors[0]


def _left_s(give_up_at: float) -> float:
    """Raises TimeoutError where nothing is left."""
    left_s = give_up_at - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _new_memory(num_bytes: int) -> int:
    """A file that nobody can open, by its descriptor: in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("tediserve-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.truncate(memory, num_bytes)
    return memory
