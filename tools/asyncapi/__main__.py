"""`python -m tools.asyncapi`: writes from `contracts/` what is made of it, in `docs/` and for nats-server."""

import tomllib
from pathlib import Path
from typing import Any

import yaml

from contracts import permissions
from tools.asyncapi.document import build
from tools.asyncapi.page import render

ROOT = Path(__file__).parents[2]
HEAD = "# Made by `make docs` from contracts/: change it there.\n"


class _Plain(yaml.SafeDumper):
    """Repeats what occurs twice, rather than refer to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated() -> dict[Path, str]:
    """What each file shall hold."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    document = yaml.dump(build(version), Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
    return {
        ROOT / "docs" / "asyncapi.yaml": HEAD + document,
        ROOT / "docs" / "contracts.md": render(),
        ROOT / "deploy" / "nats" / "users.conf": permissions.server_config(),
    }


def main() -> None:
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
