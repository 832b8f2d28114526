"""The two stages by trying everything, written from the paper's formulas and sharing nothing with the planner.

Stage 1: every maximal number of instances (built node by node), every choice of a batch size for each degree and kind
of step (all of them at once, if time may be shared); what is left is a linear program in the steps. Many such programs
are solved as one, as separate blocks.
Stage 2: every set of instances that could be kept, and whether the rest still fits.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_diag

from services.reconfigurator.problem import Problem

Layout = tuple[int, ...]  # instances of each degree, ascending
Sizes = tuple[int, ...]  # of batches, that a degree may use for a kind of step
PENALTY = 1e3
FEASIBLE = 1e-6


class Block(NamedTuple):
    """A linear program; its last column is by how much its upper rows are missed."""

    threshold: np.ndarray  # objective: mean threshold per token
    latency: np.ndarray  # mean latency
    upper: np.ndarray
    upper_value: np.ndarray
    equal: np.ndarray
    equal_value: np.ndarray


class Best(NamedTuple):
    threshold: float
    latency: float  # among all that give away no more than the tolerance


def layouts(problem: Problem) -> set[Layout]:
    """Every number of instances that fits."""
    degrees = problem.usable_degrees
    found = {(0,) * len(degrees)}
    for node in problem.nodes:
        on_node = [
            counts
            for counts in product(*(range(len(node.devices) // d + 1) for d in degrees))
            if sum(c * d for c, d in zip(counts, degrees, strict=True)) <= len(node.devices)
        ]
        found = {tuple(a + b for a, b in zip(one, other, strict=True)) for one in found for other in on_node}
    return found


def best_of_each(problems: list[Problem]) -> list[Best | None]:
    """Stage 1. None: infeasible."""
    blocks = [list(_blocks(problem)) for problem in problems]
    thresholds = _solve([block for of_one in blocks for block in of_one], "threshold", None)
    floors: list[float] = []
    bests: list[float | None] = []
    at = 0
    for problem, of_one in zip(problems, blocks, strict=True):
        reached = thresholds[at : at + len(of_one)]
        at += len(of_one)
        best = max((value for value in reached if value is not None), default=None)
        bests.append(best)
        floor = -1.0 if best is None else best - max(1e-7, problem.planning.threshold_tolerance)
        floors += [floor if value is not None and value >= floor else 2.0 for value in reached]
    latencies = _solve([block for of_one in blocks for block in of_one], "latency", floors)
    answers: list[Best | None] = []
    at = 0
    for best, of_one in zip(bests, blocks, strict=True):
        reached = [value for value in latencies[at : at + len(of_one)] if value is not None]
        at += len(of_one)
        answers.append(None if best is None else Best(best, -max(reached)))
    return answers


def _blocks(problem: Problem) -> Iterator[Block]:
    fitting = layouts(problem)
    maximal = [
        one for one in fitting if not any(a != one and all(np.greater_equal(a, one)) for a in fitting) and any(one)
    ]
    kinds = 1 if problem.cache == "none" else 2
    bins = [problem.batch_tokens, problem.cache_batch_tokens][:kinds]
    for counts in sorted(maximal):
        used = [(d, count) for d, count in zip(problem.usable_degrees, counts, strict=True) if count]
        sizes = [[tuple(of_kind)] if problem.planning.time_sharing else [(b,) for b in of_kind] for of_kind in bins]
        for choice in product(*(product(*sizes) for _ in used)):
            block = _block(problem, used, choice)
            if block is not None:
                yield block


def _latency_s(problem: Problem, degree: int, tokens: float) -> float:
    """The table's entry."""
    curve = next(profile.cost.curve for profile in problem.degrees if profile.tp_degree == degree)
    return float(np.interp(tokens, *zip(*curve, strict=True))) / 1000


