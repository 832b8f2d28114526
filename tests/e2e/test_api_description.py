"""What the server's OpenAPI description says holds, as far as schemathesis can find out.

It makes requests from the description, valid and invalid ones, follows the links between them, and holds every answer
against it. API_EXAMPLES sets how many requests it makes up for each operation; `make test-api` asks for more, and for
all that it lists by rule beside them ("coverage").
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FULL = int(os.environ.get("API_EXAMPLES", "0"))
EXCLUDED = ",".join(
    [
        "positive_data_acceptance",  # what a schema cannot say is refused: the context's length, options in conflict
        "use_after_free",  # DELETE cancels a call; its result, so far as there is one, stays
    ]
)


def interactions(report: Path) -> list[dict[str, Any]]:
    """All requests that were sent, with their answers."""
    events = [json.loads(line) for line in report.read_text().splitlines()]
    scenarios = [event["ScenarioFinished"] for event in events if "ScenarioFinished" in event]
    return [found for scenario in scenarios for found in scenario["recorder"].get("interactions", {}).values()]


def test_no_server_error_and_nothing_that_is_not_described(
    base_url: str, client_environment: dict[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "report.ndjson"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{base_url}/schema/openapi.json", "--no-color"]
    command += ["--checks", "all", "--exclude-checks", EXCLUDED, "--continue-on-failure", "--no-shrink"]
    command += ["--max-examples", str(FULL or 12), "--generation-deterministic"]
    command += ["--phases", "examples,coverage,fuzzing,stateful" if FULL else "examples,fuzzing,stateful"]
    command += ["--header", f"Authorization: Bearer {client_environment['OPENAI_API_KEY']}", "--request-timeout", "60"]
    command += ["--report", "ndjson", "--report-ndjson-path", str(report)]
    if ca_file := client_environment.get("SSL_CERT_FILE"):
        command += ["--tls-verify", ca_file]
    limit_s = 1700 if FULL else 600
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    statuses: Counter[int | None] = Counter()
    calls: Counter[int] = Counter()  # of valid ones and others
    for found in interactions(report):
        status = found["response"]["status_code"] if found["response"] else None
        statuses[status] += 1
        if found["request"]["method"] == "POST" and "completions" in found["request"]["uri"]:
            calls[status or 0] += 1
    print(f"{sum(statuses.values())} requests, by status: {sorted(statuses.items(), key=str)}; calls: {dict(calls)}")
    assert None not in statuses, "a request had no answer"
    assert max(statuses) < 500  # type: ignore[type-var]
    assert sum(statuses.values()) >= (2000 if FULL else 150), statuses
    assert min(calls[200], calls[400]) >= 5, calls
