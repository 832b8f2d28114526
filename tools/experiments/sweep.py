"""Runs what the results lack, in several processes. Each row is in its file as soon as it is known: what is interrupted
goes on where it was."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path

from services.denoiser.lifeline import tie_to_parent
from services.settings import ConfigError
from tools.experiments import recordings
from tools.experiments.cells import Cell, code_digest, kept, path_of, read_cells, run, write_cells
from tools.experiments.plan import Experiment, Point
from tools.experiments.setups import SETUPS

Tell = Callable[[str], None]
_COSTLY = ("tedi", "no-", "one-shot", "oracle", "paper")  # systems whose runs take long, by how their names begin


def sweep(
    experiments: Sequence[Experiment],
    results: Path,
    *,
    processes: int = 2,
    requests: int | None = None,
    is_wanted: Callable[[Point], bool] = lambda point: True,
    anew: bool = False,
    tell: Tell = lambda text: None,
) -> None:
    """Rows of other code, of points that are no more, and (`anew`) all that is wanted go first.

    Raises ConfigError; also where a process dies.
    """
    code = code_digest()
    found: dict[str, list[Cell]] = {}
    missing: list[Point] = []
    for experiment in experiments:
        path, points = path_of(results, experiment.name), experiment.points()
        wanted = [point for point in points if is_wanted(point)]
        still = kept(read_cells(path), [p for p in points if not (anew and is_wanted(p))], requests, code)
        found[experiment.name] = still
        known = {cell.key for cell in still}
        missing += [point for point in wanted if point[1:] not in known]
        write_cells(path, still)
    if any(SETUPS[point.setup].is_recorded for point in missing):
        recordings.make_all(processes, tell)
    started = time.monotonic()
    missing.sort(key=lambda point: not point.system.startswith(_COSTLY))  # the short ones fill the gaps at the end
    for number, (point, cell) in enumerate(_run_all(missing, processes, requests, code), start=1):
        found[point.experiment].append(cell)
        write_cells(path_of(results, point.experiment), found[point.experiment])
        tell(f"{time.monotonic() - started:5.0f} s, {number} of {len(missing)}: {_line(point, cell)}")


def _line(point: Point, cell: Cell) -> str:
    in_time = "-" if cell.attainment is None else f"{cell.attainment:.1%}"
    where = f"{point.experiment}, {point.setup} at {point.rate:g}, SLO x {point.slo_factor:.3g}, seed {point.seed}"
    return f"{where}: {point.system} {in_time} in time"


def _run_all(points: Sequence[Point], processes: int, requests: int | None, code: str) -> Iterator[tuple[Point, Cell]]:
    """As they are done."""
    if processes == 1:
        yield from ((point, run(point, requests, code)) for point in points)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_process, (os.getpid(),))
    try:
        points_of: dict[Future[Cell], Point] = {pool.submit(run, point, requests, code): point for point in points}
        for future in as_completed(points_of):
            yield points_of[future], future.result()
    except BrokenProcessPool:
        raise ConfigError("a process of the experiments died; is there memory for so many?") from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            child.terminate()
        raise
    pool.shutdown()


def _start_process(parent_pid: int) -> None:
    tie_to_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
