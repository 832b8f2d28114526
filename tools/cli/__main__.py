"""`tediserve status | requests | drain | plan | keys`: what a cluster does, the order to drain an instance, API keys.

`keys` needs nothing; the others need NATS alone, at the address that the services use: `[nats]` in tediserve.toml, or
TEDISERVE_NATS_URL.
Exit codes: 0 done; 1 NATS is not there or does not answer; 2 wrong usage or configuration; 3 there is no such instance;
4 the instance has not ended in time; 130 interrupted.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec.structs import replace

from contracts.codec import MalformedMessage
from services.bus import Bus, BusTimeout, NatsSettings
from services.settings import ConfigError, load_section
from tools.cli import keys
from tools.cli.listener import Listener, NotDrained
from tools.cli.view import UnknownInstance

if TYPE_CHECKING:
    from rich.console import RenderableType

Command: TypeAlias = Callable[[Bus, Listener, argparse.Namespace], Coroutine[Any, Any, None]]

_CONNECT_LIMIT_S = 5.0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line, or these words; returns the exit code."""
    arguments = _parser().parse_args(words)
    if "local" in arguments:
        return int(arguments.local(arguments))
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    try:
        settings = load_section(NatsSettings, "nats")
        asyncio.run(_run(settings, arguments))
    except ConfigError as error:
        return _complain(error, 2)
    except BusTimeout as error:
        return _complain(
            f"{error}. Is the stack up? NATS is looked for where [nats] url says, or TEDISERVE_NATS_URL.", 1
        )
    except MalformedMessage as error:
        return _complain(f"what is stored cannot be read, it may be of a later version: {error}", 1)
    except ModuleNotFoundError as error:
        return _complain(f'{error.name} is not installed: pip install "tediserve[cli]", or ask for --json', 2)
    except UnknownInstance as error:
        return _complain(error, 3)
    except NotDrained as error:
        return _complain(error, 4)
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(error: object, code: int) -> int:
    print(f"tediserve: {error}", file=sys.stderr)
    return code


async def _run(settings: NatsSettings, arguments: argparse.Namespace) -> None:
    limit_s = min(settings.connect_limit_s, _CONNECT_LIMIT_S)
    bus = await Bus.connect(replace(settings, connect_limit_s=limit_s), "cli")
    try:
        listener = Listener(bus)
        await listener.start()
        command: Command = arguments.command
        await command(bus, listener, arguments)
    finally:
        await bus.close(drain=False)


# --- commands -----------------------------------------------------------------------------------------------------


async def _status(bus: Bus, listener: Listener, arguments: argparse.Namespace) -> None:
    status = await listener.status()
    if arguments.json:
        _print_json(status)
        return
    from rich.live import Live

    from tools.cli.tables import status_view

    if arguments.once or not sys.stdout.isatty():
        _print(status_view(status))
        return
    with Live(status_view(status), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(arguments.every)
            with contextlib.suppress(BusTimeout):
                status = await listener.status()
            live.update(status_view(status, connected=bus.connected), refresh=True)


async def _requests(bus: Bus, listener: Listener, arguments: argparse.Namespace) -> None:
    rows = await listener.requests()
    if arguments.json:
        _print_json(rows)
        return
    from tools.cli.tables import requests_view

    _print(requests_view(rows) if rows else "No request is open.")


async def _plan(bus: Bus, listener: Listener, arguments: argparse.Namespace) -> None:
    view = await listener.plan()
    if arguments.json:
        _print_json(view)
        return
    from tools.cli.tables import plan_view

    _print(plan_view(view))


async def _drain(bus: Bus, listener: Listener, arguments: argparse.Namespace) -> None:
    instance_id = await listener.order_drain(arguments.instance)
    held = listener.num_held(instance_id) or 0
    if not arguments.json:
        print(f"{instance_id} drains; it holds {held} requests")
    if arguments.wait:
        await listener.until_gone(instance_id, arguments.limit)
    if arguments.json:
        _print_json({"instance_id": instance_id, "gone": arguments.wait, "held_at_first": held})
    elif arguments.wait:
        print(f"{instance_id} is gone; its agent starts another one in its place, if the plan wants one")


def _print_json(what: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(what)).decode())


def _print(what: "RenderableType") -> None:
    from rich.console import Console

    console = Console()
    console.print(what, soft_wrap=not console.is_terminal)


# --- the command line ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tediserve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = _add(commands, "status", _status, "instances, load, leases, gateways; again and again in a terminal")
    status.add_argument("--once", action="store_true", help="once, and not again")
    status.add_argument("--every", type=_positive, default=1.0, metavar="S", help="seconds (default: %(default)g)")
    _add(commands, "requests", _requests, "all open requests, in order of their arrival")
    drain = _add(
        commands,
        "drain",
        _drain,
        "makes an instance hand its requests over and end; its agent then starts another, unless the plan has changed",
    )
    drain.add_argument("instance", metavar="INSTANCE", help="its id, or how the id of no other one begins")
    drain.add_argument("--no-wait", dest="wait", action="store_false", help="do not wait until it is gone")
    drain.add_argument("--limit", type=_positive, default=60.0, metavar="S", help="to wait (default: %(default)g s)")
    _add(commands, "plan", _plan, "what each node shall run, what it runs, and how far a change has come")
    text = "makes API keys for the gateway, and checks its key file"
    keys.add_commands(commands.add_parser("keys", help=text, description=text))
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: Command, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(command=command)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
