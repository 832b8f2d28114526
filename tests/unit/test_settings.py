"""Configuration: what is wrong is named, with the reason."""

from pathlib import Path

import msgspec
import pytest

from services.bus import NatsSettings
from services.denoiser.config import AgentConfig, WorkerConfig
from services.gateway.config import GatewayConfig
from services.profile import check_retention, load_profile
from services.reconfigurator.config import ReconfiguratorConfig
from services.runtime import LogSettings
from services.scheduler.config import SchedulerConfig
from services.settings import ConfigError, load_section
from services.workload_monitor.config import WorkloadMonitorConfig

ROOT = Path(__file__).parents[2]

PROFILE = """
model = "m"
[limits]
max_context_tokens = 512
max_output_tokens = 256
"""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "here"
    port: int = 80
    ratio: float = 0.5


def environment(tmp_path: Path, text: str, **more: str) -> dict[str, str]:
    path = tmp_path / "tediserve.toml"
    path.write_text(text)
    return {"TEDISERVE_CONFIG": str(path), **more}


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    environ = environment(tmp_path, "[gateway]\nport = 81\nratio = 0.25\n", TEDISERVE_GATEWAY_PORT="82")
    assert load_section(Config, "gateway", environ) == Config(host="here", port=82, ratio=0.25)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gateway]\nprot = 1\n", r"\[gateway\].*prot"),
        ('[gateway]\nport = "many"\n', r"\[gateway\].*port"),
        ("gateway = 3\n", r"\[gateway\] must be a table"),
        ("[gateway\n", "not valid TOML"),
        ("[gatway]\nport = 1\n", r"\[gatway\] is not a table .* gateway, scheduler"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_section(Config, "gateway", environment(tmp_path, text))


def test_a_wrong_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port"):
        load_section(Config, "gateway", environment(tmp_path, "", TEDISERVE_GATEWAY_PORT="eighty"))


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("TEDISERVE_GATEWAY_PROT", r"TEDISERVE_GATEWAY_PROT: \[gateway\] has no prot; its keys are host, port, ratio"),
        ("TEDISERVE_GATWAY_PORT", "TEDISERVE_GATWAY_PORT is of no table"),
    ],
)
def test_a_variable_that_nobody_reads_is_refused(variable: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_section(Config, "gateway", {variable: "1"})


def test_variables_of_other_tables_are_theirs() -> None:
    assert load_section(Config, "gateway", {"TEDISERVE_UP_PROT": "1"}) == Config()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_section(Config, "gateway", {"TEDISERVE_CONFIG": str(tmp_path)})


def test_a_named_file_that_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match=r"TEDISERVE_CONFIG names nowhere\.toml"):
        load_section(Config, "gateway", {"TEDISERVE_CONFIG": "nowhere.toml"})


@pytest.mark.parametrize("wrong", ['storage = "disk"', "replicas = 2", "max_open_requests = 0"])
def test_wrong_nats_settings_name_the_key(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong.split()[0]):
        load_section(NatsSettings, "nats", environment(tmp_path, f"[nats]\n{wrong}\n"))


def test_a_profile_has_defaults_and_knows_its_folder(tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(PROFILE)
    profile = load_profile(tmp_path)
    assert profile.weights_folder == tmp_path / "model"
    assert profile.latency_file == tmp_path / "latency.json"
    assert profile.max_prompt_tokens == 512 - profile.decoding.block_size


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("max_output_tokens = 256", "max_output_tokens = 250"), "multiple"),
        (("max_output_tokens = 256", "max_output_tokens = 512"), "no room for a prompt"),
        (("max_context_tokens = 512", "max_context_tokens = 4096"), "max_pass_tokens"),
        (("[limits]", "[decoding]\nthresholds = [0.9, 0.5]\n[limits]"), "ascending"),
        (("[limits]", "[decoding]\nthresholds = []\n[limits]"), "thresholds"),
        (("[limits]", "[decoding]\nthreshold = 0.85\n[limits]"), r"threshold 0\.85 is none of .*name one of them"),
        (("[limits]", "[decoding]\nmax_tokens = 512\n[limits]"), r"decoding\.max_tokens"),
        (("[limits]", "[decoding]\nthreshold = 1.5\n[limits]"), r"decoding\.threshold"),
        (("[limits]", "[decoding]\nopening_from = 0.95\n[limits]"), r"opening_from 0\.95 is above"),
        (("[limits]", '[decoding]\ncache = "full"\n[limits]'), r"decoding\.cache"),
        (("[limits]", "[slo_ms]\ngold = 1\n[limits]"), "gold"),
        (("[limits]", "[decoding]\nblocks_ahead = -1\n[limits]"), r"blocks_ahead"),
        (("[limits]", "[quality_floor]\ndefault = 0.55\n[limits]"), "quality_floor.default 0.55"),
        (("model =", "modle ="), "modle"),
        (('model = "m"', 'model = ""'), "model"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_reason(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    (tmp_path / "profile.toml").write_text(PROFILE.replace(*change))
    with pytest.raises(ConfigError, match=complaint):
        load_profile(tmp_path)


def test_records_must_be_kept_longer_than_a_request_may_run(tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(PROFILE + "time_limit_s = 900\n")
    profile = load_profile(tmp_path)
    check_retention(profile, 901.0)
    with pytest.raises(ConfigError, match=r"time_limit_s 900 .* result_retention_s 900"):
        check_retention(profile, 900.0)


def test_a_missing_profile_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profile at"):
        load_profile(tmp_path)


def test_the_example_holds_the_defaults() -> None:
    environ = {"TEDISERVE_CONFIG": str(ROOT / "tediserve.example.toml")}
    for section, config in (
        ("nats", NatsSettings),
        ("log", LogSettings),
        ("gateway", GatewayConfig),
        ("scheduler", SchedulerConfig),
        ("worker", WorkerConfig),
        ("agent", AgentConfig),
        ("workload_monitor", WorkloadMonitorConfig),
        ("reconfigurator", ReconfiguratorConfig),
    ):
        assert load_section(config, section, environ) == config()


def test_the_profiles_that_ship_are_right() -> None:
    for path in (ROOT / "profiles").glob("*/profile.toml"):
        load_profile(path.parent)
