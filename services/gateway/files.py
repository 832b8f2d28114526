"""Files of the gateway that may change while it runs: read again once they have settled."""

import logging
import os
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Watched:
    """Files that belong together. `take` reads them; it raises ValueError or OSError, and then what was read stays."""

    def __init__(self, paths: Sequence[str], take: Callable[[], None]) -> None:
        self._paths = paths
        self._take = take
        self._taken = self._seen = self._look()

    async def look(self) -> None:
        """Takes a change that is no newer than the last look: who writes a file in parts is given that time."""
        seen, before = self._look(), self._seen
        self._seen = seen
        if seen == self._taken or seen != before:
            return
        self._taken = seen
        told = ", ".join(self._paths)
        try:
            self._take()
        except (ValueError, OSError) as error:
            logger.error("%s has changed and cannot be used, so what it said before stays: %s", told, error)
        else:
            logger.info("%s has changed and was read again", told)

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, ...] | None:
    """Another one after every change; None where there is no file. Links are followed, as mounted secrets are links."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
