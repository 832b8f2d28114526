"""What the profiler measures, in which order, and what it writes and draws."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from services.costs import LatencyFile, load_latency, read_latency_file, step_load
from services.denoiser import __main__ as command
from services.denoiser import profiler
from services.denoiser.engine import Engine, EngineConfig
from services.denoiser.latency_plan import Mix, plan_mixes
from services.denoiser.latency_plot import plot_latency
from services.denoiser.profiler import measure, profile_latency
from services.denoiser.progress_bar import ProgressBar
from services.settings import ConfigError
from tests.unit.denoiser import random_model

PROFILE = """
model = "tiny"
[decoding]
block_size = 8
max_tokens = 32
[limits]
max_context_tokens = 128
max_output_tokens = 64
[engine]
dtype = "float32"
device = "cpu"
kv_tokens = 600
max_requests = 4
max_pass_tokens = 256
"""
BLOCK, LONGEST = 32, 768
CONFIG = EngineConfig(kv_budget_tokens=16384, max_requests=16, max_batch_tokens=2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile that has been measured."""
    folder = tmp_path_factory.mktemp("tiny")
    random_model.write(folder / "model")
    (folder / "profile.toml").write_text(PROFILE)
    profile_latency(folder, quick=True)
    return folder


# --- the plan -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan() -> list[Mix]:
    return plan_mixes(BLOCK, LONGEST, CONFIG, quick=False)


def most_values(mixes: Iterable[Mix], field: str) -> int:
    """The most values of a field among mixes that are alike in all else."""
    values: dict[Mix, set[int]] = {}
    for mix in mixes:
        values.setdefault(mix._replace(**{field: 0}), set()).add(getattr(mix, field))
    return max(map(len, values.values()))


def test_the_plan_varies_each_thing_while_the_others_stay(plan: list[Mix]) -> None:
    assert most_values(plan, "recompute_canvas") >= 8, "rows, for one request"
    assert most_values(plan, "recomputes") >= 4
    assert most_values(plan, "cached") >= 4
    assert most_values(plan, "cached_canvas") >= 4, "what the same rows attend to"
    assert most_values(plan, "window") >= 4


def test_the_plan_has_the_same_rows_from_few_and_many_requests_and_of_all_kinds(plan: list[Mix]) -> None:
    requests: dict[float, set[int]] = {}
    for mix in plan:
        requests.setdefault(mix.load.tokens, set()).add(mix.recomputes + mix.cached)
    assert {1, 2, 4, 8} <= requests[768]
    kinds: dict[float, set[str]] = {}
    for mix in plan:
        kinds.setdefault(mix.load.tokens, set()).add(mix.load.kind)
    assert {"recompute", "cache", "mixed"} == kinds[128]


def test_mixed_passes_reach_from_one_cache_step_beside_a_recompute_step_to_as_many_as_may_ride(plan: list[Mix]) -> None:
    mixed = [mix for mix in plan if mix.load.kind == "mixed"]
    assert {mix.cached for mix in mixed if mix.recomputes == 1} == {1, 3, 7, 15}
    assert {mix.recompute_canvas for mix in mixed} >= {96, 256, 768}
    assert any(mix.recomputes == 2 for mix in mixed)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("block_size", "longest", "config"),
    [
        (BLOCK, LONGEST, CONFIG),
        (8, 128, EngineConfig(kv_budget_tokens=130, max_requests=4, max_batch_tokens=128)),
        (32, 4096, EngineConfig(kv_budget_tokens=100_000, max_requests=64, max_batch_tokens=8192)),
        (2, 8, EngineConfig(kv_budget_tokens=8, max_requests=1, max_batch_tokens=8)),
    ],
)
def test_the_plan_keeps_to_what_the_engine_can_do(
    block_size: int, longest: int, config: EngineConfig, quick: bool
) -> None:
    plan = plan_mixes(block_size, longest, config, quick=quick)
    assert len(plan) == len(set(plan))
    assert {"recompute", "cache"} <= {mix.load.kind for mix in plan}
    for mix in plan:
        assert mix.load.tokens <= config.max_batch_tokens
        assert mix.recomputes + mix.cached <= config.max_requests
        assert mix.canvas_tokens <= config.kv_budget_tokens
        assert max(mix.recompute_canvas, mix.cached_canvas) <= longest
    assert max(mix.recompute_canvas for mix in plan) == longest