def _block(problem: Problem, used: list[tuple[int, int]], choice: tuple[tuple[Sizes, ...], ...]) -> Block | None:
    """Columns: per class, steps at (degree, threshold) and at (degree, kind, batch size)."""
    caching = problem.cache != "none"
    num_c, num_d = len(problem.thresholds), len(used)
    options = [(d, kind, size) for d in range(num_d) for kind, sizes in enumerate(choice[d]) for size in sizes]
    per_class = num_d * num_c + len(options)
    columns = per_class * len(problem.classes) + 1
    rate = sum(k.rate_per_s for k in problem.classes)
    token_rate = sum(k.rate_per_s * k.output_tokens for k in problem.classes)
    threshold, latency = np.zeros(columns), np.zeros(columns)
    upper, upper_value, equal, equal_value = [], [], [], []
    stability = np.zeros((num_d, columns))
    for i, k in enumerate(problem.classes):
        blocks = -(-k.output_tokens // problem.block_size)
        speed = [min(c.tokens_per_step, k.output_tokens / blocks) for c in problem.thresholds]
        at = i * per_class
        by_c = lambda d, c, at=at: at + d * num_c + c  # noqa: E731
        own_latency, all_tokens, recomputes = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        for d, (degree, _) in enumerate(used):
            matching, linked = np.zeros(columns), np.zeros(columns)
            for c, tokens in enumerate(speed):
                threshold[by_c(d, c)] += k.rate_per_s * problem.thresholds[c].threshold * tokens / token_rate
                all_tokens[by_c(d, c)] = linked[by_c(d, c)] = tokens
                matching[by_c(d, c)] = 1
            for column, (at_degree, kind, size) in enumerate(options, start=at + num_d * num_c):
                if at_degree != d:
                    continue
                rows = k.prompt_tokens + k.output_tokens if kind == 0 else problem.block_size
                matching[column] = -1
                seconds = _latency_s(problem, degree, size)
                own_latency[column] = seconds
                stability[d, column] = k.rate_per_s * seconds * rows / size
                if rows > size:
                    forbidden = np.zeros(columns)
                    forbidden[column] = 1
                    equal.append(forbidden), equal_value.append(0)
                if kind == 0:
                    recomputes[column] = 1
                    linked[column] = -k.output_tokens / blocks
            equal.append(matching), equal_value.append(0)
            if caching:
                equal.append(linked), equal_value.append(0)
        if all(k.prompt_tokens + k.output_tokens > max(sizes[0]) for sizes in choice):
            return None
        if caching:
            equal.append(recomputes), equal_value.append(blocks)
        else:
            equal.append(all_tokens), equal_value.append(k.output_tokens)
        latency += own_latency * k.rate_per_s / rate
        if k.slo_s is not None:
            upper.append(own_latency), upper_value.append(k.slo_s)
    for d, (_, count) in enumerate(used):
        upper.append(stability[d]), upper_value.append(problem.planning.max_utilisation * count)
    upper_rows = np.array(upper)
    upper_rows[:, -1] = -1
    return Block(threshold, latency, upper_rows, np.array(upper_value), np.array(equal), np.array(equal_value))


def _solve(blocks: list[Block], objective: str, floors: list[float] | None, chunk: int = 400) -> list[float | None]:
    """The highest threshold, or minus the lowest latency, of each; None: infeasible, or cannot reach its floor."""
    found: list[float | None] = []
    for start in range(0, len(blocks), chunk):
        part = blocks[start : start + chunk]
        floor = None if floors is None else floors[start : start + chunk]
        found += _solve_chunk(part, objective, floor)
    return found


def _solve_chunk(blocks: list[Block], objective: str, floors: list[float] | None) -> list[float | None]:
    signed = [block.threshold if objective == "threshold" else -block.latency for block in blocks]
    uppers, upper_values = [block.upper for block in blocks], [block.upper_value for block in blocks]
    if floors is not None:
        with_floor = [np.append(-block.threshold[:-1], -1) for block in blocks]
        uppers = [np.vstack([rows, row]) for rows, row in zip(uppers, with_floor, strict=True)]
        upper_values = [np.append(v, -floor) for v, floor in zip(upper_values, floors, strict=True)]
    penalty = [np.append(values[:-1], -PENALTY) for values in signed]
    answer = linprog(
        -np.concatenate(penalty),
        A_ub=block_diag(uppers, format="csr"),
        b_ub=np.concatenate(upper_values),
        A_eq=block_diag([block.equal for block in blocks], format="csr"),
        b_eq=np.concatenate([block.equal_value for block in blocks]),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9},
    )
    assert answer.status == 0, answer.message
    found: list[float | None] = []
    at = 0
    for values in signed:
        point = answer.x[at : at + len(values)]
        at += len(values)
        found.append(float(values @ point) if point[-1] < FEASIBLE else None)
    return found


# --- stage 2 ------------------------------------------------------------------------------------------------------


def most_kept(problem: Problem, layout: dict[int, int]) -> tuple[int, int]:
    """The most instances that can be kept, and the most devices that so many hold."""
    best = (-1, -1)
    for number in range(len(problem.today), -1, -1):
        for kept in combinations(problem.today, number):
            counts = Counter(instance.tp_degree for instance in kept)
            rest = {degree: count - counts[degree] for degree, count in layout.items()}
            if any(counts[degree] > layout.get(degree, 0) for degree in counts):
                continue
            held = Counter(instance.node_id for instance in kept for _ in instance.devices)
            free = [len(node.devices) - held[node.node_id] for node in problem.nodes]
            if _fits(rest, free):
                best = max(best, (number, sum(held.values())))
        if best[0] == number:
            return best
    return best


def _fits(rest: dict[int, int], free: list[int]) -> bool:
    """Whether so many instances find room, the largest first, on any node."""
    degree = max((degree for degree, count in rest.items() if count > 0), default=None)
    if degree is None:
        return True
    smaller = rest | {degree: rest[degree] - 1}
    return any(
        room >= degree and _fits(smaller, [*free[:i], room - degree, *free[i + 1 :]]) for i, room in enumerate(free)
    )
