"""The server that the end-to-end tests talk to."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.messages import GenerateRequest
from tests.conftest import NatsServer
from tests.integration.gateway_rig import Play, build_tokenizer, rig_in_thread

_ANSWER = "The answer is 42 ✓ and naïve 😀 people may well want many more words than that, says the worker."


class _LogKeeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="session")
def _log_keeper() -> Iterator[_LogKeeper]:
    keeper = _LogKeeper()
    logging.getLogger().addHandler(keeper)
    yield keeper
    logging.getLogger().removeHandler(keeper)


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory, _log_keeper: _LogKeeper) -> Iterator[str]:
    """Where the server is, without a slash at the end."""
    folder: Path = tmp_path_factory.mktemp("e2e")
    ids = build_tokenizer().encode(_ANSWER).ids

    def script(request: GenerateRequest) -> Play:
        return Play(ids, "length" if request.max_tokens <= len(ids) else "eos", block_s=0.005)

    server = NatsServer(folder)
    server.start()
    try:
        with rig_in_thread(server.url, folder / "profile", script) as url:
            yield url
    finally:
        server.kill()


@pytest.fixture(scope="session")
def server_log(_log_keeper: _LogKeeper) -> Callable[[], str]:
    """All that the server has logged so far."""
    return lambda: "\n".join(_log_keeper.lines)
