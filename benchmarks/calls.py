"""Cost of calls for blocks on a machine without the coordinator: through Ray, and relayed together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks import rows
from benchmarks.local_cluster import local_cluster
from benchmarks.scale.real_feeds import STORE_BYTES, FeedRun, Watched, watch
from mbaas.base.units import counted
from mbaas.calls.server import RELAYED_FROM
from mbaas.errors import ConfigError


@dataclass(frozen=True)
class CallCost:
    """Medians over rounds; CPU times are milliseconds per minibatch that a trial takes.

    Attributes:
        trials: on the machine.
        are_relayed: whether calls were relayed.
        trial_ms, coordinator_ms, relaying_ms: CPU time of the trial, the coordinator, and the cache node with the
            relay actor, if there is one.
        prep_worker_ms: CPU time of the prep worker: independent of the calls, it indicates the machine's speed.
        of_prep: the first three together, as a multiple of the fourth; median of the rounds' ratios.
        minibatches_per_s: rate of each trial.
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
    """Run feeds of one node with both kinds of calls, alternating. The coordinator is on another node.

    Args:
        trials: numbers of trials, one feed after another.
        rounds: runs of each feed.
        seconds: length of each measurement.
        is_apart: whether trials are on a separate node where the feed prepares nothing.
        step_s: seconds that a trial sleeps for each minibatch.
        tell: called with progress messages.

    Raises:
        ConfigError: too few trials for relayed calls.
    """
    if min(trials) < RELAYED_FROM:
        raise ConfigError(
            f"--trials must be at least {RELAYED_FROM}, because fewer trials are not relayed, got {min(trials)}"
        )
    results = []
    with local_cluster(1 + is_apart, store_bytes=STORE_BYTES) as cluster:
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

    # The relay actor also starts for trials that may not use it. It only waits then, so it is not counted.
    relays = ("CacheNode", "RelayNode") if are_relayed else ("CacheNode",)
    kinds = [ms("WatchedTrial"), ms("Coordinator"), ms(*relays), ms("PrepWorker")]
    trial, coordinator, relaying, prep_worker = map(statistics.median, kinds)
    of_prep = statistics.median(sum(others) / prep for *others, prep in zip(*kinds, strict=True))
    rate = statistics.median(run.blocks_per_s for run in runs)
    return CallCost(trials, are_relayed, trial, coordinator, relaying, prep_worker, of_prep, rate)


def table(results: Sequence[CallCost]) -> Table:
    """Return a table with a row for each number of trials and kind of calls."""
    columns: dict[str, Callable[[CallCost], str]] = {
        "trials": lambda each: str(each.trials),
        "calls": lambda each: "relayed" if each.are_relayed else "by Ray",
        "trial": lambda each: f"{each.trial_ms:.2f}",
        "coordinator": lambda each: f"{each.coordinator_ms:.2f}",
        "relaying": lambda each: f"{each.relaying_ms:.2f}",
        "prep": lambda each: f"{each.prep_worker_ms:.2f}",
        "of prep": lambda each: f"{each.of_prep:.2f}",
        "per s": lambda each: f"{each.minibatches_per_s:.1f}",
    }
    return rows("CPU ms for each minibatch that a trial takes", results, columns, words=("calls",))
