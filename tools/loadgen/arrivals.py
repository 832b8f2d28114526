"""When requests are due, in seconds from the start of a run. Pure, but for reading files.

1. A rate curve gives Poisson arrivals whose rate is constant between its points; a plain Poisson process is a curve of
   one endless piece. The same generator gives the same arrivals, whatever is sent.
2. A recording of arrivals is replayed as it is, from its first arrival on.
3. `speed` makes a file's time run faster: a curve keeps its rates and is shorter, a recording comes faster. `rate` is
   the mean that is wanted: a curve's rates are scaled to it, a recording's speed is chosen for it.
4. The columns tell which format a file is (FORMATS). What is wrong in it is told with the file and the line.
"""

import csv
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

from services.settings import ConfigError


class Curve(NamedTuple):
    """Requests a second over time: `rates_per_s[i]` from `starts_s[i]` on, until the next start or the end."""

    starts_s: "array[float]"  # rising, the first is 0
    rates_per_s: "array[float]"
    lasts_s: float

    @property
    def mean_per_s(self) -> float:
        return math.fsum(rate * (end - start) for start, end, rate in self._pieces()) / self.lasts_s

    def changed(self, speed: float | None, rate: float | None) -> "Curve":
        """Rule 3."""
        factor = rate / self.mean_per_s if rate is not None else 1.0
        faster = speed or 1.0
        return Curve(
            array("d", (start / faster for start in self.starts_s)),
            array("d", (old * factor for old in self.rates_per_s)),
            self.lasts_s / faster,
        )

    def arrivals(self, rng: Random) -> Iterator[float]:
        """Waiting times in units of expected requests are exponential, whatever the rate does meanwhile."""
        left = rng.expovariate(1.0)
        for start, end, rate in self._pieces():
            at = start
            while rate > 0 and left <= (end - at) * rate:
                at += left / rate
                yield at
                left = rng.expovariate(1.0)
            left -= (end - at) * rate if rate > 0 else 0.0

    def _pieces(self) -> Iterator[tuple[float, float, float]]:
        """Start, end and rate of each."""
        ends = [*self.starts_s[1:], self.lasts_s]
        return zip(self.starts_s, ends, self.rates_per_s, strict=True)


class Recording(NamedTuple):
    """Arrivals as they were, in seconds since the first."""

    offsets_s: "array[float]"  # not falling, the first is 0

    @property
    def lasts_s(self) -> float:
        return self.offsets_s[-1]

    def changed(self, speed: float | None, rate: float | None) -> "Recording":
        """Rule 3. Raises ConfigError where both are given."""
        if speed is not None and rate is not None:
            raise ConfigError("rate, speed: a recording takes one of them, as each follows from the other")
        if rate is not None:
            speed = rate * self.lasts_s / (len(self.offsets_s) - 1)
        return Recording(array("d", (offset / (speed or 1.0) for offset in self.offsets_s)))

    def arrivals(self, _rng: Random) -> Iterator[float]:
        return iter(self.offsets_s)


Source = Curve | Recording


def poisson(rate_per_s: float) -> Curve:
    """The same rate for ever."""
    return Curve(array("d", [0.0]), array("d", [rate_per_s]), math.inf)


def read_trace(path: Path) -> Source:
    """A file in one of FORMATS. Raises ConfigError, naming the line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            names = [name.strip() for name in rows.fieldnames or ()]
            for columns, read in FORMATS.items():
                if set(columns) <= set(names):
                    rows.fieldnames = names
                    return read(_numbered(rows, path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    known = "; ".join(", ".join(columns) for columns in FORMATS)
    raise ConfigError(f"{path} begins with the columns {', '.join(names) or '(none)'}; known are: {known}")


Rows = Iterator[tuple[str, Mapping[str, str]]]  # where a row stands, its cells by column


def _numbered(rows: "csv.DictReader[str]", path: Path) -> Rows:
    for row in rows:
        yield f"{path}, line {rows.line_num}", row


def _curve(rows: Rows) -> Curve:
    starts, rates = array("d"), array("d")
    for place, row in rows:
        start = _number(place, row, "start_s")
        if starts and start <= starts[-1]:
            raise ConfigError(f"{place}: start_s {start:g} does not come after {starts[-1]:g}")
        starts.append(start)
        rates.append(_number(place, row, "total_rps"))
    if len(starts) < 2 or not any(rates):
        raise ConfigError(f"a rate curve needs two points at least, and a rate above 0; there are {len(starts)} points")
    offsets = array("d", (start - starts[0] for start in starts))
    return Curve(offsets, rates, 2 * offsets[-1] - offsets[-2])  # the last piece is as long as the one before


def _azure(rows: Rows) -> Recording:
    return _recording(_timestamp(place, row["TIMESTAMP"]) for place, row in rows)


def _burst_gpt(rows: Rows) -> Recording:
    return _recording(_number(place, row, "Timestamp") for place, row in rows)


def _recording(times_s: Iterator[float]) -> Recording:
    """Rows may be somewhat out of order, as several machines wrote them."""
    ordered = sorted(times_s)
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        raise ConfigError(f"a recording needs arrivals at two times at least; there are {len(ordered)} arrivals")
    return Recording(array("d", (at - ordered[0] for at in ordered)))


FORMATS: dict[tuple[str, ...], Callable[[Rows], Source]] = {
    ("start_s", "total_rps"): _curve,  # a rate curve
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,  # Azure LLM inference
    ("Timestamp", "Model", "Request tokens", "Response tokens"): _burst_gpt,  # BurstGPT, seconds
}


def _number(place: str, row: Mapping[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{place}: {column} is {row[column]!r}, and not a number of 0 or more")
    return value


def _timestamp(place: str, text: str | None) -> float:
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        raise ConfigError(f"{place}: TIMESTAMP is {text!r}, and not a time like 2023-11-16 18:15:46.68") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()  # else a change of the clocks here would be in it
