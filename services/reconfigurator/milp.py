"""Mixed-integer linear programs, and who solves them.

1. A model is columns, rows, and an objective that is always maximised. Each solve starts from nothing: HiGHS 1.16
   has returned the start that it was given, or the last solve's, as the optimum.
2. HiGHS can always be had. Gurobi is used where it is installed and its licence allows the size; where it is not, HiGHS
   takes over, and the log says why once.
3. An objective value that is not that of the returned point is a fault of the solver: SolverFault, never a plan.
"""

import functools
import logging
import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol

import highspy

Terms = Mapping[int, float]  # column -> coefficient
Status = Literal["optimal", "feasible", "infeasible", "none"]  # feasible: out of time; none: and without any point

_TOLERANCE = 1e-9
_SOLVER_CHECK = 1e-6  # relative, between an objective's reported value and its value at the point
_MIN_TIME_S = 0.05

logger = logging.getLogger(__name__)


class SolverFault(RuntimeError):
    """A solver contradicts itself."""


class Solution(NamedTuple):
    """What a solver found."""

    status: Status
    values: list[float]  # of each column; empty without a point
    objective: float = math.nan
    bound: float = math.nan  # no point has a higher objective
    solver: str = ""

    @property
    def found(self) -> bool:
        return bool(self.values)

    @property
    def gap(self) -> float:
        """How far, relative to the objective, the optimum may be above it."""
        return max(0.0, self.bound - self.objective) / max(abs(self.objective), _TOLERANCE)


class Model:
    """Columns and rows of a program."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[float, dict[int, float], float]] = []

    def column(self, lower: float = 0.0, upper: float = math.inf, integer: bool = False) -> int:
        """Adds a variable; returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.lower) - 1

    def row(self, terms: Terms, lower: float = -math.inf, upper: float = math.inf) -> None:
        """Adds lower <= terms <= upper."""
        self.rows.append((lower, dict(terms), upper))

    def equal(self, terms: Terms, value: float) -> None:
        self.row(terms, value, value)


def total(*parts: Terms) -> dict[int, float]:
    """The sum of linear terms."""
    added: dict[int, float] = {}
    for part in parts:
        for column, factor in part.items():
            added[column] = added.get(column, 0.0) + factor
    return added


def scaled(terms: Terms, factor: float) -> dict[int, float]:
    return {column: factor * value for column, value in terms.items()}


def value_of(terms: Terms, values: list[float]) -> float:
    """What linear terms come to at a point."""
    return math.fsum(factor * values[column] for column, factor in terms.items())


class Solver(Protocol):
    """Maximises an objective over a model, within a time limit."""

    name: str

    def solve(self, model: Model, objective: Terms, time_limit_s: float) -> Solution: ...


class _SilentHighs(highspy.Highs):
    """Without the banner that the first one would print where plans are printed, and without callbacks."""

    def enableCallbacks(self) -> None:  # noqa: N802 (the base's name; it calls this first, and here prints)
        self.silent()


class HighsSolver:
    """HiGHS, on one thread: the same model gives the same answer unless time runs out."""

    name = "highs"

    def solve(self, model: Model, objective: Terms, time_limit_s: float) -> Solution:
        """Raises SolverFault."""
        highs: Any = _SilentHighs()  # type: ignore[no-untyped-call]
        for option, value in _HIGHS_OPTIONS.items():
            highs.setOptionValue(option, value)
        highs.setOptionValue("time_limit", max(_MIN_TIME_S, time_limit_s))
        highs.passModel(_as_highs(model, objective))
        highs.run()
        status = highs.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Solution("infeasible", [], solver=self.name)
        info = highs.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solution("none", [], solver=self.name)
        optimal = status == highspy.HighsModelStatus.kOptimal
        reported = info.objective_function_value
        bound = info.mip_dual_bound if any(model.integer) else reported if optimal else math.inf
        return _checked(list(highs.getSolution().col_value), objective, reported, bound, optimal, self.name)


_HIGHS_OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "mip_rel_gap": _TOLERANCE,
    "mip_abs_gap": _TOLERANCE,
    "mip_feasibility_tolerance": _TOLERANCE,
    "primal_feasibility_tolerance": _TOLERANCE,
    "dual_feasibility_tolerance": _TOLERANCE,
}


def _as_highs(model: Model, objective: Terms) -> highspy.HighsLp:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.lower), len(model.rows)
    lp.col_lower_, lp.col_upper_ = model.lower, model.upper
    lp.col_cost_ = [objective.get(column, 0.0) for column in range(len(model.lower))]
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.row_lower_ = [lower for lower, _, _ in model.rows]
    lp.row_upper_ = [upper for _, _, upper in model.rows]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    starts = [0]
    for _, terms, _ in model.rows:
        starts.append(starts[-1] + len(terms))
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = [column for _, terms, _ in model.rows for column in terms]
    lp.a_matrix_.value_ = [factor for _, terms, _ in model.rows for factor in terms.values()]
    if any(model.integer):
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[integer] for integer in model.integer]
    return lp


