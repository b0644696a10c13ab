"""PURE. The allocator's problem as a mixed-integer program in HiGHS, by counts: one binary per (job, size).

    max sum_jk v_jk x_jk   s.t.  sum_k x_jk = 1 for every job,   sum_jk k x_jk <= nodes,   x binary

It has the optima of `knapsack.solve`, checks it, and grows into kinds of nodes (see `kinds`), where nodes are not
interchangeable and no recursion over one count exists. Always bounded in time. HiGHS starts from the present sizes
as its first incumbent; when the limit passes, the best incumbent is used and its gap reported; without any, the
present sizes are kept: "no solution" is never read as "no nodes".

Needs the optional package highspy (`pip install sunfleck[milp]`).
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np

from .knapsack import Allocation, Floats, Infeasible, Ints, Table

INFINITY = float("inf")


class QuietHighs(highspy.Highs):  # type: ignore[misc]
    """HiGHS that writes nothing to stdout, not even its banner: that is printed while the callbacks are set up, before
    anybody could switch the output off. Limits: one thread, a fixed seed, `time_limit_s` of wall-clock time."""

    def __init__(self, time_limit_s: float) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("time_limit", float(time_limit_s))
        self.setOptionValue("threads", 1)
        self.setOptionValue("random_seed", 0)

    def enableCallbacks(self) -> None:  # noqa: N802
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def solve(tables: Sequence[Table], n_nodes: int, *, time_limit_s: float = 10.0, gap: float = 1e-9) -> Allocation:
    """The best allocation found in `time_limit_s` (wall-clock seconds); optimal when its gap is at most `gap`.

    Raises Infeasible when the smallest sizes do not fit.
    """
    if sum(int(t.sizes[0]) for t in tables) > n_nodes:
        raise Infeasible(f"the smallest sizes of {len(tables)} jobs together exceed {n_nodes} nodes")
    if not tables:
        return Allocation((), 0.0, 0.0, solver="highs")
    job_of = np.repeat(np.arange(len(tables)), [len(t.sizes) for t in tables])
    sizes = np.concatenate([t.sizes for t in tables])
    values = np.concatenate([t.values for t in tables])
    present = _present(tables, n_nodes)
    start = np.zeros(len(sizes))
    first = np.searchsorted(job_of, np.arange(len(tables)))
    for j, (t, k) in enumerate(zip(tables, present, strict=True)):
        start[first[j] + int(np.searchsorted(t.sizes, k))] = 1.0
    picked, bound = pick_one_each(
        job_of, values, sizes[None, :].astype(float), np.array([float(n_nodes)]), start,
        time_limit_s=time_limit_s, gap=gap,
    )  # fmt: skip
    objective = float(values[picked].sum())
    found = tuple(int(sizes[i]) for i in picked)
    return Allocation(found, objective, bound, relative_gap(objective, bound), "highs")


def pick_one_each(
    job_of: Ints,
    values: Floats,
    use: Floats,
    capacity: Floats,
    start: Floats,
    *,
    time_limit_s: float,
    gap: float = 1e-9,
) -> tuple[list[int], float]:
    """One column per job, so that the rows of `use` (resource x column) stay within `capacity`, of largest value.

    job_of: job of each column, ascending from 0. start: a feasible 0/1 choice, returned if nothing better is found.
    Returns the column of each job and an upper bound of the value.
    """
    scale = float(np.abs(values).max()) or 1.0
    highs = QuietHighs(time_limit_s)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("mip_abs_gap", 0.0)
    highs.passModel(_model(job_of, values / scale, use, capacity))
    solution = highspy.HighsSolution()
    solution.col_value = [float(v) for v in start]
    solution.value_valid = True
    highs.setSolution(solution)
    highs.run()
    info = highs.getInfo()
    n_jobs = int(job_of[-1]) + 1
    trivial = float(sum(values[job_of == j].max() for j in range(n_jobs)))
    bound = float(info.mip_dual_bound) * scale
    bound = min(trivial, bound) if np.isfinite(bound) else trivial
    kept = _one_each(job_of, start, n_jobs)
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return kept, max(bound, float(values[kept].sum()))
    found = _one_each(job_of, np.asarray(highs.getSolution().col_value), n_jobs)
    fits = bool((use[:, found].sum(axis=1) <= capacity + 1e-6).all())
    if not fits or values[found].sum() < values[kept].sum():
        found = kept
    return found, max(bound, float(values[found].sum()))


class Builder:
    """A model that grows column by column and row by row, for those that are not one choice per job."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._index: list[int] = []
        self._value: list[float] = []

    def column(self, cost: float = 0.0, upper: float = 1.0, *, integer: bool = False) -> int:
        """A variable in [0, upper]; returns its number."""
        self._cost.append(cost)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """lower <= sum of factor * column <= upper."""
        for column, factor in terms:
            self._index.append(column)
            self._value.append(factor)
        self._starts.append(len(self._index))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def maximise(
        self, columns: Sequence[int], start: Sequence[float], *, time_limit_s: float
    ) -> tuple[Floats | None, float, float]:
        """(values of the columns or None, objective, upper bound; infinite when there is none) within the limit.

        start: values of these columns that HiGHS completes to a first incumbent if it can.
        """
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._cost), len(self._row_lower)
        lp.sense_ = highspy.ObjSense.kMaximize
        lp.col_cost_ = np.array(self._cost)
        lp.col_lower_, lp.col_upper_ = np.zeros(len(self._cost)), np.array(self._upper)
        lp.row_lower_, lp.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts)
        lp.a_matrix_.index_ = np.array(self._index)
        lp.a_matrix_.value_ = np.array(self._value)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if integer else kinds.kContinuous for integer in self._integer]
        highs = QuietHighs(time_limit_s)
        highs.passModel(lp)
        highs.setSolution(len(columns), np.asarray(columns, dtype=np.int32), np.asarray(start, dtype=np.float64))
        highs.run()
        info = highs.getInfo()
        bound = float(info.mip_dual_bound)
        bound = bound if np.isfinite(bound) else INFINITY
        if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
            return None, -INFINITY, bound
        return np.asarray(highs.getSolution().col_value), float(info.objective_function_value), bound


