"""Choices that do not flap: an index that falls at once, and rises only with something to spare. Pure.

1. Each choice has two answers: `high` is what can be afforded, `low` what could be afforded with the margin kept free.
2. Above `high` it falls to `high`, below `low` it rises to `low`; in between it stays as it was.
So it is never above what can be afforded; and where both answers rise, whatever it was, it does not fall.
"""


def between(before: int, low: int, high: int) -> int:
    """Rule 2. `low` is at most `high`."""
    return min(max(before, low), high)


class Steady:
    """A choice and its past. All that is chosen at one time follows what stood before, so their order is no matter."""

    __slots__ = ("_at", "_before", "index")

    def __init__(self, index: int) -> None:
        self.index = self._before = index
        self._at = float("-inf")

    def before(self, now: float) -> int:
        """As it stood before `now`."""
        return self.index if now > self._at else self._before

    def choose(self, index: int, now: float) -> None:
        if now > self._at:
            self._before, self._at = self.index, now
        self.index = index
