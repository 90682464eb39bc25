"""Calibration: the costs that `benchmarks.scale.system` needs, measured on this machine.

What the pure core costs is measured at many sizes without Ray; all else is fitted to the CPU seconds of the processes
of small real feeds, for which it is known how many parts, calls and deliveries there were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.local_cluster import LocalCluster
from benchmarks.scale.core_costs import SIZES, Growth, core_cost, cut_costs_s, fit, growth
from benchmarks.scale.real_feeds import STORE_BYTES, FeedRun, Watched, pull_s, watch
from benchmarks.scale.system import Costs, System, cut_cost_s

NODES = 4

RUNS = tuple(
    FeedRun(nodes=nodes, trials=trials, block_step_s=step_s)
    for nodes, trials in ((1, 1), (1, 4), (2, 2), (4, 1), (4, 4))
    for step_s in (0.0, 0.03)
)
"""With a slow step a call brings several blocks, else one: so calls and deliveries can be told apart."""

WORKERS = ("PrepWorker", "CacheNode")
DAEMONS = ("raylet", "gcs_server", "DashboardAgent", "RuntimeEnvAgent", "other")


@dataclass(frozen=True)
class Calibration:
    """Costs, and how well they explain what was measured.

    Attributes:
        costs: of single steps.
        error: largest relative error of the coordinator's CPU seconds over all runs.
        runs: what they were fitted to.
    """

    costs: Costs
    error: float
    runs: tuple[Watched, ...]


def calibrate(report: Callable[[str], None] = print) -> Calibration:
    """Measure, in about two minutes; other programs on the machine hardly change CPU seconds."""
    report("measuring the staging core")
    part, ask = growth([core_cost(nodes, trials) for nodes, trials in SIZES])
    runs = []
    with LocalCluster(NODES, store_bytes=STORE_BYTES) as cluster:
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
        f"{run.nodes} node{'s' * (run.nodes > 1)}, {run.trials} trial{'s' * (run.trials > 1)}{slow}: "
        f"{seen.blocks / seen.seconds:.0f} deliveries/s in {seen.calls / seen.seconds:.0f} calls/s, "
        f"{each * seen.cpu_of('Coordinator'):.2f} ms of the coordinator each"
    )


def explain(
    runs: Sequence[Watched], *, part: Growth, ask: Growth, cut_s: tuple[float, float], wait_s: float
) -> tuple[Costs, float]:
    """Costs that explain the CPU seconds of runs best, and the largest relative error for the coordinator.

    What the pure parts cost at a run's size is taken off first: the model adds it for the size that it looks at.

    Args:
        runs: what was measured.
        part, ask: what the core costs.
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
    """What is left when what is known is taken off, at least a tenth."""
    return [max(0.1 * all_s, all_s - s) for all_s, s in zip(seconds, known, strict=True)]
