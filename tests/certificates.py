"""Certificates for servers that tests start."""

from pathlib import Path

import trustme


def write_certificate(folder: Path, authority: trustme.CA) -> dict[str, str]:
    """For 127.0.0.1, by this authority; returns the gateway's settings for it."""
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    return {"tls_certificate": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
