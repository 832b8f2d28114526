"""More than 500 malformed or hostile HTTP requests: no 5xx, no hang, no traceback, and the server serves on.

Bodies are made from the server's own OpenAPI description, by putting wrong values at the places that it names; the
rest is written by hand, as bytes on a socket.
"""

import contextlib
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.e2e

LIMIT_S = 20.0  # for any one request; far more than any may take
BODIES = 440  # made by hypothesis; with what is written by hand, more than 500

sent: Counter[str] = Counter()  # by kind of answer


@pytest.fixture(scope="module")
def client(base_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture(scope="module")
def schemas(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/schema/openapi.json").json()["components"]["schemas"]
    return found


@pytest.fixture(autouse=True)
def unharmed(client: httpx.Client, model: str, server_log: Callable[[], str]) -> Iterator[None]:
    """After each test the server serves as before, and nothing has raised."""
    before = len(server_log())
    yield
    body = {"model": model, "messages": [{"role": "user", "content": "1 + 1 ="}], "max_tokens": 4}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert "Traceback" not in server_log()[before:]


def check(response: httpx.Response) -> None:
    """It is an answer, and an error has the envelope."""
    sent[str(response.status_code)] += 1
    assert 200 <= response.status_code < 500, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400 and response.request.method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(error["message"]) < 2000


# --- bodies from the schema --------------------------------------------------------------------------------------

_NASTY_TEXT = st.sampled_from(
    ["", "\0", "<|mdm_mask|>", "<|endoftext|>", "{{7*7}}", "{% for %}", "../../etc/passwd", "\ufffd", "\U0010ffff",
     "a" * 3000, "prog.*.>", "'; DROP TABLE x;--", "\r\nx-evil: 1", "‮", "\ue000"]
)  # fmt: skip
_SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**40])
    | st.sampled_from([0.0, -0.0, 1e-320, 1e308, 0.5, 1.5, -2.5])
    | _NASTY_TEXT
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | _NASTY_TEXT, inner, max_size=3),
    max_leaves=6,
)


def fields_of(schemas: dict[str, Any], name: str) -> list[str]:
    return sorted(schemas[name]["properties"])


def valid_body(kind: str, model: str) -> dict[str, Any]:
    """Short, so that what is accepted after all costs little."""
    if kind == "ChatBody":
        return {"model": model, "messages": [{"role": "user", "content": "1 + 1 ="}], "max_tokens": 4}
    return {"model": model, "prompt": "1 + 1 =", "max_tokens": 4}


PATHS = {"ChatBody": "/v1/chat/completions", "TextBody": "/v1/completions"}


