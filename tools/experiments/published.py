"""`python -m tools.experiments.published FOLDER`: profiles and step counts from the figures that the paper's authors
published (github.com/tauChang/TeDiServe, Apache-2.0), as they lie in FOLDER: latency_profiles.json,
denoise_steps_gsm8k.json, paper_results.json.

1. A latency profile is their median times by tokens in the pass, fitted as our own measurements are
   (services/denoiser/latency_fit.py): recompute and cache steps share one curve there, and context is no key.
2. Of each request the steps at each threshold are taken as they are; accuracy is theirs at fixed thresholds.
3. What they measured of whole systems goes into published_figures.json, by the names that our tables have.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.costs import DegreeProfile, MeasuredPass, PassLoad, dump_latency
from services.denoiser.latency_fit import errors_of, fit
from services.settings import ConfigError
from tools.simulate.denoising import StepCounts

ROOT = Path(__file__).parents[2]
_SAMPLES = 8  # of each point, by their settings


class Wanted(NamedTuple):
    """A profile folder, and the published ones that go into it."""

    folder: str
    hardware: str
    parts: tuple[tuple[int, str, str, str], ...]  # TP degree, model, cache variant, set


_INSTRUCT, _BASE = "GSAI-ML_LLaDA-8B-Instruct", "GSAI-ML_LLaDA-8B-Base"
_DREAM = "Dream-org_Dream-v0-Instruct-7B"
PROFILES = (
    Wanted(
        "llada-8b-h100",
        "NVIDIA H100",
        (
            (1, _INSTRUCT, "none_named", "default"),
            (2, _BASE, "none_named", "default"),
            (4, _BASE, "none_named", "default"),
        ),
    ),
    Wanted(
        "llada-8b-gh200",
        "NVIDIA GH200",
        tuple((degree, _BASE, "block32", "default") for degree in (1, 2, 4)),
    ),
    Wanted("dream-7b-h100", "NVIDIA H100", ((1, _DREAM, "none_named", "no_cuda_graph"),)),
)


def write_latency(published: list[dict[str, Any]], wanted: Wanted, folder: Path) -> None:
    degrees, sources = [], []
    for degree, model, cache, kind in wanted.parts:
        part = _find(published, wanted.hardware.split()[-1], degree, model, cache, kind)
        passes = [
            MeasuredPass(load=PassLoad(float(tokens)), ms=ms, low_ms=ms, high_ms=ms, samples=_SAMPLES)
            for tokens, ms in part["tokens_ms"].items()
        ]
        cost = fit(passes)
        degrees.append(DegreeProfile(tp_degree=degree, cost=cost, errors=tuple(errors_of(cost, passes))))
        sources.append(f"{part['path']}@{part['commit'][:8]}")
    hardware = f"{wanted.hardware}, as published: github.com/tauChang/TeDiServe (Apache-2.0), {', '.join(sources)}"
    dump_latency(folder / "latency.json", hardware, degrees)


def _find(published: list[dict[str, Any]], gpu: str, degree: int, model: str, cache: str, kind: str) -> dict[str, Any]:
    """Raises ConfigError unless there is exactly one."""
    wanted = {"gpu": gpu, "tp": degree, "model": model, "cache_variant": cache, "profile_set": kind}
    found = [part for part in published if wanted.items() <= part.items()]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} latency profiles are of {wanted}; exactly one was expected")
    return found[0]


def step_counts(counted: dict[str, Any], results: dict[str, Any]) -> StepCounts:
    thresholds = tuple(float(value) for value in counted["thresholds"])
    fixed = {
        row["threshold"]: row["accuracy"] for row in results["rows"] if row["experiment"] == "fixed_threshold_tradeoff"
    }
    source = counted["source"]
    return StepCounts(
        source=f"github.com/{source['repo']} ({source['license']}), {source['path']}@{source['commit'][:8]}: "
        f"{len(counted['steps'])} GSM8K requests, 5-shot, LLaDA-8B-Instruct, no end at EOS",
        output_tokens=256,
        block_size=32,
        prompt_tokens=(900, 1100),
        prompt_tokens_source="estimated: lengths of 5-shot GSM8K prompts were not published",
        thresholds=thresholds,
        accuracy=tuple(round(fixed[threshold], 4) for threshold in thresholds),
        accuracy_source="the same, plot/accuracy_vs_latency_tradeoff/plot_fixed.py@02ceb170",
        steps=tuple(tuple(counts) for counts in counted["steps"]),
    )


# --- figures of whole systems -------------------------------------------------------------------------------------

FIGURES = Path(__file__).parent / "published_figures.json"
_BENCHMARKS = {"GSM8K": "llada-gsm8k", "MMLU-Pro": "llada-mmlu", "MBPP": "llada-mbpp"}
_SYSTEMS = {"TeDiServe": ("tedi", "paper"), "Llumnix": ("llumnix",), "INFaaS": ("infaas",)}
_ABLATIONS = {
    "infaas": ("infaas",),
    "async_no_load_control": ("no-load-control",),
    "async_no_slo_aware": ("no-deadline-control",),
    "async": ("tedi", "paper"),
}
_FORECASTS = {
    "oracle": ("no-load-control:oracle",),
    "all": ("no-load-control:blurred",),
    "oneshot": ("no-load-control:first",),
}
_GH200_BASE_S = 1.045


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A published point, beside which ours stand."""

    experiment: str
    setup: str
    systems: tuple[str, ...]  # of ours
    rate: float  # a GPU
    slo_factor: float
    attainment: float
    accuracy: float
    latency_mean_s: float | None = None

    def matches(self, setup: str, system: str, rate: float, slo_factor: float) -> bool:
        near = abs(self.rate - rate) < 0.005 and abs(self.slo_factor - slo_factor) < 0.005
        return near and self.setup == setup and system in self.systems


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    rows: list[Figure]

    def find(self, experiment: str, setup: str, system: str, rate: float, slo_factor: float) -> Figure | None:
        found = (row for row in self.rows if row.experiment == experiment)
        return next((row for row in found if row.matches(setup, system, rate, slo_factor)), None)


