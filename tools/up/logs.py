"""The logs of the stack: each process writes into a file of its own, and what matters is shown on the console.

1. The processes write the files themselves. A console that hangs, or this process stopped, never blocks a service.
2. `<name>.log` is this run's, `<name>.log.1` what came before; a log that reaches MAX_BYTES becomes the latter too.
3. Shown are records of level WARNING and above, with the lines that follow them (a traceback), and lines that are no
   log records at all (an interpreter that fails before logging is set up).
"""

import re
from pathlib import Path
from typing import IO

MAX_BYTES = 32 * 2**20

_RECORD = re.compile(
    r"""
    \d\d:\d\d:\d\d \s+ (?P<text>[A-Z]+) \s          # ours: 12:00:00 WARNING scheduler: ...
    | \{ .* "level": \s* "(?P<json>[A-Z]+)"         # ours, format = "json"
    | \[\d+\] \s [\d/]+ \s [\d:.]+ \s \[(?P<nats>[A-Z]+)\]  # nats-server: [1] 2030/01/01 12:00:00.000000 [WRN] ...
    """,
    re.VERBOSE,
)
_QUIET = frozenset(("DEBUG", "INFO", "INF", "DBG", "TRC"))


class Filter:
    """Rule 3, for the lines of one process."""

    def __init__(self) -> None:
        self._show = True

    def shows(self, line: str) -> bool:
        record = _RECORD.match(line)
        if record is not None:
            self._show = record[record.lastgroup or 0] not in _QUIET
        return self._show


class Log:
    """The log file of one process: it is written through `file` and read by `new_lines`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.log"
        self._previous = folder / f"{name}.log.1"
        if self.path.exists():
            self.path.replace(self._previous)
        # append: after a truncation the writers go on at the file's new end
        self.file: IO[bytes] = self.path.open("ab", buffering=0)
        self._reader = self.path.open("rb")
        self._partial = b""

    def new_lines(self) -> list[str]:
        """The whole lines that have come since the last call."""
        *lines, self._partial = (self._partial + self._reader.read()).split(b"\n")
        if self._reader.tell() > MAX_BYTES:
            self._set_aside()
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        self.file.close()
        self._reader.close()

    def _set_aside(self) -> None:
        self._previous.write_bytes(self.path.read_bytes())
        self.file.truncate(0)
        self._reader.seek(0)
