"""Measurement of the costs for `benchmarks.scale.system` on this machine.

The pure core is measured at many sizes without Ray. All other costs are fitted to CPU seconds of the processes of small
real feeds, with known numbers of parts, calls and deliveries.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

from benchmarks.local_cluster import local_cluster
from benchmarks.scale.real_feeds import STORE_BYTES, FeedRun, Watched, pull_s, watch
from benchmarks.scale.system import Costs, System, cut_cost_s, growth_s
from mbaas.base.units import counted
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.samples.placement import BlockPart, NodeWeight, Placement

NODES = 4

RUNS = tuple(
    FeedRun(nodes=nodes, trials=trials, block_step_s=step_s)
    for nodes, trials in ((1, 1), (1, 4), (2, 2), (4, 1), (4, 4))
    for step_s in (0.0, 0.03)
)
"""With a slow step a call returns several blocks, otherwise one. So calls and deliveries can be distinguished."""

WORKERS = ("PrepWorker", "CacheNode")
DAEMONS = ("raylet", "gcs_server", "DashboardAgent", "RuntimeEnvAgent", "other")
"""Kinds of processes, as in `mbaas.tools.bench.cpu.kind_of`, whose CPU seconds are fitted together."""


@dataclass(frozen=True)
class Calibration:
    """Costs, and the quality of their fit.

    Attributes:
        costs: of single steps.
        error: largest relative error of the coordinator's CPU seconds over all runs.
        runs: the measurements behind the fit.
    """

    costs: Costs
    error: float
    runs: tuple[Watched, ...]


def calibrate(report: Callable[[str], None] = print) -> Calibration:
    """Measure for about two minutes; other programs on the machine hardly change CPU seconds."""
    report("measuring the staging core")
    part, ask = growth([core_cost(nodes, trials) for nodes, trials in CORE_SIZES])
    runs = []
    with local_cluster(NODES, store_bytes=STORE_BYTES) as cluster:
        wait_s = pull_s(cluster)
        for run in RUNS:
            runs.append(watch(run, cluster))
            report(_described(runs[-1]))
    costs, error = explain(runs, part=part, ask=ask, cut_s=cut_costs_s(), wait_s=wait_s)
    return Calibration(costs, error, tuple(runs))


def _described(seen: Watched) -> str:
    run, each = seen.run, 1e3 / max(1, seen.blocks)
    slow = " with a step" if run.block_step_s else ""
    return (
        f"{counted(run.nodes, 'node')}, {counted(run.trials, 'trial')}{slow}: "
        f"{seen.blocks / seen.seconds:.0f} deliveries/s in {seen.calls / seen.seconds:.0f} calls/s, "
        f"{each * seen.cpu_of('Coordinator'):.2f} ms of the coordinator each"
    )


def explain(
    runs: Sequence[Watched], *, part: Growth, ask: Growth, cut_s: tuple[float, float], wait_s: float
) -> tuple[Costs, float]:
    """Fit costs to the CPU seconds of runs; also return the largest relative error for the coordinator.

    The cost of the pure parts at the size of a run is subtracted first: the model adds their cost for its own size.

    Args:
        runs: the measurements.
        part, ask: costs of the core.
        cut_s: `Costs.cut_s` and `Costs.cut_node_s`.
        wait_s: `Costs.pull_s`.
    """
    pure = Costs(part_growth_s=part.more_s, ask_growth_s=ask.more_s, cut_s=cut_s[0], cut_node_s=cut_s[1], pull_s=wait_s)
    cuts_s = [_cut_s(run, pure) for run in runs]
    known = [
        r.parts * part.at(r.run.nodes, r.run.trials)
        + r.calls * ask.at(r.run.nodes, r.run.trials)
        + r.parts / r.run.nodes * cut
        for r, cut in zip(runs, cuts_s, strict=True)
    ]
    # Seconds are a column, too: deadlines and heartbeats cost the coordinator time even when it makes no blocks.
    rows = [(r.seconds, r.parts, r.calls, r.blocks, r.blocks * r.run.nodes) for r in runs]
    measured = _cpu(runs, "Coordinator")
    found = fit(rows, _less(measured, known)).tolist()
    said = [sum(c * n for c, n in zip(found, row, strict=True)) + s for row, s in zip(rows, known, strict=True)]
    own_cuts = [r.parts * pure.own_cuts * cut for r, cut in zip(runs, cuts_s, strict=True)]
    made = [(r.parts, r.parts * r.run.block_samples / r.run.nodes) for r in runs]
    fetch_s, prep_s = fit(made, _less(_cpu(runs, *WORKERS), own_cuts)).tolist()
    taken = [(r.blocks, r.blocks * r.run.nodes) for r in runs]
    open_s, open_part_s = fit(taken, _cpu(runs, "WatchedTrial")).tolist()
    moved = [(r.seconds, r.parts, r.blocks * (r.run.nodes - 1)) for r in runs]
    _, daemon_part_s, daemon_pull_s = fit(moved, _cpu(runs, *DAEMONS)).tolist()
    costs = replace(
        pure,
        part_s=found[1] + part.base_s,
        ask_s=found[2] + ask.base_s,
        delivery_s=found[3],
        ref_s=found[4],
        fetch_s=fetch_s,
        prep_s=prep_s,
        open_s=open_s,
        open_part_s=open_part_s,
        daemon_part_s=daemon_part_s,
        daemon_pull_s=daemon_pull_s,
    )
    return costs, max(abs(s / m - 1) for s, m in zip(said, measured, strict=True))


def _cut_s(seen: Watched, costs: Costs) -> float:
    return cut_cost_s(System(nodes=seen.run.nodes, block_samples=seen.run.block_samples), costs)


def _cpu(runs: Sequence[Watched], *kinds: str) -> list[float]:
    return [run.cpu_of(*kinds) for run in runs]


def _less(seconds: Sequence[float], known: Sequence[float]) -> list[float]:
    """Subtract known seconds, but leave at least a tenth: the fit needs positive values."""
    return [max(0.1 * all_s, all_s - s) for all_s, s in zip(seconds, known, strict=True)]


# ---- costs of the pure parts ----

CORE_SIZES = ((1, 1), (1, 32), (1, 128), (16, 1), (16, 16), (64, 1), (64, 64), (192, 1), (192, 16))
"""(nodes, trials) at which the core is measured."""

CORE_PARTS = 200
"""Least number of measured parts: a step takes 140 us, and a garbage collection as long as several steps."""

CUT_NODES = 32
CUT_SAMPLES = (64, 1 << 14)


@dataclass(frozen=True)
class CoreCost:
    """CPU seconds of the core in a feed of ``nodes`` with a worker each and ``trials`` in step.

    Attributes:
        part_s: for a finished part, including the assignments and deliveries that follow.
        ask_s: for a call.
        parts: number of measured parts.
        asks: number of measured calls.
    """

    nodes: int
    trials: int
    part_s: float
    ask_s: float
    parts: int
    asks: int


@dataclass(frozen=True)
class Growth:
    """CPU seconds of a step: ``base_s``, plus ``more_s`` for each node, each trial, and each pair of these."""

    base_s: float
    more_s: tuple[float, float, float]

    def at(self, nodes: int, trials: int) -> float:
        """Return the CPU seconds in a feed of this size."""
        return self.base_s + growth_s(self.more_s, nodes, trials)


def core_cost(nodes: int, trials: int) -> CoreCost:
    """Drive a staging core through blocks of one part per node, with all trials in step.

    Garbage collection is off meanwhile, as in `timeit`: its cost depends on all other objects of the process.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _driven(nodes, trials, blocks=max(3, ceil(CORE_PARTS / nodes)))
    finally:
        if collects:
            gc.enable()


