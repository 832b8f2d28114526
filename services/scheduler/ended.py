"""Which messages of REQUESTS may go, and in how few calls. Pure.

To remove all messages below a sequence takes nats-server about as long as to remove a single one. So at each look:
1. What came before the oldest open request has ended, and goes in one call.
2. What ended behind it goes by itself once it has been passed over `_PATIENCE` times, or one long request would keep
   the stream full.
"""

from typing import NamedTuple

_PATIENCE = 10  # looks


class Removable(NamedTuple):
    """Messages that may go: all below a sequence (0: none), and those of some requests."""

    below_seq: int
    request_ids: list[str]


class EndedRequests:
    """Told of each request, in the stream's order, and of its end."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}  # sequence by request id, ascending
        self._ended: dict[str, tuple[int, int]] = {}  # sequence, and how often it was passed over
        self._next_seq = 1

    def note_request(self, request_id: str, seq: int) -> None:
        """It lies in the stream."""
        self._open.pop(request_id, None)
        self._open[request_id] = seq
        self._next_seq = seq + 1

    def note_end(self, request_id: str) -> None:
        """Nobody needs it there any more."""
        self._ended[request_id] = self._open.pop(request_id), 0

    @property
    def are_left(self) -> bool:
        """Whether something is still to be removed."""
        return bool(self._ended)

    def take(self) -> Removable:
        """A look. What it names counts as removed."""
        oldest_open = next(iter(self._open.values()), self._next_seq)
        below_seq, alone, kept = 0, [], {}
        for request_id, (seq, looks) in self._ended.items():
            if seq < oldest_open:
                below_seq = oldest_open
            elif looks == _PATIENCE:
                alone.append(request_id)
            else:
                kept[request_id] = seq, looks + 1
        self._ended = kept
        return Removable(below_seq, alone)
