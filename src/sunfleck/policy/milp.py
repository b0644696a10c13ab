"""PURE. The allocator's problem as a mixed-integer program in HiGHS, by counts: one binary per (job, size).

    max sum_jk v_jk x_jk   s.t.  sum_k x_jk = 1 for every job,   sum_jk k x_jk <= nodes,   x binary

It has the optima of `knapsack.solve`, checks it, and is what grows into node classes, where nodes are not
interchangeable and no recursion over one count exists. Always bounded in time. HiGHS starts from the present sizes
as its first incumbent; when the limit passes, the best incumbent is used and its gap reported; without any, the
present sizes are kept: "no solution" is never read as "no nodes".

Needs the optional package highspy (`pip install sunfleck[milp]`).
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np

from .knapsack import Allocation, Infeasible, Table


def solve(tables: Sequence[Table], n_nodes: int, *, time_limit_s: float = 10.0, gap: float = 1e-9) -> Allocation:
    """The best allocation found in `time_limit_s` (wall-clock seconds); optimal when its gap is at most `gap`.

    Raises Infeasible when the smallest sizes do not fit.
    """
    if sum(int(t.sizes[0]) for t in tables) > n_nodes:
        raise Infeasible(f"the smallest sizes of {len(tables)} jobs together exceed {n_nodes} nodes")
    if not tables:
        return Allocation((), 0.0, 0.0, solver="highs")
    start_of = np.concatenate(([0], np.cumsum([len(t.sizes) for t in tables])))
    sizes = np.concatenate([t.sizes for t in tables])
    values = np.concatenate([t.values for t in tables])
    scale = float(np.abs(values).max()) or 1.0
    model = _model(start_of, sizes, values / scale, n_nodes)
    highs = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("time_limit", float(time_limit_s)),
        ("mip_rel_gap", gap),
        ("mip_abs_gap", 0.0),
        ("threads", 1),
        ("random_seed", 0),
    ):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    incumbent = _present(tables, n_nodes)
    solution = highspy.HighsSolution()
    solution.col_value = _as_columns(start_of, tables, incumbent)
    solution.value_valid = True
    highs.setSolution(solution)
    highs.run()
    info = highs.getInfo()
    kept = _worth(tables, incumbent)
    bound = float(info.mip_dual_bound) * scale
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return Allocation(incumbent, kept, bound, _gap(kept, bound), "highs", "time limit: present sizes kept")
    columns = np.asarray(highs.getSolution().col_value)
    found = tuple(
        int(t.sizes[int(columns[start_of[j] : start_of[j + 1]].argmax())]) for j, t in enumerate(tables)
    )
    worth = _worth(tables, found)
    if sum(found) > n_nodes or worth < kept:
        return Allocation(incumbent, kept, bound, _gap(kept, bound), "highs", "present sizes kept")
    return Allocation(found, worth, max(bound, worth), _gap(worth, bound), "highs")


def _model(start_of: np.ndarray, sizes: np.ndarray, values: np.ndarray, n_nodes: int) -> highspy.HighsLp:
    """Rows 0..J-1: one size per job; row J: the nodes. Columns in the order of the tables' sizes."""
    n_columns, n_jobs = len(sizes), len(start_of) - 1
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n_columns, n_jobs + 1
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = values
    lp.col_lower_, lp.col_upper_ = np.zeros(n_columns), np.ones(n_columns)
    lp.row_lower_ = np.append(np.ones(n_jobs), -highspy.kHighsInf)
    lp.row_upper_ = np.append(np.ones(n_jobs), float(n_nodes))
    job_of = np.repeat(np.arange(n_jobs), np.diff(start_of))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(0, 2 * n_columns + 1, 2)
    lp.a_matrix_.index_ = np.stack((job_of, np.full(n_columns, n_jobs)), axis=1).ravel()
    lp.a_matrix_.value_ = np.stack((np.ones(n_columns), sizes.astype(float)), axis=1).ravel()
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


def _as_columns(start_of: np.ndarray, tables: Sequence[Table], sizes: Sequence[int]) -> list[float]:
    columns = np.zeros(int(start_of[-1]))
    for j, (t, k) in enumerate(zip(tables, sizes, strict=True)):
        columns[int(start_of[j]) + int(np.searchsorted(t.sizes, k))] = 1.0
    return [float(v) for v in columns]


def _worth(tables: Sequence[Table], sizes: Sequence[int]) -> float:
    return float(sum(t.value_at(k) for t, k in zip(tables, sizes, strict=True)))


def _gap(objective: float, bound: float) -> float:
    """Relative gap; infinite when there is no bound."""
    if not np.isfinite(bound):
        return float("inf")
    return max(0.0, bound - objective) / max(abs(objective), 1e-12)
