"""What each service may publish and subscribe to on NATS: the least that its channels need.

1. It may publish what `CHANNELS` says that it says, and subscribe to what it hears. To what is stored it does not
   subscribe: a consumer delivers that to the service's own inbox.
2. Answers come to `_INBOX.<service>.>`, which nobody else may read. Who hears requests may answer them, and may
   publish nothing else to anybody's inbox.
3. Who reads a stream may ask whether it is there and make consumers of it; who writes to it may look at its last
   messages, since every write continues from one. JetStream decides all this by stream, not by subject.
4. STREAM_MAKER alone makes streams and changes their settings.
5. A lease is its holder's to write. Giving it up is a purge, which JetStream allows by stream: who holds a lease could
   empty the whole bucket.
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from contracts.subjects import (
    CHANNELS,
    CLUSTER_STREAM,
    LEASES,
    PROGRESS,
    REQUESTS,
    STREAM_MAKER,
    Service,
    cluster_key,
)

SERVICES: tuple[Service, ...] = get_args(Service)
STREAMS = (REQUESTS, PROGRESS, CLUSTER_STREAM)

_API = "$JS.API"


class Permissions(NamedTuple):
    """Of one service: subject patterns, sorted."""

    publish: list[str]
    subscribe: list[str]
    answers: bool  # may publish to where a request that it hears wants its answer


def inbox_of(service: str) -> str:
    """The prefix of the subjects where the service gets answers and what it follows."""
    return f"_INBOX.{service}"


def stream_of(pattern: str) -> str:
    """The stream that stores a subject of kind "stream". Raises KeyError."""
    return {"req": REQUESTS, "prog": PROGRESS, "$KV": CLUSTER_STREAM}[pattern.partition(".")[0]]


def streams_of(service: Service) -> list[str]:
    """Those that the service writes or reads, by name."""
    used = {stream_of(c.pattern) for c in CHANNELS if c.kind == "stream" and service in c.said_by + c.heard_by}
    return sorted(used | ({CLUSTER_STREAM} if service in LEASES else set()))


def permissions_of(service: Service) -> Permissions:
    said = [c for c in CHANNELS if service in c.said_by]
    heard = [c for c in CHANNELS if service in c.heard_by]
    publish = {c.pattern for c in said}
    publish |= {f"{_API}.STREAM.MSG.GET.{stream}" for stream in streams_of(service)}
    for stream in {stream_of(c.pattern) for c in heard if c.kind == "stream"}:
        publish |= {
            f"{_API}.STREAM.INFO.{stream}",
            f"{_API}.CONSUMER.CREATE.{stream}",
            f"{_API}.CONSUMER.INFO.{stream}.*",
            f"$JS.FC.{stream}.>",  # flow control: "I have read so far"
        }
    if service == STREAM_MAKER:
        publish |= {f"{_API}.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE") for stream in STREAMS}
        publish.add(f"{_API}.STREAM.PURGE.{REQUESTS}")  # of requests that are done
    if service in LEASES:
        publish |= {cluster_key(LEASES[service]), f"{_API}.STREAM.PURGE.{CLUSTER_STREAM}"}
    subscribe = {c.pattern for c in heard if c.kind != "stream"} | {f"{inbox_of(service)}.>"}
    return Permissions(sorted(publish), sorted(subscribe), any(c.kind == "request" for c in heard))


def variable_of(service: str) -> str:
    """The environment variable of nats-server that holds the service's public key."""
    return f"NATS_NKEY_{service.upper().replace('-', '_')}"


def server_config() -> str:
    """The `authorization` of nats-server. Keys come from its environment, so that this file is the same everywhere."""
    users = "\n".join(_user(service) for service in SERVICES)
    return (
        "# Made by `make docs` from contracts/: change it there. Who may say and hear what, by service.\n"
        "# The public key of each is an environment variable of nats-server: python -m tools.secrets makes them.\n"
        f"authorization {{\n  users: [\n{users}\n  ]\n}}\n"
    )


def _user(service: Service) -> str:
    may = permissions_of(service)
    answers = '\n        allow_responses: {max: 1, expires: "1m"}' if may.answers else ""
    return (
        f"    {{ # {service}\n"
        f"      nkey: ${variable_of(service)}\n"
        "      permissions: {\n"
        f"        publish: {{allow: [{_listed(may.publish)}]}}\n"
        f"        subscribe: {{allow: [{_listed(may.subscribe)}]}}{answers}\n"
        "      }\n"
        "    }"
    )


def _listed(subjects: Sequence[str]) -> str:
    return "".join(f'\n          "{subject}"' for subject in subjects) + "\n        "
