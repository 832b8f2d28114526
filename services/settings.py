"""Configuration: one TOML file for the deployment, overridden by the environment, checked at start.

`TEDISERVE_CONFIG` names the file (default: `tediserve.toml` in the working directory, if it is there). Each service
reads the table of its own name besides `[nats]` and `[log]`; `TEDISERVE_GATEWAY_PORT=8080` overrides `port` in
`[gateway]`.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

C = TypeVar("C")

DEFAULT_FILE = "tediserve.toml"
PREFIX = "TEDISERVE_"


class ConfigError(ValueError):
    """A setting is wrong; says which, why, and what would be right."""


def read_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """The deployment's TOML as nested dicts; empty without a file. Raises ConfigError."""
    named = environ.get(f"{PREFIX}CONFIG")
    path = Path(named or DEFAULT_FILE)
    if not path.exists():
        if named:
            raise ConfigError(f"{PREFIX}CONFIG names {named}, which does not exist")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def load_section(config: type[C], section: str, environ: Mapping[str, str] | None = None) -> C:
    """The table `[section]` as a `config` Struct. Raises ConfigError, naming the key."""
    environ = os.environ if environ is None else environ
    table = read_file(environ).get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{section}] must be a table")
    values = dict(table)
    prefix = f"{PREFIX}{section.upper()}_"
    for field in msgspec.structs.fields(config):  # type: ignore[arg-type]
        override = environ.get(prefix + field.name.upper())
        if override is not None:
            values[field.name] = override
    try:
        # not strict: the environment knows only text, so "8080" is a port
        return msgspec.convert(values, config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{section}] {error}") from None
