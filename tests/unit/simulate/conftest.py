"""A recording made with a small random model."""

from pathlib import Path

import pytest

from tests.unit.traces.conftest import write_profile
from tools.traces.reader import Traces, open_traces
from tools.traces.recorder import RecordJob, record


@pytest.fixture(scope="session")
def random_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thresholds 0.2, 0.3, 0.45; blocks of 8."""
    return write_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def recording(random_profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """6 prompts with the dual cache, at every threshold and at some that change."""
    out = tmp_path_factory.mktemp("traces")
    record(RecordJob(profile=random_profile, out=out, num_prompts=6, caches=("dual",)))
    return open_traces(out)
