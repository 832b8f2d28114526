"""`tediserve keys`: makes API keys for the gateway's key file, and checks such a file. Needs nothing that runs.

Exit codes: 0 done; 2 wrong usage, or the file would be refused.
"""

import argparse
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import msgspec

from services.gateway.keys import NAME, KeyLimits, hash_key, read_keys
from services.profile import Tier

_PREFIX = "tds-"  # lets scanners find a key that was published by mistake


def add_commands(parser: argparse.ArgumentParser) -> None:
    """`new` and `check`; `local` of what is parsed runs them and returns the exit code."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "makes a key: shows it once, on stderr, and writes the table for the key file to stdout (>> keys.toml)"
    new = commands.add_parser("new", help=text, description=text)
    new.add_argument("--name", required=True, type=_name, help="whose key it is: up to 64 letters, digits, - and _")
    new.add_argument(
        "--tier",
        dest="tiers",
        action="append",
        choices=get_args(Tier),
        help="service tier it may use; again for more. The first is what calls get that name none "
        "(default: default and flex)",
    )
    new.add_argument("--pin", action="store_true", help="it may pin the threshold")
    new.add_argument("--calls-per-s", type=float, metavar="N", help="in the long run; 0: no limit")
    new.add_argument("--burst", type=int, metavar="N", help="calls at once, after a pause")
    new.add_argument("--max-open", type=int, metavar="N", help="requests (prompts x n) open at once; 0: no limit")
    new.add_argument("--days", type=_days, metavar="N", help="until it expires (default: it does not)")
    new.add_argument("--json", action="store_true", help="key and table as JSON, both to stdout")
    new.set_defaults(local=_new)
    text = "says whether a gateway would take this key file, and if not why"
    check = commands.add_parser("check", help=text, description=text)
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(local=_check)


def _name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not up to 64 letters, digits, - and _")
    return text


def _days(text: str) -> float:
    if not 0 < (days := float(text)) <= 36525:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 36525 days")
    return days


def _new(arguments: argparse.Namespace) -> int:
    key = _PREFIX + secrets.token_urlsafe(32)
    table = _table(arguments, key)
    try:
        read_keys(table, KeyLimits())
    except ValueError as error:
        return _complain(str(error))
    if arguments.json:
        print(msgspec.json.encode({"name": arguments.name, "key": key, "table": table}).decode())
        return 0
    print(table, end="", flush=True)
    print(f"\nThe key of {arguments.name}, shown only now:\n{key}", file=sys.stderr)
    return 0


def _table(arguments: argparse.Namespace, key: str) -> str:
    lines = [f"[{arguments.name}]", f'sha256 = "{hash_key(key)}"']
    if arguments.tiers:
        lines.append("tiers = [" + ", ".join(f'"{tier}"' for tier in dict.fromkeys(arguments.tiers)) + "]")
    if arguments.pin:
        lines.append("pin = true")
    limits = {name: getattr(arguments, name) for name in ("calls_per_s", "burst", "max_open")}
    lines += [f"{name} = {value}" for name, value in limits.items() if value is not None]
    if arguments.days is not None:
        expires = datetime.now(UTC) + timedelta(days=arguments.days)
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    return "\n".join(["", *lines, ""])


def _check(arguments: argparse.Namespace) -> int:
    try:
        ring = read_keys(arguments.file.read_text(encoding="utf-8"), KeyLimits())
    except OSError as error:
        return _complain(f"{arguments.file} cannot be read: {error.strerror}")
    except ValueError as error:
        return _complain(f"{arguments.file}: {error}")
    print(f"{arguments.file} is fine: {len(ring.names)} keys ({', '.join(sorted(ring.names))})")
    return 0


def _complain(text: str) -> int:
    print(f"tediserve: {text}", file=sys.stderr)
    return 2
