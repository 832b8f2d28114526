"""How the local stack is laid out. Table `[up]`; what is set here wins over the tables of the services."""

from pathlib import Path

import msgspec


class UpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[up]`, `TEDISERVE_UP_*`, and the options of `python -m tools.up`."""

    host: str = "127.0.0.1"  # where the gateway listens; 0.0.0.0: on every address of this machine
    port: int = 8000  # of the gateway
    nats_port: int = 4222  # of the nats-server, on 127.0.0.1
    profile: str = "profiles/tiny-cpu"  # folder of the profile that is served
    workers: int = 2  # instances of the model
    data: str = "var"  # folder of the NATS store, the logs, the status file and the secrets
    secure: bool = False  # HTTPS and API keys for clients, TLS and a key of its own for each service at NATS
    ready_limit_s: float = 90.0  # from the start until an instance answers; then it is given up

    def __post_init__(self) -> None:
        for name in ("port", "nats_port"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name}: {getattr(self, name)} is no port, use 1 to 65535")
        if self.port == self.nats_port:
            raise ValueError(f"nats_port: {self.nats_port} is the gateway's port already")
        if not 1 <= self.workers <= 64:
            raise ValueError(f"workers: {self.workers} is not between 1 and 64")
        if self.ready_limit_s <= 0:
            raise ValueError(f"ready_limit_s: {self.ready_limit_s:g} is not positive")

    @property
    def connect_host(self) -> str:
        """Where a client on this machine finds the gateway."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def url(self) -> str:
        """The gateway's address for that client."""
        return f"{'https' if self.secure else 'http'}://{self.connect_host}:{self.port}"

    @property
    def nats_url(self) -> str:
        return f"{'tls' if self.secure else 'nats'}://127.0.0.1:{self.nats_port}"

    @property
    def folder(self) -> Path:
        """`data`, absolute."""
        return Path(self.data).absolute()

    @property
    def lock_file(self) -> Path:
        """Locked while the stack runs."""
        return self.folder / "up.lock"