def _checked(
    values: list[float], objective: Terms, reported: float, bound: float, optimal: bool, solver: str
) -> Solution:
    """Raises SolverFault if the reported objective is not the point's."""
    actual = value_of(objective, values)
    if abs(actual - reported) > _SOLVER_CHECK * max(1.0, abs(reported)):
        raise SolverFault(f"{solver} reports an objective of {reported:.9g}, its point has {actual:.9g}")
    return Solution("optimal" if optimal else "feasible", values, actual, max(bound, actual), solver)


class GurobiSolver:
    """Gurobi. `refusals` are the errors by which it says that its licence does not allow a model or anything."""

    name = "gurobi"

    def __init__(self) -> None:
        """Raises ImportError where it is not installed, and its own error without a licence."""
        self._gp: Any = import_module("gurobipy")
        self._env: Any = self._gp.Env(params={"OutputFlag": 0})
        self.refusals: tuple[type[Exception], ...] = (self._gp.GurobiError,)

    def solve(self, model: Model, objective: Terms, time_limit_s: float) -> Solution:
        """Raises SolverFault, and one of `refusals`."""
        grb = self._gp.GRB
        with self._gp.Model(env=self._env) as gurobi:
            columns = [
                gurobi.addVar(lb=lower, ub=upper, vtype=grb.INTEGER if integer else grb.CONTINUOUS)
                for lower, upper, integer in zip(model.lower, model.upper, model.integer, strict=True)
            ]
            for lower, terms, upper in model.rows:
                expression = self._expression(terms, columns)
                if lower == upper:
                    gurobi.addLConstr(expression, grb.EQUAL, lower)
                    continue
                if lower > -math.inf:
                    gurobi.addLConstr(expression, grb.GREATER_EQUAL, lower)
                if upper < math.inf:
                    gurobi.addLConstr(expression, grb.LESS_EQUAL, upper)
            gurobi.setObjective(self._expression(objective, columns), grb.MAXIMIZE)
            self._set_options(gurobi, time_limit_s)
            gurobi.optimize()
            if gurobi.Status in (grb.INFEASIBLE, grb.INF_OR_UNBD):
                return Solution("infeasible", [], solver=self.name)
            if gurobi.SolCount == 0:
                return Solution("none", [], solver=self.name)
            values = [column.X for column in columns]
            optimal = gurobi.Status == grb.OPTIMAL
            bound = gurobi.ObjBound if gurobi.IsMIP else gurobi.ObjVal
            return _checked(values, objective, gurobi.ObjVal, bound, optimal, self.name)

    def _expression(self, terms: Terms, columns: list[Any]) -> Any:
        return self._gp.LinExpr(list(terms.values()), [columns[column] for column in terms])

    def _set_options(self, gurobi: Any, time_limit_s: float) -> None:
        gurobi.Params.TimeLimit = max(_MIN_TIME_S, time_limit_s)
        gurobi.Params.Threads = 1
        gurobi.Params.MIPGap = _TOLERANCE
        gurobi.Params.MIPGapAbs = _TOLERANCE
        gurobi.Params.FeasibilityTol = _TOLERANCE
        gurobi.Params.OptimalityTol = _TOLERANCE
        gurobi.Params.IntFeasTol = _TOLERANCE


class GurobiOrHighs:
    """Gurobi as far as its licence goes, and HiGHS from there on."""

    name = "gurobi, or highs"

    def __init__(self, gurobi: GurobiSolver, highs: HighsSolver) -> None:
        self._gurobi = gurobi
        self._highs = highs
        self._has_said_why = False

    def solve(self, model: Model, objective: Terms, time_limit_s: float) -> Solution:
        """Raises SolverFault."""
        try:
            return self._gurobi.solve(model, objective, time_limit_s)
        except self._gurobi.refusals as error:
            if not self._has_said_why:
                logger.info("HiGHS solves what Gurobi refuses (%d columns): %s", len(model.lower), error)
                self._has_said_why = True
            return self._highs.solve(model, objective, time_limit_s)


@functools.cache
def solver_named(name: Literal["auto", "highs", "gurobi"]) -> Solver:
    """HiGHS, or Gurobi with HiGHS behind it. One of each a process: it says once why Gurobi is not used."""
    if name == "highs":
        return HighsSolver()
    try:
        return GurobiOrHighs(GurobiSolver(), HighsSolver())
    except ImportError:
        if name == "gurobi":
            logger.warning("HiGHS plans: Gurobi is not installed, `pip install tediserve[gurobi]` would")
    except Exception as error:  # its own error type, known only where it is installed
        logger.warning("HiGHS plans: Gurobi does not start: %s", error)
    return HighsSolver()
