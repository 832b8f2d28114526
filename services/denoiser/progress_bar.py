"""How far a long command is: a bar that redraws one line of a terminal; elsewhere only lines that stay."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_REDRAW_S = 0.1


class ProgressBar:
    """`advance` after each of `total` parts, `say` what is to stay, `close` at the end."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self.total = what, total
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._stream.isatty()
        self._started = clock()
        self._drawn = -_REDRAW_S
        self._done = 0

    def advance(self) -> None:
        """One part more is done."""
        self._done += 1
        now = self._clock()
        if self._on_terminal and (now - self._drawn >= _REDRAW_S or self._done == self.total):
            self._drawn = now
            self._stream.write(f"\r{self._line(now)}\x1b[K")
            self._stream.flush()

    def say(self, text: str) -> None:
        """A line for logs, where nothing is redrawn."""
        if not self._on_terminal:
            print(f"{self._what}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _line(self, now: float) -> str:
        share = self._done / self.total
        left_s = (now - self._started) * (1 / share - 1)
        return f"{self._what} [{'#' * int(share * _WIDTH):{_WIDTH}}] {share:4.0%}, {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