@settings(
    max_examples=BODIES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_bodies_that_are_wrong_somewhere(
    client: httpx.Client, model: str, schemas: dict[str, Any], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(PATHS)))
    body: Any = valid_body(kind, model)
    names = st.sampled_from(fields_of(schemas, kind)) | st.text(min_size=1, max_size=8)
    body |= data.draw(st.dictionaries(names, _JSON, min_size=1, max_size=2))
    for name in data.draw(st.lists(st.sampled_from(sorted(body)), max_size=1)):
        del body[name]
    if "messages" in body and data.draw(st.booleans()):
        inner = st.dictionaries(
            st.sampled_from(fields_of(schemas, "ChatMessage")) | st.text(max_size=5),
            _JSON | st.sampled_from(["user", "system", "tool"]),
            max_size=3,
        )
        body["messages"] = data.draw(st.lists(inner | _JSON, max_size=3))
    if data.draw(st.integers(0, 9)) == 0:
        body = data.draw(_JSON)
    response = client.post(PATHS[kind], content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    check(response)


# --- bodies that are no JSON -------------------------------------------------------------------------------------


def raw_bodies(model: str) -> list[bytes]:
    fine = json.dumps(valid_body("ChatBody", model))
    return [
        b"",
        b" ",
        b"{",
        b"}",
        b"null",
        b"[]",
        b'"' * 1000,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe" + fine.encode("utf-16-le"),
        b"\xef\xbb\xbf" + fine.encode(),
        fine.encode()[:-1],
        fine.encode() + b"x",
        fine.replace('"user"', '"\\ud800"').encode(),
        fine.encode().replace(b"1 + 1", b"\xc3\x28"),
        fine.replace("4", "NaN").encode(),
        fine.replace("4", "1e999").encode(),
        fine.replace("4", "9" * 5000).encode(),
        fine.replace("4", "-0").encode(),
        fine.replace("{", '{"model":"x",', 1).encode(),
        b"a=b&c=d",
        b"\0" * 100,
        b"x" * (2 * 2**20),
        json.dumps({"model": model, "messages": [{"role": "user", "content": "a" * 500_000}]}).encode(),
        json.dumps({"model": model, "messages": [{"role": "user", "content": "é😀" * 50_000}]}).encode(),
        json.dumps({"model": model, "messages": [{"role": "user", "content": ""}] * 20_000}).encode(),
        json.dumps({"model": model, "messages": [{"role": "user", "content": "<|mdm_mask|>" * 20_000}]}).encode(),
    ]


def test_bodies_that_are_no_json(client: httpx.Client, model: str) -> None:
    for path in PATHS.values():
        for raw in raw_bodies(model):
            check(client.post(path, content=raw, headers={"content-type": "application/json"}))


# --- requests ----------------------------------------------------------------------------------------------------


def test_methods_and_paths_that_are_not(client: httpx.Client) -> None:
    paths = [
        "/", "/v1", "/v1/", "/v1/chat/completions/", "/V1/models", "//v1/models", "/v1/../health/live",
        "/%2e%2e/%2e%2e",
        "/v1/models/%00", "/v1/models/" + "a" * 4000, "/v1/results/*", "/v1/results/%3E", "/v1/results/a%20b",
        "/v1/results/" + "0" * 31, "/v1/results/chatcmpl-", "/v1/results/%F0%9F%98%80", "/v1/results/%ff",
        "/schema/../x",
        "/schema/%2e%2e", "/metrics/x", "/health", "/health/live?x=1&x=2&%00=%ff",
    ]  # fmt: skip
    for path in paths:
        check(client.get(path))
    for method in ("PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "XYZZY"):
        for path in (*PATHS.values(), "/v1/models"):
            check(client.request(method, path))


def test_headers_that_lie(client: httpx.Client, model: str) -> None:
    body = json.dumps(valid_body("ChatBody", model)).encode()
    headers: list[dict[str, str | bytes]] = [
        {"content-type": "text/plain"},
        {"content-type": "application/xml"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": ""},
        {"content-type": b"\xff\xfe"},
        {"content-type": "application/json; charset=utf-7"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/json", "content-encoding": "nonsense"},
        {"content-type": "application/json", "idempotency-key": ""},
        {"content-type": "application/json", "idempotency-key": "x" * 5000},
        {"content-type": "application/json", "idempotency-key": b"\xf0\x9f\x98\x80"},
        {"content-type": "application/json", "x-request-id": "a" * 5000},
        {"content-type": "application/json", "x-request-id": b"\xff"},
        {"content-type": "application/json", "traceparent": "00-zz"},
        {"content-type": "application/json", "traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"content-type": "application/json", "authorization": b"Bearer \xff"},
        {"content-type": "application/json", "accept": "image/png"},
        {"content-type": "application/json", "cookie": "a=b;" * 500},
        {"content-type": "application/json", "host": "evil.example:1"},
        {"content-type": "application/json", "x-forwarded-for": "' OR 1=1"},
    ]
    for lying in headers:
        check(client.post(PATHS["ChatBody"], content=body, headers=lying))  # type: ignore[arg-type]


# --- bytes on a socket -------------------------------------------------------------------------------------------

POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer KEY\r\ncontent-type: application/json\r\n"
)
RAW = [
    b"",
    b"\r\n\r\n",
    b"\0" * 64,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/0.9\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    b"GET  /  HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://other.example/v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n bad: fold\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    POST + b"content-length: -1\r\n\r\n{}",
    POST + b"content-length: abc\r\n\r\n{}",
    POST + b"content-length: 99999999999999999999\r\n\r\n{}",
    POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
    POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n{}",
    POST + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    POST + b"transfer-encoding: nonsense\r\n\r\n{}",
    POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"a" * 50_000 + b"\r\n\r\n",
    POST + b"content-length: 100\r\n\r\n{",
    POST + b"content-length: 0\r\n\r\n",
    POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    POST + b"content-length: 2\r\n\r\n{}" + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 20,
    b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
]


@contextlib.contextmanager
def connected(base_url: str) -> Iterator[ssl.SSLSocket]:
    """A connection that says nothing but what it is told to."""
    host, _, port = base_url.removeprefix("https://").rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    with plain, ssl.create_default_context().wrap_socket(plain, server_hostname=host) as link:
        yield link


def exchange(base_url: str, data: bytes) -> bytes:
    """What the server answers to these bytes; then we close, whatever it thinks of that."""
    answer = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError), connected(base_url) as link:
        link.sendall(data)
        link.settimeout(0.25)  # what waits for more of the request is left alone
        with contextlib.suppress(TimeoutError):
            while part := link.recv(65_536):
                answer += part
    return answer


@pytest.mark.parametrize("number", range(len(RAW)))
def test_bytes_that_are_no_request(base_url: str, api_key: str, number: int) -> None:
    answer = exchange(base_url, RAW[number].replace(b"KEY", api_key.encode()))
    sent["raw"] += 1
    assert b"HTTP/1.1 5" not in answer
    assert answer == b"" or answer.startswith((b"HTTP/1.1 1", b"HTTP/1.1 2", b"HTTP/1.1 4"))
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 4") and b"Transfer-Encoding" not in head and b"content-length" in head.lower():
        error, _ = json.JSONDecoder().raw_decode(body.decode())  # another answer may follow
        assert error["error"]["message"]


def test_many_who_ask_and_leave_at_once(base_url: str, api_key: str, model: str) -> None:
    body = json.dumps({**valid_body("ChatBody", model), "stream": True}).encode()
    request = POST.replace(b"KEY", api_key.encode()) + b"content-length: %d\r\n\r\n" % len(body) + body
    for cut in range(0, len(request), len(request) // 20):
        with connected(base_url) as link:
            link.sendall(request[: len(request) - cut])
            sent["left"] += 1


def test_a_body_that_trickles_in_holds_up_nobody(base_url: str, api_key: str, client: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            link = stack.enter_context(connected(base_url))
            link.sendall(POST.replace(b"KEY", api_key.encode()) + b"content-length: 1000\r\n\r\n{")
            sent["trickle"] += 1
        started_at = time.monotonic()
        assert client.get("/health/live").status_code == 200
        assert time.monotonic() - started_at < LIMIT_S / 4


def test_it_was_more_than_500(base_url: str) -> None:
    """Fails if this file is run in part; the numbers by kind of answer are in the message."""
    print(dict(sent))
    if sum(sent.values()) < 500:
        pytest.skip("not all tests of this file were run")
    assert sum(count for kind, count in sent.items() if kind.startswith("4")) > 300, dict(sent)
