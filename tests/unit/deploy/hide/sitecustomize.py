"""Python runs this at its start: the modules that HIDDEN_MODULES names (comma-separated) are not there for it."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HIDDEN = frozenset(os.environ["HIDDEN_MODULES"].split(","))


class _Hide:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in _HIDDEN:
            raise ModuleNotFoundError(f"{name} belongs to no distribution that is installed here", name=name)


sys.meta_path.insert(0, _Hide)
