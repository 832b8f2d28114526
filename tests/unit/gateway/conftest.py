"""A codec over the test tokenizer."""

from pathlib import Path

import pytest

from services.gateway.text import TextCodec
from services.profile import Profile, load_profile
from tests.integration.gateway_rig import load_test_codec, write_profile


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_test_codec(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder: Path = tmp_path_factory.mktemp("profile")
    return load_profile(write_profile(folder))
