"""The whole stack that the end-to-end tests talk to: started once, as `make up SECURE=1` starts it.

So everything here goes through HTTPS with an API key, and through NATS with TLS and a key for each service. Tests that
start stacks of their own, and those in tests/integration, use plain ones.
"""

import os
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
    with (
        running_stack(tmp_path_factory.mktemp("e2e"), profile, secure=True) as running,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("SSL_CERT_FILE", str(running.secrets.ca))  # what clients of the tests trust
        yield running
        assert "Traceback" not in running.logs(), running.logs()
        assert "permissions violation" not in running.logs().lower(), running.logs()


@pytest.fixture(scope="session")
def base_url(stack: Stack) -> str:
    """Where the server is, without a slash at the end."""
    return stack.url


@pytest.fixture(scope="session")
def api_key(stack: Stack) -> str:
    return stack.secrets.api_key.read_text().strip()


@pytest.fixture(scope="session")
def client_environment(base_url: str, api_key: str) -> dict[str, str]:
    """Of client programs: where the server is, the key for it and who signed its certificate, by the usual names."""
    trusted = os.environ["SSL_CERT_FILE"]
    return plain_environment(
        OPENAI_BASE_URL=f"{base_url}/v1", OPENAI_API_KEY=api_key, SSL_CERT_FILE=trusted, CURL_CA_BUNDLE=trusted
    )


@pytest.fixture(scope="session")
def server_log(stack: Stack) -> Callable[[], str]:
    """All that the gateway has logged so far."""
    return (stack.data / "log" / "gateway.log").read_text
