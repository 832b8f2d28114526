"""Configuration: one TOML file for the deployment, overridden by the environment, checked at start.

`TEDISERVE_CONFIG` names the file (default: `tediserve.toml` in the working directory, if it is there). Each service
reads the table of its own name besides `[nats]`, `[log]` and `[telemetry]`; `TEDISERVE_GATEWAY_PORT=8080` overrides
`port` in `[gateway]`. A table, key or variable that nobody reads is refused: it is most likely a slip of the pen.
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
SECTIONS = (
    "nats",
    "log",
    "telemetry",
    "gateway",
    "scheduler",
    "step_predictor",
    "threshold_controller",
    "workload_monitor",
    "reconfigurator",
    "worker",
    "agent",
    "up",
)


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
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for name in tables:
        if name not in SECTIONS:
            raise ConfigError(f"{path}: [{name}] is not a table that anyone reads; there are {', '.join(SECTIONS)}")
    return tables


def load_section(config: type[C], section: str, environ: Mapping[str, str] | None = None) -> C:
    """The table `[section]` as a `config` Struct. Raises ConfigError, naming the key."""
    environ = os.environ if environ is None else environ
    table = read_file(environ).get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{section}] must be a table")
    try:
        # not strict: the environment knows only text, so "8080" is a port
        return msgspec.convert(table | _overrides(config, section, environ), config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{section}] {error}") from None


def _overrides(config: type[C], section: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Values from the environment by key of the section. Raises ConfigError for a variable that is no one's."""
    prefixes = tuple(f"{PREFIX}{name.upper()}_" for name in SECTIONS)
    keys = {field.name for field in msgspec.structs.fields(config)}  # type: ignore[arg-type]
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable == f"{PREFIX}CONFIG":
            continue
        if not variable.startswith(prefixes):
            raise ConfigError(f"{variable} is of no table; there are {', '.join(SECTIONS)}")
        own = f"{PREFIX}{section.upper()}_"
        if variable.startswith(own):
            key = variable.removeprefix(own).lower()
            if key not in keys:
                raise ConfigError(f"{variable}: [{section}] has no {key}; its keys are {', '.join(sorted(keys))}")
            found[key] = value
    return found
