"""Shares of samples follow the speeds of nodes, and do not flap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mbaas.core.cluster.homes import HOLD_S, LONGEST_REST_S, TOLERANCE, WINDOW_S, SpeedWeights, Work


class Feed:
    """Workers with given speeds, by default one per node, checked every second."""

    def __init__(self, speeds: dict[str, float], nodes: dict[str, str] | None = None, busy: float = 0.9) -> None:
        self.speed_weights, self.busy, self.now = SpeedWeights(), busy, 0.0
        self.speeds, self.nodes = speeds, nodes or {worker: f"node-{worker}" for worker in speeds}
        self.done = dict.fromkeys(speeds, (0.0, 0.0))
        self.changes: list[tuple[float, str]] = []
        self.speed_weights.rebalance(self.work(), self.now, because_off=False)

    def work(self) -> list[Work]:
        return [Work(worker, self.nodes[worker], *done) for worker, done in self.done.items()]

    def run(self, seconds: int, speed: Callable[[str, float], float] | None = None) -> None:
        for _ in range(seconds):
            self.now += 1
            for worker, (samples, prep_s) in self.done.items():
                rate = self.speeds[worker] if speed is None else speed(worker, self.now)
                self.done[worker] = samples + rate * self.busy, prep_s + self.busy
            reason = self.speed_weights.observe(self.work(), self.now)
            if reason is not None:
                self.changes.append((self.now, reason))
                self.speed_weights.rebalance(self.work(), self.now, because_off=True)

    @property
    def shares(self) -> dict[str, float]:
        total = sum(self.speed_weights.weights.values())
        return {node: weight / total for node, weight in self.speed_weights.weights.items()}


def test_nodes_that_are_not_measured_count_by_their_workers() -> None:
    feed = Feed({"a": 100, "b": 100, "c": 100}, {"a": "one", "b": "one", "c": "two"})
    assert feed.speed_weights.weights == {"one": 2, "two": 1}


def test_a_node_that_is_three_times_as_slow_gets_a_quarter() -> None:
    """It had half: 300 + 100 samples/s are 3/4 and 1/4.

    The shares must be off for `HOLD_S`, counted from 4 s: both workers have then been busy for 2.7 s since the first
    check.
    """
    feed = Feed({"fast": 300, "slow": 100})
    feed.run(120)
    ((when, reason),) = feed.changes
    assert when == 4 + HOLD_S
    assert reason == "node node-slo has 50 % of the samples and 25 % of the speed"
    assert feed.shares == pytest.approx({"node-fast": 0.75, "node-slow": 0.25})


def test_small_differences_are_left_alone() -> None:
    """0.5 / 0.42 - 1 = 19 %."""
    feed = Feed({"a": 58, "b": 42})
    feed.run(600)
    assert feed.changes == []


def test_workers_that_hardly_work_are_not_judged() -> None:
    feed = Feed({"a": 300, "b": 100}, busy=0.05)
    feed.run(600)
    assert feed.changes == []


def test_a_worker_that_comes_makes_its_node_heavier_as_soon_as_its_speed_is_known() -> None:
    """The nodes stay the same, so no home node moves at first: 2/3 of the speed, and half of the samples."""
    feed = Feed({"a": 100, "b": 100})
    feed.run(60)
    feed.speeds["c"], feed.nodes["c"], feed.done["c"] = 100, "node-a", (0.0, 0.0)
    feed.run(120)
    assert len(feed.changes) == 1
    assert feed.shares == pytest.approx({"node-a": 2 / 3, "node-b": 1 / 3})


def test_a_newcomer_counts_like_the_others_until_it_is_measured() -> None:
    feed = Feed({"a": 300, "b": 100})
    feed.run(60)
    work = [*feed.work(), Work("c", "node-c", 0, 0)]
    assert feed.speed_weights.rebalance(work, feed.now, because_off=False) == pytest.approx(
        {"node-a": 300, "node-b": 100, "node-c": 200}
    )


def test_speeds_that_swing_move_samples_ever_more_rarely() -> None:
    """Every two minutes another node is slow, for a day: each change doubles the pause before the next."""
    feed = Feed({"a": 300, "b": 300})
    feed.run(24 * 3600, lambda worker, now: 100 if (now // 120 % 2 == 0) == (worker == "a") else 300)
    assert len(feed.changes) <= np.log2(LONGEST_REST_S / HOLD_S) + 2 + 24 * 3600 / LONGEST_REST_S
    gaps = np.diff([when for when, _ in feed.changes])
    assert (gaps >= HOLD_S).all()
    assert gaps[-1] >= LONGEST_REST_S


def test_noise_moves_nothing() -> None:
    """Each second is up to 60 % faster or slower than the mean: over `WINDOW_S` that is far below `TOLERANCE`."""
    rng = np.random.default_rng(0)
    assert 0.6 / np.sqrt(3 * WINDOW_S) < TOLERANCE / 3
    feed = Feed({"a": 200, "b": 200, "c": 200, "d": 200})
    feed.run(4 * 3600, lambda worker, now: 200 * rng.uniform(0.4, 1.6))
    assert feed.changes == []


@pytest.mark.parametrize(
    ("looks", "rate"),
    [
        # each look: (windows since the start, samples in windows of a sample a second)
        (((0, 0), (1, 10), (2, 40)), 30),  # the look in the middle is exactly one window back
        (((0, 0), (0.5, 10), (1, 40)), 40),  # it is half a window back
        (((0, 0), (0.5, 10), (1, 40), (1.6, 70)), 60 / 1.1),
    ],
)
def test_speeds_are_means_over_a_whole_window_at_least(looks: tuple[tuple[float, float], ...], rate: float) -> None:
    speed_weights = SpeedWeights()
    for windows, samples in looks:
        now = windows * WINDOW_S
        work = [Work("a", "one", samples * WINDOW_S, now)]
        speed_weights.observe(work, now)
    assert speed_weights.rebalance(work, now, because_off=False) == {"one": pytest.approx(rate)}


def test_one_small_node_that_becomes_faster_gets_more() -> None:
    """It had a tenth, and has 2 / 11 of the speed; the other nodes had 0.1 x 11 = 1.1 times what suits them."""
    workers = "abcdefghij"
    feed = Feed(dict.fromkeys(workers, 100.0) | {"a": 200.0})
    feed.run(120)
    assert len(feed.changes) == 1
    assert "node-a has 10 % of the samples and 18 % of the speed" in feed.changes[0][1]
    assert feed.shares["node-a"] == pytest.approx(2 / 11)


def test_the_node_that_is_furthest_off_is_found_among_nodes_of_any_size() -> None:
    """Six workers on one node have 60 % of the samples and 40 % of the speed, three 30 and 50 %, one 10 % of each."""
    nodes = {**dict.fromkeys("abcdef", "large"), **dict.fromkeys("ghi", "middle"), "j": "small"}
    speeds = {"large": 400 / 6, "middle": 500 / 3, "small": 100}
    feed = Feed({worker: speeds[node] for worker, node in nodes.items()}, nodes)
    feed.run(120)
    ((_, reason),) = feed.changes
    assert reason == "node large has 60 % of the samples and 40 % of the speed"
    assert feed.shares == pytest.approx({"large": 0.4, "middle": 0.5, "small": 0.1})


def test_a_busy_worker_that_has_finished_no_sample_is_not_judged() -> None:
    feed = Feed({"a": 100, "b": 0})
    feed.run(120)
    assert feed.changes == []
