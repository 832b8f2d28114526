"""Which lines of a log reach the console, and how the files are kept."""

from pathlib import Path

import pytest

from tools.up import logs
from tools.up.logs import Filter, Log


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("12:00:00 INFO    gateway: listening", False),
        ("12:00:00 WARNING gateway: connection to NATS lost", True),
        ("12:00:00 ERROR   gateway: stopping", True),
        ('{"time": "2030-01-01T00:00:00.000Z", "level": "INFO", "service": "gateway", "message": "ERROR"}', False),
        ('{"time": "2030-01-01T00:00:00.000Z", "level": "ERROR", "service": "gateway", "message": "x"}', True),
        ("[12] 2030/01/01 12:00:00.123456 [INF] Server is ready", False),
        ("[12] 2030/01/01 12:00:00.123456 [WRN] Healthcheck failed", True),
        ("[12] 2030/01/01 12:00:00.123456 [FTL] address already in use", True),
        ("ModuleNotFoundError: No module named 'torch'", True),
    ],
)
def test_only_what_matters_is_shown(line: str, shown: bool) -> None:
    assert Filter().shows(line) is shown


def test_a_traceback_goes_with_its_record() -> None:
    lines = (
        "12:00:00 INFO    worker: ready",
        "what belongs to the info record",
        "12:00:01 ERROR   worker: stopping after an unexpected error",
        "Traceback (most recent call last):",
        "ValueError: no",
        "12:00:02 INFO    worker: ready",
    )
    only_important = Filter()
    assert [only_important.shows(line) for line in lines] == [False, False, True, True, True, False]


def test_lines_are_read_whole_and_once(tmp_path: Path) -> None:
    log = Log(tmp_path, "gateway")
    log.file.write(b"one\ntw")
    assert log.new_lines() == ["one"]
    log.file.write("o\nthr\u00e9e\n".encode())
    assert log.new_lines() == ["two", "thr\u00e9e"]
    assert log.new_lines() == []
    log.close()


def test_the_previous_run_is_kept_beside(tmp_path: Path) -> None:
    for run in (b"first\n", b"second\n"):
        log = Log(tmp_path, "gateway")
        log.file.write(run)
        log.close()
    assert (tmp_path / "gateway.log").read_bytes() == b"second\n"
    assert (tmp_path / "gateway.log.1").read_bytes() == b"first\n"


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 10)
    log = Log(tmp_path, "gateway")
    log.file.write(b"0123456789ab\n")
    assert log.new_lines() == ["0123456789ab"]
    log.file.write(b"next\n")
    assert log.new_lines() == ["next"]
    assert (tmp_path / "gateway.log").read_bytes() == b"next\n"
    assert (tmp_path / "gateway.log.1").read_bytes() == b"0123456789ab\n"
    log.close()
