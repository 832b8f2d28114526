"""A recording of a small random model."""

from pathlib import Path

import pytest

from tests.unit.traces.conftest import write_profile
from tools.traces.reader import Traces, open_traces
from tools.traces.recorder import RecordJob, record


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def traces(profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """24 prompts at three thresholds and with thresholds that change from block to block."""
    out = tmp_path_factory.mktemp("traces")
    record(RecordJob(profile=profile, out=out, num_prompts=24, changing=("blocks",)))
    return open_traces(out)
