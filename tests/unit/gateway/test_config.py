"""The gateway's settings, and the ids that keys stand for."""

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.service import call_id_for_key
from services.settings import ConfigError, load_section


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("max_body_bytes", "10"),
        ("max_open_calls", "0"),
        ("max_connections", "0"),
        ("max_prompt_tokens", "-1"),
        ("key_calls_per_s", "-1"),
        ("key_burst", "0"),
        ("key_max_open", "-1"),
        ("tls_certificate", "cert.pem"),  # without its key
        ("tls_key", "key.pem"),
        ("ping_every_s", "0"),
        ("drain_limit_s", "-1"),
        ("idempotency_secret", ""),
        ("idempotency_secret", "x" * 65),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_section(GatewayConfig, "gateway", {f"TEDISERVE_GATEWAY_{name.upper()}": value})


def test_the_defaults_are_valid() -> None:
    assert load_section(GatewayConfig, "gateway", {}) == GatewayConfig()


def test_a_key_stands_for_one_id_per_authorization_and_secret() -> None:
    ids = [
        call_id_for_key("secret", "Bearer a", "key"),
        call_id_for_key("secret", "Bearer a", "other"),
        call_id_for_key("secret", "Bearer b", "key"),
        call_id_for_key("secret", "Bearer ", "akey"),  # the same characters, cut elsewhere
        call_id_for_key("other", "Bearer a", "key"),
    ]
    assert len(set(ids)) == len(ids)
    assert call_id_for_key("secret", "Bearer a", "key") == ids[0]
    assert all(len(call_id) == 32 for call_id in ids)