def test_a_mix_is_told_by_its_rows_and_canvases() -> None:
    mix = Mix(2, 96, 3, 32, 384)
    assert mix.load == step_load("recompute", 96, 96, 2).plus(step_load("cache", 32, 384, 3))
    assert (str(mix), mix.canvas_tokens) == ("2 x 96 + 3 x 32 of 384", 2 * 96 + 3 * 384)


# --- measuring ----------------------------------------------------------------------------------------------------


class FakeClock:
    """Stands for the time module: every pass takes ten seconds of it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Mix]:
    """The mixes in the order in which they are measured; the n-th measurement yields n milliseconds and 2n."""
    seen: list[Mix] = []
    clock = FakeClock()

    def pass_seconds(engine: object, mix: Mix, block_size: int) -> list[float]:
        seen.append(mix)
        clock.now += 10.0
        return [1e-3 * len(seen), 2e-3 * len(seen)]

    monkeypatch.setattr(profiler, "pass_seconds", pass_seconds)
    monkeypatch.setattr(profiler, "time", clock)
    return seen


MIXES = [Mix(1, 64 * number, 0, 0, 0) for number in range(1, 9)]


def measure_mixes(**limits: float | bool) -> Callable[[Engine], object]:
    return lambda engine: measure(engine, MIXES, 8, what="test", **({"quick": False, "limit_s": 1e6} | limits))  # type: ignore[arg-type]


def test_rounds_go_through_all_passes_each_time_in_another_order(order: list[Mix]) -> None:
    passes = measure_mixes()(None)  # type: ignore[arg-type]
    rounds = [order[first : first + 8] for first in range(0, len(order), 8)]
    assert len(rounds) == 1 + 9
    assert all(sorted(seen) == MIXES for seen in rounds)
    assert len({tuple(seen) for seen in rounds}) == 10, "a slow minute falls on other passes each time"
    counted = [1e-3 * (number + 1) for number, mix in enumerate(order) if number >= 8 and mix == MIXES[0]]
    samples = sorted([*counted, *(2 * seconds for seconds in counted)])
    assert passes[0].samples == 18  # type: ignore[index]
    assert passes[0].ms == pytest.approx(1e3 * (samples[8] + samples[9]) / 2)  # type: ignore[index]
    assert passes[0].low_ms < passes[0].ms < passes[0].high_ms  # type: ignore[index]


@pytest.mark.parametrize(
    ("limits", "rounds"),
    [({"limit_s": 500.0}, 6), ({"limit_s": 1.0}, 3), ({"quick": True}, 2)],
    ids=["as many as fit", "not less than three", "quick"],
)
def test_slow_models_are_measured_in_fewer_rounds(
    order: list[Mix], limits: dict[str, float | bool], rounds: int
) -> None:
    measure_mixes(**limits)(None)  # type: ignore[arg-type]
    assert len(order) == 8 * (1 + rounds)


def test_a_measured_pass_is_of_the_mix_that_was_asked_for(folder: Path) -> None:
    """Its load is what the engine says about the steps of such a pass."""
    engine = profiler_engine(folder)
    seen = []

    def step(real: Callable[[], object] = engine.step) -> object:
        result = real()
        load = step_load("cache", 0, 0, 0)
        for request in result.requests:  # type: ignore[attr-defined]
            load = load.plus(step_load(request.kind, request.num_rows, request.num_keys))
        seen.append(load)
        return result

    engine.step = step  # type: ignore[assignment, method-assign]
    mix = Mix(1, 40, 2, 16, 64)
    seconds = profiler.pass_seconds(engine, mix, 8)
    assert len(seconds) == 5
    assert all(0 < each < 10 for each in seconds)
    assert seen[-5:] == [mix.load] * 5
    assert seen[0] == step_load("recompute", 64, 64, 2), "the cached ones are to be cached first"
    assert engine.num_running == 0


def profiler_engine(folder: Path) -> Engine:
    from services.denoiser.instance import build_engine
    from services.profile import load_profile

    return build_engine(load_profile(folder))


# --- what it writes -----------------------------------------------------------------------------------------------


def test_the_profiler_writes_what_the_services_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = profile_latency(folder, quick=True)
    latency = load_latency(path)
    assert latency.degrees == [1]
    assert latency.step_ms(1, step_load("recompute", 128, 128)) > 0
    assert latency.step_ms(1, step_load("cache", 8, 128)) > 0
    file = read_latency_file(path)
    (degree,) = file.degrees
    assert file.hardware
    assert [error.kind for error in degree.errors] == ["recompute", "cache", "mixed"]
    assert all(measured.low_ms <= measured.ms <= measured.high_ms for measured in degree.passes)
    assert {measured.samples for measured in degree.passes} == {2 * 5}
    out, err = capsys.readouterr()
    assert len(re.findall(r"^TP 1: .*[-+]\d+\.\d%$", out, re.M)) == len(degree.passes), "a line for each pass"
    for error in degree.errors:
        assert f"{error.unseen_median:.1%}" in next(line for line in out.splitlines() if error.kind in line)
    assert "round 2 of 2" in err


def test_blocks_of_one_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(PROFILE.replace("block_size = 8", "block_size = 1"))
    with pytest.raises(ConfigError, match="no cache steps"):
        profile_latency(tmp_path)


# --- plot ---------------------------------------------------------------------------------------------------------


def points_in(svg: str, degree: int) -> int:
    """Markers of measured passes."""
    groups = re.findall(rf'<g id="measured-{degree}-\w+">(.*?)</g>\n   </g>', svg, re.S)
    return sum(group.count("<use ") for group in groups)


def test_the_plot_shows_every_measured_pass_of_every_degree(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = read_latency_file(folder / "latency.json")
    (degree,) = file.degrees
    other = msgspec.structs.replace(degree, tp_degree=2, passes=degree.passes[::2])
    both = folder.parent / "both"
    both.mkdir(exist_ok=True)
    (both / "profile.toml").write_text(PROFILE)
    (both / "latency.json").write_bytes(
        msgspec.json.encode(LatencyFile(hardware=file.hardware, degrees=(degree, other)))
    )
    out = both / "new folder" / "latency.svg"
    monkeypatch.setattr(sys, "argv", ["denoiser", "plot", "--profile", str(both), "--out", str(out)])
    command.main()
    svg = out.read_text()
    assert capsys.readouterr().out.strip() == str(out)
    assert points_in(svg, 1) == len(degree.passes) > 10
    assert points_in(svg, 2) == len(other.passes)
    assert svg == plot_latency(both, out).read_text(), "the same for the same data"


def test_a_plot_has_a_place_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert plot_latency(folder) == Path("docs") / f"latency-{folder.name}.svg"
    assert (tmp_path / "docs" / f"latency-{folder.name}.svg").exists()


def test_without_matplotlib_the_plot_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install \"tediserve\[dev\]\""):
        plot_latency(folder, folder / "x.svg")


def test_an_image_of_unknown_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*x\.jpog"):
        plot_latency(folder, folder / "x.jpog")


def test_where_nothing_was_measured_there_is_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(PROFILE)
    cost = {"curve": [[32, 5], [64, 6]]}
    file = {"format": 2, "hardware": "x", "degrees": [{"tp_degree": 1, "cost": cost}]}
    (tmp_path / "latency.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match="holds no measured passes"):
        plot_latency(tmp_path, tmp_path / "x.svg")


# --- the progress bar ---------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    terminal, times = Terminal(), iter([0.0, 10.0, 20.0, 20.01, 40.0])
    bar = ProgressBar("profile", 4, stream=terminal, clock=lambda: next(times))
    for _ in range(4):
        bar.advance()
    bar.say("round 2")
    bar.close()
    assert "\n" not in terminal.getvalue()
    drawn = [line.removesuffix("\x1b[K") for line in terminal.getvalue().split("\r")]
    assert drawn == [
        "",
        "profile [######                  ]  25%, 30 s left",
        "profile [############            ]  50%, 20 s left",
        "profile [########################] 100%, 0 s left",  # the third came too soon
        "",
    ]


def test_a_log_gets_lines_and_no_bar() -> None:
    log = io.StringIO()
    bar = ProgressBar("profile", 2, stream=log)
    bar.say("round 1 of 2")
    bar.advance()
    bar.advance()
    bar.close()
    assert log.getvalue() == "profile: round 1 of 2\n"


@pytest.mark.parametrize(("seconds", "said"), [(89.0, "89 s"), (120.0, "2 min")])
def test_time_left_is_told_in_seconds_or_minutes(seconds: float, said: str) -> None:
    terminal, times = Terminal(), iter([0.0, seconds])
    ProgressBar("x", 2, stream=terminal, clock=lambda: next(times)).advance()
    assert f"{said} left" in terminal.getvalue()
