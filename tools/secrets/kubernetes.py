"""The secrets as objects of Kubernetes, as deploy/k8s mounts them: each pod gets its own service's key only."""

from typing import Any

from contracts.permissions import SERVICES
from tools.secrets.store import Secrets

_WITH = {"agent": ("agent", "worker")}  # whose pod runs others too: its keys


def manifests(made: Secrets) -> list[dict[str, Any]]:
    """Raises OSError."""
    ca = made.ca.read_text(encoding="utf-8")
    objects = [
        _secret("nats-server", made.public_keys),  # variables of nats-server
        _secret(
            "nats-tls",
            {
                "ca.pem": ca,
                "tls.crt": made.certificate("nats").read_text(encoding="utf-8"),
                "tls.key": made.private_key("nats").read_text(encoding="utf-8"),
            },
        ),
        _secret("gateway-keys", {"api-keys.toml": made.key_file.read_text(encoding="utf-8")}),
    ]
    for pod in SERVICES:
        if pod not in ("worker", "cli"):
            keys = {f"{name}.nk": made.nkey(name).read_text(encoding="utf-8") for name in _WITH.get(pod, (pod,))}
            objects.append(_secret(f"nats-{pod}", {"ca.pem": ca} | keys))
    return objects


def _secret(name: str, data: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "tediserve"}},
        "stringData": data,
    }