def read_figures() -> Figures:
    return msgspec.json.decode(FIGURES.read_bytes(), type=Figures)


def figures_of(results: dict[str, Any]) -> Figures:
    rows = [figure for row in results["rows"] for figure in [_figure(row)] if figure is not None]
    source = f"github.com/tauChang/TeDiServe (Apache-2.0)@{results['commit_default'][:8]}, plots of the paper"
    return Figures(source=source, rows=rows)


def _figure(row: dict[str, Any]) -> Figure | None:
    """None for what we do not compare with."""
    match row["experiment"]:
        case "accuracy_benchmark_rps":
            where = ("rates", _BENCHMARKS[row["benchmark"]], _SYSTEMS[row["system"]], 5.0)
        case "ablation_threshold_control":
            where = ("ablations", "gh200", _ABLATIONS[row["system_id"]], row["slo_s"] / _GH200_BASE_S)
        case "ablation_step_predictor" if row["system_id"] in _FORECASTS:
            where = ("forecasts", "gh200-all", _FORECASTS[row["system_id"]], row["slo_s"] / _GH200_BASE_S)
        case _:
            return None
    experiment, setup, systems, slo_factor = where
    return Figure(
        experiment=experiment,
        setup=setup,
        systems=systems,
        rate=round(row["rps_total"] / row["gpus"], 4),
        slo_factor=round(slo_factor, 4),
        attainment=row["slo_attainment"],
        accuracy=row["accuracy"],
        latency_mean_s=row.get("avg_latency_s"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.published", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        latencies, counted, results = (
            msgspec.json.decode((folder / name).read_bytes())
            for name in ("latency_profiles.json", "denoise_steps_gsm8k.json", "paper_results.json")
        )
    except OSError as error:
        sys.exit(f"cannot read the published figures: {error}")
    for wanted in PROFILES:
        write_latency(latencies["profiles"], wanted, ROOT / "profiles" / wanted.folder)
    encoded = msgspec.json.encode(step_counts(counted, results)).replace(b',"', b',\n"').replace(b"[[", b"[\n[")
    (ROOT / "tools/simulate/published/gsm8k-llada-8b.json").write_bytes(encoded + b"\n")
    FIGURES.write_bytes(msgspec.json.encode(figures_of(results)).replace(b'{"exp', b'\n{"exp') + b"\n")


if __name__ == "__main__":
    main()
