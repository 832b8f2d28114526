"""Runs what the results lack, in several processes. Each row is in its file as soon as it is known: what is interrupted
goes on where it was."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

from services.denoiser.lifeline import tie_to_parent
from services.settings import ConfigError
from tools.experiments import recordings
from tools.experiments.cells import Cell, code_digest, kept, path_of, read_cells, run, write_cells
from tools.experiments.plan import Experiment, Point
from tools.experiments.setups import SETUPS

Tell = Callable[[str], None]
_COSTLY = ("tedi", "no-", "one-shot", "oracle", "paper")  # systems whose runs take long, by how their names begin


class Work(NamedTuple):
    """Something to run, in whatever process, and what is to be done with what comes of it, in this one."""

    call: Callable[..., Any]  # that another process can import
    arguments: tuple[Any, ...]
    keep: Callable[[Any], str]  # stores the answer; what there is to tell
    takes: int = 1  # what takes longest begins first: it could not fill a gap at the end


def point_works(
    experiments: Sequence[Experiment],
    results: Path,
    *,
    requests: int | None = None,
    is_wanted: Callable[[Point], bool] = lambda point: True,
    anew: bool = False,
) -> list[Work]:
    """What these experiments lack. Rows of other code, of points that are no more, and (`anew`) all that is wanted are
    taken out of their files. Raises ConfigError."""
    code = code_digest()
    works = []
    for experiment in experiments:
        path, points = path_of(results, experiment.name), experiment.points()
        still = kept(read_cells(path), [p for p in points if not (anew and is_wanted(p))], requests, code)
        write_cells(path, still)
        known = {cell.key for cell in still}
        works += [
            Work(run, (point, requests, code), partial(_keep_cell, path, still, point), _takes(point))
            for point in points
            if is_wanted(point) and point[1:] not in known
        ]
    return works


def needs_recordings(works: Sequence[Work]) -> bool:
    points = [argument for work in works for argument in work.arguments if isinstance(argument, Point)]
    return any(SETUPS[point.setup].is_recorded for point in points)


def _takes(point: Point) -> int:
    return 2 if point.system.startswith(_COSTLY) else 1


def _keep_cell(path: Path, found: list[Cell], point: Point, cell: Cell) -> str:
    found.append(cell)
    write_cells(path, found)
    return _line(point, cell)


def run_all(works: Sequence[Work], processes: int, tell: Tell = lambda text: None) -> None:
    """Each answer is kept as soon as it is there. Raises ConfigError; also where a process dies."""
    if needs_recordings(works):
        recordings.make_all(processes, tell)
    started = time.monotonic()
    ordered = sorted(works, key=lambda work: -work.takes)
    for number, (work, answer) in enumerate(_answers(ordered, processes), start=1):
        tell(f"{time.monotonic() - started:5.0f} s, {number} of {len(works)}: {work.keep(answer)}")


def _line(point: Point, cell: Cell) -> str:
    in_time = "-" if cell.attainment is None else f"{cell.attainment:.1%}"
    where = f"{point.experiment}, {point.setup} at {point.rate:g}, SLO x {point.slo_factor:.3g}, seed {point.seed}"
    return f"{where}: {point.system} {in_time} in time"


def _answers(works: Sequence[Work], processes: int) -> Iterator[tuple[Work, Any]]:
    """As they are done."""
    if processes == 1:
        yield from ((work, work.call(*work.arguments)) for work in works)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_process, (os.getpid(),))
    try:
        work_of: dict[Future[Any], Work] = {pool.submit(work.call, *work.arguments): work for work in works}
        for future in as_completed(work_of):
            yield work_of[future], future.result()
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
