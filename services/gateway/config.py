"""The gateway's settings. Table `[gateway]`."""

import msgspec

_LOWEST = {
    "max_body_bytes": 1024,
    "max_open_calls": 1,
    "max_choices": 1,
    "max_prompt_tokens": 0,
    "max_connections": 1,
    "key_calls_per_s": 0.0,
    "key_burst": 1,
    "key_max_open": 0,
    "body_limit_s": 0.1,
    "admit_limit_s": 0.1,
    "refusal_limit_s": 0.0,
    "no_instance_limit_s": 0.0,
    "ping_every_s": 0.1,
    "send_limit_s": 1.0,
    "drain_limit_s": 0.0,
}


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens and what it bears."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one, named in the log
    profile: str = "profiles/tiny-cpu"  # folder of the profile that is served
    metrics_port: int = 0  # metrics there, whatever `public_metrics` says; 0: nowhere
    public_metrics: bool = True  # metrics at /metrics of the gateway's own port too, without a key
    tls_certificate: str = ""  # PEM file with the certificate and those between it and its root; "": no TLS
    tls_key: str = ""  # PEM file with its key, unencrypted
    key_file: str = ""  # TOML file with the API keys (services/gateway/keys.py); "": everybody may call
    key_calls_per_s: float = 20.0  # of a key that names no rate of its own; 0: no limit
    key_burst: int = 40  # of a key that names none: calls at once, after a pause
    key_max_open: int = 128  # of a key that names no number: open requests (prompts x n) here; 0: no limit
    max_body_bytes: int = 2**20  # of one HTTP request; more is answered 413
    max_open_calls: int = 1024  # being answered at once; one more is answered 429
    max_connections: int = 4096  # of clients, busy or idle; one more is answered 503
    max_choices: int = 16  # of one call: prompts x n
    max_prompt_tokens: int = 0  # of one prompt, where the profile allows more; 0: what the profile allows
    body_limit_s: float = 30.0  # for a client to send the head of a request, and again for its body
    admit_limit_s: float = 5.0  # for NATS to take a request in; then 503
    refusal_limit_s: float = 0.5  # a stream with a deadline waits so long for a refusal before its 200
    no_instance_limit_s: float = 10.0  # without a sign of life from any instance: then 503
    ping_every_s: float = 10.0  # SSE comment while a stream has nothing to say
    send_limit_s: float = 60.0  # a client that reads nothing for so long has gone
    drain_limit_s: float = 30.0  # running calls may finish when the gateway is asked to stop
    idempotency_secret: str = "tediserve"  # the same on all gateways; with it an Idempotency-Key yields a call's id

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not between 0 and 65535")
        for name, lowest in _LOWEST.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name}: {getattr(self, name)} is below {lowest:g}")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate, tls_key: give both, or none for no TLS")
        if not 1 <= len(self.idempotency_secret.encode()) <= 64:
            raise ValueError("idempotency_secret: give 1 to 64 bytes")
