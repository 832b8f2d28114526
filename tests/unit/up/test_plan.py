"""What the local stack consists of, and what happens when a part of it ends."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.settings import ConfigError, load_section
from tools.secrets.store import Secrets
from tools.up.config import UpConfig
from tools.up.plan import LONGEST_PAUSE_S, STEADY_S, STOP_ORDER, GiveUp, Restart, RestartPolicy, processes_of


def test_every_process_has_its_place_in_the_stop_order() -> None:
    processes = processes_of(UpConfig(), "nats-server", has_predictor=True, reconfigures=True)
    assert sorted(STOP_ORDER) == sorted(process.name for process in processes)
    assert STOP_ORDER[0] == "gateway"
    assert STOP_ORDER[-1] == "nats"


def test_ports_profile_and_workers_reach_the_services() -> None:
    config = UpConfig(port=8123, nats_port=4333, profile="profiles/other", workers=3, data="elsewhere")
    by_name = {process.name: process for process in processes_of(config, "nats-server")}
    assert "4333" in by_name["nats"].command
    assert by_name["nats"].command[-1].endswith("/elsewhere/nats")
    for name in ("scheduler", "gateway", "agent", "threshold-controller"):
        table = name.upper().replace("-", "_")
        assert by_name[name].environment["TEDISERVE_NATS_URL"] == "nats://127.0.0.1:4333"
        assert by_name[name].environment[f"TEDISERVE_{table}_PROFILE"] == "profiles/other"
    assert by_name["gateway"].environment["TEDISERVE_GATEWAY_PORT"] == "8123"
    assert by_name["agent"].environment["TEDISERVE_AGENT_WORKERS"] == "3"


def test_a_step_predictor_is_started_where_the_profile_has_one_and_is_optional() -> None:
    with_one = {p.name: p for p in processes_of(UpConfig(profile="profiles/a"), "nats-server", has_predictor=True)}
    assert with_one["step-predictor"].environment["TEDISERVE_STEP_PREDICTOR_PROFILE"] == "profiles/a"
    assert [name for name, process in with_one.items() if process.optional] == ["step-predictor"]
    without = {process.name for process in processes_of(UpConfig(), "nats-server")}
    assert with_one.keys() - without == {"step-predictor"}


def test_a_stack_that_reconfigures_has_two_services_more_and_an_agent_that_follows_their_plan() -> None:
    plain = {p.name: p for p in processes_of(UpConfig(), "nats-server")}
    planned = {p.name: p for p in processes_of(UpConfig(profile="profiles/a"), "nats-server", reconfigures=True)}
    assert planned.keys() - plain.keys() == {"workload-monitor", "reconfigurator"}
    for name in ("workload-monitor", "reconfigurator"):
        table = name.upper().replace("-", "_")
        assert planned[name].environment[f"TEDISERVE_{table}_PROFILE"] == "profiles/a"
    assert planned["agent"].environment["TEDISERVE_AGENT_PLANNED"] == "True"
    assert "TEDISERVE_AGENT_PLANNED" not in plain["agent"].environment


def test_a_secured_stack_hands_each_process_its_keys_and_certificates() -> None:
    secrets = Secrets(Path("/secrets"), {"NATS_NKEY_GATEWAY": "UA"})
    config = UpConfig(secure=True)
    secured = {p.name: p for p in processes_of(config, "nats-server", secrets=secrets)}
    assert (config.url, config.nats_url) == ("https://127.0.0.1:8000", "tls://127.0.0.1:4222")
    assert secured["nats"].command[2].endswith("/deploy/nats/single-secure.conf")
    assert secured["nats"].environment == secrets.nats_variables()
    for name in secured.keys() - {"nats"}:
        assert secured[name].environment.items() >= secrets.client_variables().items()
    assert secured["gateway"].environment["TEDISERVE_GATEWAY_KEY_FILE"] == "/secrets/api-keys.toml"
    assert secured["gateway"].environment["TEDISERVE_GATEWAY_TLS_CERTIFICATE"] == "/secrets/tls/gateway.pem"
    plain = {p.name: p for p in processes_of(UpConfig(), "nats-server")}
    assert not any("KEY" in variable or "TLS" in variable for p in plain.values() for variable in p.environment)


def test_pauses_double_up_to_a_limit() -> None:
    policy = RestartPolicy()
    pauses = [policy.ended(1, ran_s=0.5) for _ in range(8)]
    assert pauses == [Restart(after_s) for after_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S, LONGEST_PAUSE_S)]


def test_an_end_after_steady_work_counts_as_the_first() -> None:
    policy = RestartPolicy()
    for _ in range(5):
        policy.ended(-9, ran_s=0.0)
    assert policy.ended(-9, ran_s=STEADY_S) == Restart(0.1)
    assert policy.ended(-9, ran_s=0.0) == Restart(0.2)


def test_a_wrong_configuration_is_not_tried_again() -> None:
    assert RestartPolicy().ended(2, ran_s=0.3) == GiveUp("its configuration is wrong")


@given(st.lists(st.tuples(st.integers(-64, 255).filter(lambda code: code != 2), st.floats(0, 1e6)), max_size=1200))
def test_whatever_the_history_a_process_starts_again_within_the_longest_pause(ends: list[tuple[int, float]]) -> None:
    policy = RestartPolicy()
    for exit_code, ran_s in ends:
        decision = policy.ended(exit_code, ran_s)
        assert isinstance(decision, Restart)
        assert 0 < decision.after_s <= LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("setting", "value"), [("PORT", "0"), ("PORT", "66000"), ("NATS_PORT", "8000"), ("WORKERS", "0"), ("WORKERS", "x")]
)
def test_wrong_settings_are_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=setting.lower()):
        load_section(UpConfig, "up", {f"TEDISERVE_UP_{setting}": value})
