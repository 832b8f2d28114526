"""The whole stack that the end-to-end tests talk to: started once, as `make up` starts it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import random_model
from tests.integration.stack import Stack, running_stack
from tests.processes import ROOT, plain_environment

BUILT_IN_PROFILE = ROOT / "profiles" / "tiny-cpu"


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's; where its weights are not there, one with random weights."""
    if (BUILT_IN_PROFILE / "model" / "config.json").exists():
        return BUILT_IN_PROFILE
    return random_model.write_profile(tmp_path_factory.mktemp("random") / "profile")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, profile: Path) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("e2e"), profile) as running:
        yield running
        assert "Traceback" not in running.logs(), running.logs()


@pytest.fixture(scope="session")
def base_url(stack: Stack) -> str:
    """Where the server is, without a slash at the end."""
    return stack.url


@pytest.fixture(scope="session")
def client_environment(base_url: str) -> dict[str, str]:
    """Of client programs: where the server is and the key for it, by the names that OpenAI's SDK and others read."""
    return plain_environment(OPENAI_BASE_URL=f"{base_url}/v1", OPENAI_API_KEY="none")


@pytest.fixture(scope="session")
def server_log(stack: Stack) -> Callable[[], str]:
    """All that the gateway has logged so far."""
    return (stack.data / "log" / "gateway.log").read_text
