"""`tediserve keys`: what it prints can be used as it is."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from services.gateway.keys import ApiKey, KeyLimits, read_keys
from tools.cli.__main__ import main

LIMITS = KeyLimits(calls_per_s=1.0, burst=2, max_open=3)


def test_new_keys_work_in_the_file_that_they_are_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    keys = []
    rights = ["--tier", "priority", "--tier", "default", "--pin", "--calls-per-s", "0.5", "--burst", "7"]
    for words in (["alice"], ["bob", *rights, "--max-open", "0", "--days", "30"]):
        assert main(["keys", "new", "--name", *words]) == 0
        told = capsys.readouterr()
        with file.open("a") as opened:
            opened.write(told.out)
        keys.append(told.err.split()[-1])
        assert keys[-1] not in told.out, "only what may lie in a file goes there"
    now = datetime.now(UTC)
    ring = read_keys(file.read_text(), LIMITS)
    alice, bob = (ring.find(f"Bearer {key}", now.timestamp()) for key in keys)
    assert isinstance(alice, ApiKey)
    assert isinstance(bob, ApiKey)
    assert (alice.name, alice.tiers, alice.pin, alice.max_open) == ("alice", ("default", "flex"), False, 3)
    assert (bob.name, bob.tiers, bob.pin) == ("bob", ("priority", "default"), True)
    assert (bob.calls_per_s, bob.burst, bob.max_open) == (0.5, 7, 0)
    assert bob.expires is not None
    assert timedelta(days=29) < bob.expires - now < timedelta(days=31)
    assert len(set(keys)) == 2
    assert main(["keys", "check", str(file)]) == 0
    assert "2 keys (alice, bob)" in capsys.readouterr().out


def test_json_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--name", "alice", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    found = read_keys(told["table"], LIMITS).find(f"Bearer {told['key']}", 0.0)
    assert isinstance(found, ApiKey)
    assert found.name == told["name"] == "alice"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "a b"], "'a b'"),
        (["--name", "alice", "--days", "0"], "--days"),
        (["--name", "alice", "--tier", "gold"], "gold"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_a_gateway_would_refuse_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--name", "alice", "--burst", "0"]) == 2
    assert "burst" in capsys.readouterr().err
    (tmp_path / "keys.toml").write_text("[alice]\npin = true\n")
    assert main(["keys", "check", str(tmp_path / "keys.toml")]) == 2
    assert "[alice]" in capsys.readouterr().err
    assert main(["keys", "check", str(tmp_path / "nowhere.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
