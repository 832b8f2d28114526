"""python -m tools.bench.slo [run | report]: policies under load, on a stack of its own; can be stopped and resumed.

`run` measures the basis once, then every cell that the folder lacks, and prints the tables; `report` prints them from
what there is. The whole matrix takes hours, on a machine that does nothing else.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from services.profile import load_profile
from services.settings import ConfigError
from tools.bench.machine import describe_machine
from tools.bench.slo.cells import Basis, Folder, check_same, in_order
from tools.bench.slo.cluster import MAX_OPEN, running_cluster
from tools.bench.slo.measure import measure_basis, run_cell
from tools.bench.slo.policies import POLICIES, policy_of
from tools.bench.slo.report import report
from tools.loadgen.__main__ import allow_files
from tools.loadgen.asks import Ask, built_in
from tools.loadgen.client import Failed

T = TypeVar("T")


def main(words: Sequence[str] | None = None) -> int:
    options = _parse(words)
    folder = Folder(options.folder)
    try:
        if options.command == "run":
            _run(options, folder)
        basis = folder.basis()
        if basis is None:
            raise ConfigError(f"{options.folder} holds no benchmark: `make bench-slo` starts one")
        print(report(basis, folder.results()))
    except (ConfigError, Failed, TimeoutError) as error:
        print(f"bench-slo: {error or 'the cluster does not become idle'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here, `report` prints what there is", file=sys.stderr)
        return 130
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.slo", description="Policies under load.")
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "report"), default="run")
    add("--folder", type=Path, default=Path("build/slo"), help="of the cells (default: %(default)s)")
    add("--profile", default="profiles/tiny-cpu", help="folder (default: %(default)s)")
    add("--workers", type=int, default=2, help="instances (default: 2)")
    add("--rates", type=_several(float), default=[1.15, 1.3, 1.0, 0.9, 0.7], help="times C, in the order to run them")
    add("--seeds", type=_several(int), default=[0, 1, 2], help="of arrivals and prompts (default: 0,1,2)")
    add("--policies", type=_several(str), default=list(POLICIES), help=f"(default: {','.join(POLICIES)})")
    add("--seconds", type=float, default=120.0, help="measured of each cell (default: 120)")
    add("--warmup", type=float, default=20.0, help="seconds before that (default: 20)")
    add("--basis-seconds", type=float, default=30.0, help="of the latency alone, and of C (default: 30)")
    add("--slo-factor", type=float, default=5.0, help="SLO over the median latency alone (default: 5)")
    add("--problems", type=int, default=3000, help="held-out problems that prompts are drawn from (default: 3000)")
    add(
        "--tokens-each",
        type=int,
        default=0,
        help="output tokens asked for, for each problem that a prompt numbers, as by clients that know the size of"
        " their answers; 0: the profile's default (default: 0)",
    )
    return parser.parse_args(words)


def _several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        try:
            return [kind(word) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,3") from None

    return parse


def _run(options: argparse.Namespace, folder: Folder) -> None:
    """Raises ConfigError."""
    _check(options)
    allow_files(MAX_OPEN)
    basis = folder.basis()
    if basis is not None:
        check_same(basis, **_shared(options))
    cells = [cell for cell in in_order(options.rates, options.seeds, options.policies) if not folder.is_done(cell)]
    if not cells:
        return
    for policy in options.policies:
        load_profile(policy_of(policy).profile_of(options.profile))  # where it is missing, say so before the first cell
    _say(
        f"{len(cells)} cells to run, about {len(cells) * (options.warmup + options.seconds) / 60:.0f} minutes and more"
    )
    asks = built_in(options.problems, seed=0, tokens_each=options.tokens_each)
    matrix = {name: getattr(options, name) for name in ("rates", "seeds", "policies")}
    basis = replace(basis, **matrix) if basis else _new_basis(options, asks)
    folder.save_basis(basis)
    for number, cell in enumerate(cells, start=1):
        started = time.monotonic()
        with running_cluster(options.profile, options.workers, policy_of(cell.policy)) as cluster:
            result = asyncio.run(run_cell(cluster, basis, cell, asks))
        folder.save(result)
        late = " (does not count)" if result.why_it_does_not_count else ""
        _say(
            f"{number} of {len(cells)}: {cell.rate:g} x C, seed {cell.seed}, {cell.policy}: {result.attainment:.1%} of"
            f" {len(result.rows)} in time{late}; {time.monotonic() - started:.0f} s"
        )


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for policy in options.policies:
        policy_of(policy)
    if not all(rate > 0 for rate in options.rates):
        raise ConfigError(f"rates: {options.rates} are not all positive")
    for name in ("workers", "seconds", "basis_seconds", "slo_factor", "problems"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"{name}: {getattr(options, name)} is not positive")
    if options.warmup < 0:
        raise ConfigError(f"warmup: {options.warmup} is negative")


def _shared(options: argparse.Namespace) -> dict[str, object]:
    told = vars(options)
    names = ("profile", "workers", "seconds", "slo_factor", "problems", "tokens_each")
    return {name: told[name] for name in names} | {"warmup_s": options.warmup}


def _new_basis(options: argparse.Namespace, asks: Sequence[Ask]) -> Basis:
    profile = load_profile(options.profile)
    with running_cluster(options.profile, options.workers, policy_of("fixed")) as cluster:
        measured = asyncio.run(
            measure_basis(
                cluster,
                asks,
                threshold=profile.decoding.threshold,
                held=options.workers * profile.engine.max_requests,
                seconds=options.basis_seconds,
            )
        )
    _say(f"alone {measured.alone_ms:.1f} ms in the median, C = {measured.capacity_per_s:.2f} requests/s")
    return Basis(
        **_shared(options),  # type: ignore[arg-type]
        machine=describe_machine(),
        threshold=profile.decoding.threshold,
        alone_ms=measured.alone_ms,
        capacity_per_s=measured.capacity_per_s,
        alone_work=measured.alone_work,
        full_work=measured.full_work,
        rates=options.rates,
        seeds=options.seeds,
        policies=options.policies,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
