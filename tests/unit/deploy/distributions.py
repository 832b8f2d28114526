"""What pyproject.toml's extras install, and a Python that sees nothing else: an image without building one."""

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.processes import ROOT, plain_environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
_OURS = {"contracts", "services"}  # an image holds tools too, which no service may need


def closure(*extras: str) -> dict[str, list[Requirement]]:
    """All distributions that `tediserve[extras]` installs, each with what is required of it."""
    waiting = [Requirement(text) for text in PROJECT["dependencies"]]
    waiting += [Requirement(f"tediserve[{','.join(extras)}]")]
    found: dict[str, list[Requirement]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name != "tediserve":
            found.setdefault(name, []).append(requirement)
        if (key := (name, frozenset(requirement.extras))) not in seen:
            seen.add(key)
            waiting += _required_by(name, requirement.extras)
    return found


def _required_by(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    if name == "tediserve":
        for extra in sorted(extras):
            yield from map(Requirement, EXTRAS[extra])
        return
    for text in metadata.distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield requirement


def environment_with_only(extras: Iterable[str], **more: str) -> dict[str, str]:
    """For a process that can import our services and what those extras install, and nothing else."""
    installed = closure(*extras).keys()
    hidden = [
        module
        for module, names in metadata.packages_distributions().items()
        if module not in _OURS and not installed & {canonicalize_name(name) for name in names}
    ]
    hide = str(Path(__file__).parent / "hide")
    return plain_environment(PYTHONPATH=hide, HIDDEN_MODULES=",".join(["tools", "tests", *hidden]), **more)
