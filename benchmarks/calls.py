"""What calls for blocks cost on a machine without the coordinator: each made through Ray, and relayed together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.local_cluster import LocalCluster
from benchmarks.scale.real_feeds import STORE_BYTES, FeedRun, Watched, watch
from mbaas.bench.render import figure_table
from mbaas.errors import ConfigError
from mbaas.transports import RELAYED_FROM
from mbaas.units import counted


@dataclass(frozen=True)
class CallCost:
    """Medians of the rounds; CPU times are in milliseconds for each minibatch that a trial takes.

    Attributes:
        trials: on the machine.
        are_relayed: how they called.
        trial_ms, coordinator_ms, cache_node_ms: of these processes.
        prep_worker_ms: of the prep worker, whose work does not depend on how trials call: it tells the machine's pace.
        of_prep: the first three together, as a multiple of the fourth; the median of the rounds' own ratios.
        minibatches_per_s: that each trial got.
    """

    trials: int
    are_relayed: bool
    trial_ms: float
    coordinator_ms: float
    cache_node_ms: float
    prep_worker_ms: float
    of_prep: float
    minibatches_per_s: float


def measure(trials: Sequence[int], *, rounds: int, seconds: float, tell: Callable[[str], None]) -> list[CallCost]:
    """Run feeds of one node and some trials on it, the two ways in turn. The coordinator is on another node.

    Raises:
        ConfigError: there are so few trials that their calls are not relayed.
    """
    if min(trials) < RELAYED_FROM:
        raise ConfigError(
            f"--trials must be at least {RELAYED_FROM}, from which on calls are relayed, got {min(trials)}"
        )
    results = []
    with LocalCluster(1, store_bytes=STORE_BYTES) as cluster:
        for number in trials:
            seen: dict[bool, list[Watched]] = {False: [], True: []}
            for each in range(rounds):
                for are_relayed, runs in seen.items():
                    way = "relayed" if are_relayed else "through Ray"
                    tell(f"round {each + 1} of {rounds}: {counted(number, 'trial')}, calls {way}")
                    run = FeedRun(nodes=1, trials=number, seconds=seconds, are_relayed=are_relayed)
                    runs.append(watch(run, cluster))
            results += [_medians(number, are_relayed, runs) for are_relayed, runs in seen.items()]
    return results


def _medians(trials: int, are_relayed: bool, runs: Sequence[Watched]) -> CallCost:
    def ms(kind: str) -> list[float]:
        return [1e3 * run.cpu_of(kind) / run.blocks for run in runs]

    kinds = [ms(kind) for kind in ("WatchedTrial", "Coordinator", "CacheNode", "PrepWorker")]
    trial, coordinator, cache_node, prep_worker = map(statistics.median, kinds)
    of_prep = statistics.median(sum(others) / prep for *others, prep in zip(*kinds, strict=True))
    rate = statistics.median(run.blocks_per_s for run in runs)
    return CallCost(trials, are_relayed, trial, coordinator, cache_node, prep_worker, of_prep, rate)


def table(results: Sequence[CallCost]) -> Table:
    """Show a line for each number of trials and each way."""
    headings = ("trials", "calls", "trial", "coordinator", "cache", "prep", "of prep", "per s")
    shown = figure_table("CPU ms for each minibatch that a trial takes", headings, words=("calls",))
    for result in results:
        shown.add_row(
            str(result.trials),
            "relayed" if result.are_relayed else "by Ray",
            f"{result.trial_ms:.2f}",
            f"{result.coordinator_ms:.2f}",
            f"{result.cache_node_ms:.2f}",
            f"{result.prep_worker_ms:.2f}",
            f"{result.of_prep:.2f}",
            f"{result.minibatches_per_s:.1f}",
        )
    return shown
