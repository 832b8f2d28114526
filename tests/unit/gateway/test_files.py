"""The files that the gateway's settings name: what is refused at start, and when a change is taken."""

import logging
import os
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization as s

from services.gateway.__main__ import load
from services.gateway.access import Access
from services.gateway.config import GatewayConfig
from services.gateway.files import Watched
from services.gateway.tls import ServerTls
from services.settings import ConfigError
from tests.certificates import write_certificate

GOOD = f"[alice]\nsha256 = '{'0' * 64}'\n"


# --- at start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no key"),
        (b"[alice]\nsha256 = 'x'", r"\[alice\] Expected `str`"),
        (b"\xff", "not valid UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_wrong_key_file_is_refused_at_start(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"key_file {path}.*{said}"):
        load(GatewayConfig(key_file=str(path)))


@pytest.mark.parametrize("fault", ["missing", "other key", "encrypted", "swapped"])
def test_wrong_tls_files_are_refused_at_start(tmp_path: Path, fault: str) -> None:
    settings = write_certificate(tmp_path, trustme.CA())
    key = tmp_path / "key.pem"
    match fault:
        case "missing":
            key.unlink()
        case "other key":
            key.write_bytes(trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes())
        case "encrypted":
            encrypt(key)
        case "swapped":
            settings = {"tls_certificate": settings["tls_key"], "tls_key": settings["tls_certificate"]}
    with pytest.raises(ConfigError, match="tls_key"):
        load(GatewayConfig(**settings))  # type: ignore[arg-type]


def encrypt(path: Path) -> None:
    key = s.load_pem_private_key(path.read_bytes(), None)
    encryption = s.BestAvailableEncryption(b"password")
    path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, encryption))


def test_a_renewed_certificate_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    settings = write_certificate(tmp_path, trustme.CA())
    tls = ServerTls(settings["tls_certificate"], settings["tls_key"])
    tls.read()
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="both in PEM"):
        tls.read()
    write_certificate(tmp_path, trustme.CA())
    tls.read()


# --- later -------------------------------------------------------------------------------------------------------


async def test_a_change_is_taken_once_it_has_settled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    taken: list[str] = []
    watched = Watched([str(path)], lambda: taken.append(path.read_text()))
    await watched.look()
    assert taken == []
    path.write_text("half of ")
    await watched.look()
    path.write_text("half of it, and the rest")
    await watched.look()
    assert taken == [], "it may still be written"
    for _ in range(3):
        await watched.look()
    assert taken == ["half of it, and the rest"], "once"
    assert "was read again" in caplog.text


async def test_what_cannot_be_used_is_told_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    access = Access(GatewayConfig(key_file=str(path)))
    access.read()
    ring = access._ring
    watched = Watched([str(path)], access.read)
    path.write_text("")
    for _ in range(5):
        await watched.look()
    path.unlink()
    for _ in range(5):
        await watched.look()
    assert caplog.text.count("so what it said before stays") == 2
    assert "holds no key" in caplog.text
    assert "No such file" in caplog.text
    assert access._ring is ring


async def test_a_link_that_is_pointed_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes changes what it has mounted."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "keys.toml"
    link.symlink_to("one")
    taken: list[str] = []
    watched = Watched([str(link)], lambda: taken.append(link.read_text()))
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").rename(link)
    await watched.look()
    await watched.look()
    assert taken == ["two"]
