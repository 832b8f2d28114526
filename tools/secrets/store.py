"""A folder of secrets. What is there stays as it is, what is missing is made:

    nkeys/<service>.nk   the secret key of each service; NATS knows the public ones only
    nats.env             those: environment variables of nats-server, for deploy/nats/users.conf
    tls/ca.pem           who signed the certificates
    tls/nats.pem, .key   certificate of the nats-servers, and its key; gateway.pem and .key: of the gateway
    api-key              a key for clients, and api-keys.toml: what the gateway knows of it

To exchange a key, remove its file and run this again; to have certificates of your own, put them in place of tls/.
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nkeys
import trustme

from contracts.permissions import SERVICES, variable_of
from services.gateway.keys import hash_key

# All rights, no limits: keys for others have some (tediserve keys new).
_ADMIN = """[admin]
sha256 = "{}"
tiers = ["default", "flex", "priority"]
pin = true
calls_per_s = 0
max_open = 0
"""


class Secrets(NamedTuple):
    """Where they lie, and what is no secret of them."""

    folder: Path
    public_keys: dict[str, str]  # of the services, by variable of deploy/nats/users.conf

    @property
    def nkeys(self) -> Path:
        return self.folder / "nkeys"

    @property
    def nats_env(self) -> Path:
        return self.folder / "nats.env"

    @property
    def ca(self) -> Path:
        return self.folder / "tls" / "ca.pem"

    @property
    def api_key(self) -> Path:
        return self.folder / "api-key"

    @property
    def key_file(self) -> Path:
        return self.folder / "api-keys.toml"

    def nkey(self, service: str) -> Path:
        return self.nkeys / f"{service}.nk"

    def client_variables(self) -> dict[str, str]:
        """How a service on this machine finds its key, and knows the servers: as TEDISERVE_ variables."""
        return {"TEDISERVE_NATS_NKEYS": str(self.nkeys), "TEDISERVE_NATS_TLS_CA": str(self.ca)}

    def certificate(self, server: str) -> Path:
        """`server`: nats or gateway."""
        return self.folder / "tls" / f"{server}.pem"

    def private_key(self, server: str) -> Path:
        return self.folder / "tls" / f"{server}.key"

    def nats_variables(self) -> dict[str, str]:
        """The environment of nats-server: public keys of the services, and where its certificate lies."""
        return self.public_keys | {
            "NATS_TLS_CA": str(self.ca),
            "NATS_TLS_CERTIFICATE": str(self.certificate("nats")),
            "NATS_TLS_KEY": str(self.private_key("nats")),
        }


def make_secrets(folder: Path, hosts: Sequence[str]) -> Secrets:
    """Makes what is missing of them. `hosts`: names and addresses of the servers, for their certificates.

    Raises OSError, and ValueError for a key that is none.
    """
    made = Secrets(folder, {})
    for path in (folder, made.nkeys):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for service in SERVICES:
        if not made.nkey(service).exists():
            seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)  # type: ignore[no-untyped-call]
            write_secret(made.nkey(service), seed.decode() + "\n")
        made.public_keys[variable_of(service)] = _public_key(made.nkey(service))
    made.nats_env.write_text("".join(f"{name}={key}\n" for name, key in made.public_keys.items()), encoding="utf-8")
    if not made.ca.exists():
        _make_certificates(made, hosts)
    if not made.api_key.exists():
        key = "tds-" + secrets.token_urlsafe(32)
        write_secret(made.key_file, _ADMIN.format(hash_key(key)))
        write_secret(made.api_key, key + "\n")
    return made


def write_secret(path: Path, text: str, mode: int = 0o600) -> None:
    """A file that only its owner may read, unless `mode` says otherwise, whole or not at all. Raises OSError."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    draft.replace(path)


def _make_certificates(made: Secrets, hosts: Sequence[str]) -> None:
    """Signed by an authority whose key is thrown away: nobody can sign another one."""
    shutil.rmtree(made.ca.parent, ignore_errors=True)
    made.ca.parent.mkdir(mode=0o700)
    authority = trustme.CA(organization_name="TediServe")
    for server, mode in (("nats", 0o640), ("gateway", 0o600)):  # nats-server may be of the group (compose/secure.yml)
        issued = authority.issue_cert(*hosts, common_name=server, organization_name="TediServe")
        chain = "".join(blob.bytes().decode() for blob in issued.cert_chain_pems)
        write_secret(made.certificate(server), chain, mode)
        write_secret(made.private_key(server), issued.private_key_pem.bytes().decode(), mode)
    write_secret(made.ca, authority.cert_pem.bytes().decode())  # last: all the others are there


def _public_key(path: Path) -> str:
    """Of a seed's file. Raises ValueError."""
    try:
        pair = nkeys.from_seed(bytearray(path.read_bytes().strip()))  # type: ignore[no-untyped-call]
        public: bytes = pair.public_key
    except Exception as error:  # nkeys has no common ancestor for what it raises
        raise ValueError(f"{path} holds no nkey seed ({error!r}): remove it, and another one is made") from None
    return public.decode()