def _driven(nodes: int, trials: int, *, blocks: int) -> CoreCost:
    parts = tuple(BlockPart(f"node-{i}", 1) for i in range(nodes))
    limits = StagingLimits(budget_bytes=8, ahead_blocks=4)
    core = StagingState(limits, 1 << 30, lambda _: 1, lambda _block, _shuffle: parts)
    tasks: deque[int] = deque()
    asked, made = _Stopwatch(), _Stopwatch()

    def send(event: ev.Event) -> None:
        tasks.extend(i.task for i in core.handle(event, 0.0) if isinstance(i, ev.Prepare))

    for block_part in parts:
        send(ev.WorkerUp(block_part.home, 2, block_part.home))
    for trial in range(trials):
        send(ev.Join(str(trial), 1))
    for block in range(blocks + 1):
        if block == 1:  # block 0 fills the window
            asked, made = _Stopwatch(), _Stopwatch()
        for trial in range(trials):
            with asked:
                send(ev.Ask(str(trial), 1, cursor=block, released=block, done=block))
        while not core.window.is_ready(block):
            with made:
                send(ev.TaskEnded(tasks.popleft()))
    return CoreCost(nodes, trials, made.mean_s, asked.mean_s, made.times, asked.times)


class _Stopwatch:
    """Measures the mean CPU seconds of the code inside its ``with`` statement."""

    def __init__(self) -> None:
        self._total_s, self.times = 0.0, 0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *exc_info: object) -> None:
        self._total_s += time.thread_time() - self._began
        self.times += 1

    @property
    def mean_s(self) -> float:
        return self._total_s / max(1, self.times)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Fit non-negative costs to measured seconds with the least relative error.

    Args:
        rows: counts of each step, for each measurement.
        seconds: duration of each measurement, above 0.
    """
    measured = np.maximum(np.array(seconds, np.float64), 1e-12)
    solved, _ = nnls(np.array(rows, np.float64) / measured[:, None], np.ones(len(measured)))
    return np.asarray(solved, np.float64)


def growth(points: Sequence[CoreCost]) -> tuple[Growth, Growth]:
    """Fit the costs of a part and of a call to measurements at several sizes."""
    rows = [(1.0, p.nodes, p.trials, p.nodes * p.trials) for p in points]

    def fitted(seconds: list[float]) -> Growth:
        base_s, by_node, by_trial, by_pair = fit(rows, seconds).tolist()
        return Growth(base_s, (by_node, by_trial, by_pair))

    return fitted([p.part_s for p in points]), fitted([p.ask_s for p in points])


def cut_costs_s() -> tuple[float, float]:
    """Measure the CPU seconds for the homes of a block, for each node: per sample, and once."""
    few, many = (_homes_s(samples) / CUT_NODES for samples in CUT_SAMPLES)
    each_s = max(0.0, (many - few) / (CUT_SAMPLES[1] - CUT_SAMPLES[0]))
    return each_s, max(0.0, few - CUT_SAMPLES[0] * each_s)


def _homes_s(samples: int, *, repeats: int = 5) -> float:
    """Return the least CPU seconds over several tries to find the homes of ``samples`` on `CUT_NODES` nodes."""
    # infinite limits: computing the real ones is not part of cutting a block
    placement = Placement(1, tuple(NodeWeight(f"node-{i}", 1) for i in range(CUT_NODES)), (inf,) * CUT_NODES)
    ids, times = np.arange(samples), []
    for _ in range(repeats):
        began = time.thread_time()
        placement.of(ids)
        times.append(time.thread_time() - began)
    return min(times)
