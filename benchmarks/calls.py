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
        trial_ms, coordinator_ms, relaying_ms: of these processes; the third is the cache node, or both it and the actor
            that only relays.
        prep_worker_ms: of the prep worker, whose work does not depend on how trials call: it tells the machine's pace.
        of_prep: the first three together, as a multiple of the fourth; the median of the rounds' own ratios.
        minibatches_per_s: that each trial got.
    """

    trials: int
    are_relayed: bool
    trial_ms: float
    coordinator_ms: float
    relaying_ms: float
    prep_worker_ms: float
    of_prep: float
    minibatches_per_s: float


def measure(
    trials: Sequence[int],
    *,
    rounds: int,
    seconds: float,
    is_apart: bool,
    step_s: float,
    tell: Callable[[str], None],
) -> list[CallCost]:
    """Run feeds of one node and some trials, the two ways in turn. The coordinator is on another node.

    Args:
        trials: how many trials there are, in one feed after the other.
        rounds: how often each is run.
        seconds: how long each is watched.
        is_apart: whether trials are on a node of their own, where the feed prepares nothing.
        step_s: seconds that a trial sleeps over a minibatch.
        tell: told what is run.

    Raises:
        ConfigError: there are so few trials that their calls are not relayed.
    """
    if min(trials) < RELAYED_FROM:
        raise ConfigError(
            f"--trials must be at least {RELAYED_FROM}, from which on calls are relayed, got {min(trials)}"
        )
    results = []
    with LocalCluster(1 + is_apart, store_bytes=STORE_BYTES) as cluster:
        for number in trials:
            seen: dict[bool, list[Watched]] = {False: [], True: []}
            for each in range(rounds):
                for are_relayed, runs in seen.items():
                    way = "relayed" if are_relayed else "through Ray"
                    tell(f"round {each + 1} of {rounds}: {counted(number, 'trial')}, calls {way}")
                    run = FeedRun(
                        nodes=1,
                        trials=number,
                        block_step_s=step_s,
                        seconds=seconds,
                        are_relayed=are_relayed,
                        is_apart=is_apart,
                    )
                    runs.append(watch(run, cluster))
                    if are_relayed and runs[-1].calls:
                        tell(f"{counted(runs[-1].calls, 'call')} went through Ray all the same")
            results += [_medians(number, are_relayed, runs) for are_relayed, runs in seen.items()]
    return results


def _medians(trials: int, are_relayed: bool, runs: Sequence[Watched]) -> CallCost:
    def ms(*kinds: str) -> list[float]:
        return [1e3 * run.cpu_of(*kinds) / run.blocks for run in runs]

    # The actor that only relays is started also for trials that may not use it: it waits, and would not be there.
    relays = ("CacheNode", "RelayNode") if are_relayed else ("CacheNode",)
    kinds = [ms("WatchedTrial"), ms("Coordinator"), ms(*relays), ms("PrepWorker")]
    trial, coordinator, relaying, prep_worker = map(statistics.median, kinds)
    of_prep = statistics.median(sum(others) / prep for *others, prep in zip(*kinds, strict=True))
    rate = statistics.median(run.blocks_per_s for run in runs)
    return CallCost(trials, are_relayed, trial, coordinator, relaying, prep_worker, of_prep, rate)


def table(results: Sequence[CallCost]) -> Table:
    """Show a line for each number of trials and each way."""
    headings = ("trials", "calls", "trial", "coordinator", "relaying", "prep", "of prep", "per s")
    shown = figure_table("CPU ms for each minibatch that a trial takes", headings, words=("calls",))
    for result in results:
        shown.add_row(
            str(result.trials),
            "relayed" if result.are_relayed else "by Ray",
            f"{result.trial_ms:.2f}",
            f"{result.coordinator_ms:.2f}",
            f"{result.relaying_ms:.2f}",
            f"{result.prep_worker_ms:.2f}",
            f"{result.of_prep:.2f}",
            f"{result.minibatches_per_s:.1f}",
        )
    return shown
