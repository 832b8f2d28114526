"""Finding stop strings in text that comes in pieces. Pure.

1. The stop string that is complete first ends the text; of several complete at the same character, the longest.
2. The text ends where that stop string begins: no part of it is ever given out.
3. So the longest end of the text that could still grow into a stop string is held back.

The outcome does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopScanner:
    """Feed it text with `push`; what it returns is safe to show."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """More text. Returns what may be shown now; `stopped` tells whether that was the last."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._length_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
