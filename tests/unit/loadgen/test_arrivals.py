import itertools
import math
import statistics
from array import array
from pathlib import Path
from random import Random

import pytest

from services.settings import ConfigError
from tools.loadgen.arrivals import Curve, Recording, poisson, read_trace

CURVE = "start_s,total_rps,active_clients\n0,10,4\n600,40,4\n1200,0,4\n1800,10,4\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n2023-11-16 18:15:51.1805900,879,55\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-31 02:59:59.500000+00:00,1,1\n2024-03-31 03:00:00+00:00,2,2\n"
)
BURST_GPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n110.5,GPT-4,417,276,693,API log\n45,ChatGPT,1087,0,1087,API log\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_poisson_has_its_rate_and_exponential_gaps() -> None:
    arrivals = list(itertools.islice(poisson(20.0).arrivals(Random(1)), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *arrivals])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.04)  # as large as the mean: exponential
    assert sum(gap > 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.015)


def test_the_same_seed_gives_the_same_arrivals_and_another_one_others() -> None:
    first, again, other = (list(itertools.islice(poisson(5).arrivals(Random(seed)), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_curve_has_each_pieces_rate_and_nothing_where_it_is_zero(tmp_path: Path) -> None:
    curve = read_trace(written(tmp_path, CURVE))
    assert isinstance(curve, Curve)
    assert (curve.lasts_s, curve.mean_per_s) == (2400, 15)
    arrivals = list(curve.arrivals(Random(3)))
    assert arrivals == sorted(arrivals)
    counts = [sum(start <= at < start + 600 for at in arrivals) for start in (0, 600, 1200, 1800)]
    assert counts[0] == pytest.approx(6000, abs=250)  # three standard deviations
    assert counts[1] == pytest.approx(24000, abs=480)
    assert counts[2] == 0
    assert counts[3] == pytest.approx(6000, abs=250)


def test_a_curve_is_scaled_to_a_mean_rate_and_its_time_runs_faster(tmp_path: Path) -> None:
    curve = read_trace(written(tmp_path, CURVE))
    slow = curve.changed(speed=None, rate=3.0)
    assert (slow.lasts_s, slow.mean_per_s) == (2400, pytest.approx(3.0))
    fast = curve.changed(speed=10.0, rate=3.0)
    assert (fast.lasts_s, fast.mean_per_s, list(fast.starts_s)) == (240, pytest.approx(3.0), [0, 60, 120, 180])
    assert fast.rates_per_s == slow.rates_per_s
    assert curve.changed(speed=10.0, rate=None).rates_per_s == curve.rates_per_s


@pytest.mark.parametrize(
    ("text", "offsets"),
    [(AZURE, [0, 4, 4.5]), (AZURE_2024, [0, 0.5]), (BURST_GPT, [0, 40, 105.5])],
    ids=["azure", "azure 2024", "burstgpt"],
)
def test_a_recording_is_replayed_from_its_first_arrival_on(tmp_path: Path, text: str, offsets: list[float]) -> None:
    recording = read_trace(written(tmp_path, text))
    assert isinstance(recording, Recording)
    assert list(recording.arrivals(Random(0))) == pytest.approx(offsets)


def test_a_recording_comes_faster_by_speed_or_to_have_a_rate() -> None:
    recording = Recording(array("d", [0, 4, 8, 10]))
    assert list(recording.changed(speed=2.0, rate=None).offsets_s) == [0, 2, 4, 5]
    assert list(recording.changed(speed=None, rate=3.0).offsets_s) == pytest.approx([0, 0.4, 0.8, 1.0])  # 3 gaps in 1 s
    with pytest.raises(ConfigError, match="rate, speed"):
        recording.changed(speed=2.0, rate=3.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (CURVE.replace("600,40", "600,many"), r"line 3: total_rps is 'many'"),
        (CURVE.replace("600,40", "600,-1"), r"line 3: total_rps is '-1'"),
        (CURVE.replace("600,40", "600,nan"), r"line 3: total_rps is 'nan'"),
        (CURVE.replace("1200,", "600,"), r"line 4: start_s 600 does not come after 600"),
        (CURVE.replace("1200,0,4", "1200"), r"line 4: total_rps is None"),
        ("start_s,total_rps\n0,3\n", "two points"),
        (AZURE.replace("2023-11-16 18:15:50.6805900", "yesterday"), r"line 3: TIMESTAMP is 'yesterday'"),
        (AZURE.splitlines()[0], "two times"),
        (BURST_GPT.replace("110.5", ""), r"line 3: Timestamp is ''"),
        ("time,rate\n1,2\n", r"columns time, rate; known are: start_s, total_rps; TIMESTAMP"),
        ("", r"columns \(none\)"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")
