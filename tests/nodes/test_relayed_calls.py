"""Consumers on another node than the coordinator share one call for blocks through a relay.

The relay is their node's cache node, or an actor for this purpose.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from node_feeds import OPTIONS, SAMPLES, augmented, digests
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import mbaas
from mbaas.calls import client
from mbaas.core.layout import MIN_BLOCKS_IN_BUDGET
from mbaas.ray_cluster import actor_names, resources
from mbaas.tools.chaos.participants import kill, participants
from support.processes import cache_node_pids, coordinator_pid, relay_pids
from support.trials import EpochRecord, record_epoch
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers run where this folder is not on the path


@ray.remote(num_cpus=0)
class CountingTrial:
    """A trial that counts its calls for blocks through Ray."""

    def join(self, feed: str, consumer: str) -> None:
        self._made, answer = 0, client.answer

        def count(ref: Any, timeout_s: float, what: str) -> Any:
            self._made += "asks for blocks" in what
            return answer(ref, timeout_s, what)

        client.answer = count
        self._loader = mbaas.join(feed, consumer, format="numpy")

    def epoch(self) -> tuple[EpochRecord, int]:
        """Run an epoch; return its record and the number of calls through Ray meanwhile."""
        before = self._made
        return record_epoch(self._loader), self._made - before

    def close(self) -> None:
        self._loader.close()


def trials_on(node: str, feed: str, names: str) -> list[Any]:
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    trials = [CountingTrial.options(scheduling_strategy=here).remote() for _ in names]
    ray.get([trial.join.remote(feed, name) for trial, name in zip(trials, names, strict=True)], timeout=60.0)
    return trials


LOOK_S = 0.5
"""Pause between epochs that only show how calls are made."""


def an_epoch(trials: list[Any]) -> tuple[set[str], list[int]]:
    """Run an epoch of all trials together; return their digests and their calls through Ray."""
    seen = ray.get([trial.epoch.remote() for trial in trials], timeout=120.0)
    assert [record.flaws(range(SAMPLES)) for record, _ in seen] == [[]] * len(trials)
    return {record.row_digest for record, _ in seen}, [calls for _, calls in seen]


def test_calls_of_two_trials_of_a_machine_need_no_ray_and_go_on_through_it_when_somebody_dies(
    three_nodes, data, feed_name
):
    with mbaas.serve("one", data, augmented(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 2)
    with mbaas.serve(feed_name, data, augmented(), prep_workers=3, **OPTIONS) as feed:
        first, second, _ = (node.node for node in feed.status().nodes)
        mbaas.announce(feed.name, list("abc"))
        trials = [*trials_on(first, feed.name, "ab"), *trials_on(second, feed.name, "c")]
        assert [an_epoch(trials)[0] for _ in range(2)] == [{digest} for digest in alone]

        def are_relayed() -> bool:
            *calls, single = an_epoch(trials)[1]
            assert single > 0, "one trial alone calls through Ray"
            return not any(calls)

        wait_until(are_relayed, "all calls of both are relayed", period_s=LOOK_S)
        for killed in (cache_node_pids(feed.name), [coordinator_pid(feed.name)]):
            running = [trial.epoch.remote() for trial in trials]
            for pid in killed:
                kill(pid)
            seen = ray.get(running, timeout=120.0)
            assert [record.flaws(range(SAMPLES)) for record, _ in seen] == [[]] * 3
            found = {(record.ledger.feed_epoch, record.row_digest) for record, _ in seen}
            assert len(found) == len({epoch for epoch, _ in found}), "trials that had not begun may get the next epoch"
            wait_until(are_relayed, "they are relayed again", period_s=LOOK_S)
        ray.get([trial.close.remote() for trial in trials], timeout=60.0)
        for trial in trials:
            ray.kill(trial)
    assert not actor_names.children(feed_name, "cache")


def test_on_a_node_that_prepares_nothing_an_actor_relays_whoever_dies_and_ends_with_the_feed(
    three_nodes, data, feed_name
):
    """Blocks of one minibatch, so that calls are frequent."""
    batch = 16
    options = {"batch_size": batch, "staging_bytes": MIN_BLOCKS_IN_BUDGET * batch * 3200}
    with mbaas.serve("one", data, augmented(), prep_workers=1, **options) as one:
        alone = digests(one, 2)
    with mbaas.serve(feed_name, data, augmented(), prep_workers=1, **options) as feed:
        (preparing,) = (node.node for node in feed.status().nodes)
        apart = next(node for node in resources.store_bytes(with_cpus=True) if node != preparing)
        mbaas.announce(feed.name, list("abcd"))
        trials = trials_on(apart, feed.name, "abcd")
        assert [an_epoch(trials)[0] for _ in range(2)] == [{digest} for digest in alone]
        wait_until(lambda: not any(an_epoch(trials)[1]), "all calls are relayed", deadline_s=60.0, period_s=LOOK_S)
        for relays, coordinators in ((1, 0), (0, 1), (1, 1)):
            running = [trial.epoch.remote() for trial in trials]
            killed = [*relay_pids(feed.name)[:relays], *[coordinator_pid(feed.name)][:coordinators]]
            assert len(killed) == relays + coordinators
            for pid in killed:
                kill(pid)
            seen = ray.get(running, timeout=120.0)
            assert [record.flaws(range(SAMPLES)) for record, _ in seen] == [[]] * len(trials)
            wait_until(lambda: not any(an_epoch(trials)[1]), "they are relayed again", deadline_s=60.0, period_s=LOOK_S)
        (relay,) = relay_pids(feed.name)
        assert [each.target for each in participants() if each.pid == relay] == ["relay"]
        ray.get([trial.close.remote() for trial in trials], timeout=60.0)
        for trial in trials:
            ray.kill(trial)
    assert not actor_names.children(feed_name, "relay")