def relative_gap(objective: float, bound: float) -> float:
    """(bound - objective) / |objective|, as HiGHS reports it."""
    return max(0.0, bound - objective) / max(abs(objective), 1e-12)


def _one_each(job_of: Ints, columns: Floats, n_jobs: int) -> list[int]:
    """The column that is (nearly) 1, for each job."""
    first = np.searchsorted(job_of, np.arange(n_jobs + 1))
    return [int(first[j] + columns[first[j] : first[j + 1]].argmax()) for j in range(n_jobs)]


def _model(job_of: Ints, values: Floats, use: Floats, capacity: Floats) -> highspy.HighsLp:
    """Rows 0..J-1: one column per job; then one row per resource."""
    n_columns, n_jobs, n_rows = len(values), int(job_of[-1]) + 1, len(capacity)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n_columns, n_jobs + n_rows
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = values
    lp.col_lower_, lp.col_upper_ = np.zeros(n_columns), np.ones(n_columns)
    lp.row_lower_ = np.concatenate((np.ones(n_jobs), np.full(n_rows, -highspy.kHighsInf)))
    lp.row_upper_ = np.concatenate((np.ones(n_jobs), capacity))
    width = 1 + n_rows
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(0, width * n_columns + 1, width)
    rows = np.tile(np.arange(n_jobs, n_jobs + n_rows), (n_columns, 1))
    lp.a_matrix_.index_ = np.column_stack((job_of, rows)).ravel()
    lp.a_matrix_.value_ = np.column_stack((np.ones(n_columns), use.T)).ravel()
    lp.integrality_ = [highspy.HighsVarType.kInteger] * n_columns
    return lp


def _present(tables: Sequence[Table], n_nodes: int) -> tuple[int, ...]:
    """What runs now, made feasible: jobs whose present size is not allowed take their smallest; the latest arrivals
    give way if that is too much (it is not, as long as the snapshot is one of a pool that obeys its nodes)."""
    sizes = [t.current if t.current in t.sizes else int(t.sizes[0]) for t in tables]
    for j in range(len(sizes) - 1, -1, -1):
        if sum(sizes) <= n_nodes:
            break
        sizes[j] = int(tables[j].sizes[0])
    return tuple(sizes)
