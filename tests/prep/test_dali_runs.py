"""Consecutive batches of a graph deliver or refuse each sample once, even if any batch fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mbaas.prep.engines.dali_runs import GraphRuns, types

SAMPLES = 23
REFUSED, FULL = "Failed to decode sample", "CUDA allocation failed"


def doubled() -> Any:
    from nvidia.dali import fn

    return fn.external_source(name="number", dtype=types.INT32, ndim=1, no_copy=True) * 2


class Flaky(GraphRuns):
    """Runs that fail at random, either when the graph is fed or when its results are fetched.

    Args:
        seed: of the random failures.
        bad: samples that DALI never accepts.
        often: probability that fetching a batch of several samples fails; feeding fails half as often.
    """

    def __init__(self, seed: int, bad: set[int], limit: int, often: float = 0.2) -> None:
        super().__init__(doubled, threads=1, device_id=None, limit=limit, unit="samples")
        self._chance, self._bad, self._often = np.random.default_rng(seed), bad, often
        self.fed: list[list[int]] = []
        self.all_fed: list[list[int]] = []

    def _feed(self, feeds: Any, indices: NDArray[np.intp]) -> None:
        if self._chance.random() < self._often / 2:
            self.fed.clear()
            raise RuntimeError(FULL)
        super()._feed(feeds, indices)
        self.fed.append(indices.tolist())
        self.all_fed.append(indices.tolist())

    def _results(self) -> Any:
        first = self.fed.pop(0)
        if self._bad & {*first} or (len(first) > 1 and self._chance.random() < self._often):
            self.fed.clear()
            raise RuntimeError(REFUSED)
        return super()._results()


@pytest.mark.parametrize("seed", range(60))
def test_each_sample_is_delivered_or_refused_once_whatever_fails(seed: int) -> None:
    chance = np.random.default_rng(seed)
    bad = {*chance.choice(SAMPLES, chance.integers(0, 4), replace=False).tolist()}
    runs = Flaky(seed, bad, limit=int(chance.integers(1, 40)))
    taken = np.sort(chance.choice(SAMPLES, chance.integers(1, SAMPLES + 1), replace=False))
    numbers = [np.full(1 + index % 3, index, np.int32) for index in range(SAMPLES)]
    delivered: dict[int, list[int]] = {}

    def deliver(results: Mapping[int, Any]) -> None:
        assert not delivered.keys() & results.keys()
        delivered.update({index: np.asarray(result).tolist() for index, result in results.items()})

    refused = runs.run(taken, chance.integers(1, 9, SAMPLES), {"number": numbers}, deliver)
    assert sorted([*delivered, *refused]) == taken.tolist()
    assert bad & {*taken.tolist()} <= {*refused}
    assert delivered == {index: [2 * index] * (1 + index % 3) for index in delivered}
    runs.close()


def test_a_batch_in_hand_is_forgotten_when_somebody_stops_in_the_middle() -> None:
    """Otherwise the next run would deliver the results of this batch."""
    runs, seen = GraphRuns(doubled, threads=1, device_id=None, limit=4, unit="samples"), list[int]()
    ones = np.ones(SAMPLES, np.int64)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def numbers(first: int) -> dict[str, list[NDArray[np.int32]]]:
        return {"number": [np.full(1, first + index, np.int32) for index in range(SAMPLES)]}

    with pytest.raises(KeyboardInterrupt):
        runs.run(np.arange(SAMPLES), ones, numbers(0), stop)
    runs.run(
        np.arange(SAMPLES),
        ones,
        numbers(100),
        lambda results: seen.extend(int(np.asarray(result)[0]) for result in results.values()),
    )
    assert seen == [2 * (100 + index) for index in range(SAMPLES)]
    runs.close()


def test_two_batches_are_in_flight_while_the_results_of_one_are_delivered() -> None:
    """A GPU always has a batch to prepare, and CPUs one to begin."""
    runs, seen, in_flight = Flaky(1, set(), limit=4, often=0.0), list[int](), list[int]()
    numbers = [np.full(1, index, np.int32) for index in range(SAMPLES)]

    def deliver(results: Mapping[int, Any]) -> None:
        seen.extend(results)
        in_flight.append(len(runs.fed))

    refused = runs.run(np.arange(SAMPLES), np.ones(SAMPLES, np.int64), {"number": numbers}, deliver)
    assert refused == []
    assert seen == [*range(SAMPLES)]
    assert in_flight == [2, 2, 2, 2, 1, 0]
    runs.close()


def test_a_failure_with_two_batches_in_flight_costs_only_these_a_second_run() -> None:
    """Either may be the cause. Both are run again alone, and the bad one is halved until its sample is found."""
    runs, seen = Flaky(1, {5}, limit=4, often=0.0), list[int]()
    numbers = [np.full(1, index, np.int32) for index in range(SAMPLES)]
    refused = runs.run(np.arange(SAMPLES), np.ones(SAMPLES, np.int64), {"number": numbers}, seen.extend)
    assert refused == [5]
    assert seen == [index for index in range(SAMPLES) if index != 5]
    again = [indices for indices in runs.all_fed if 4 in indices or 8 in indices]
    assert again == [[4, 5, 6, 7], [8, 9, 10, 11], [4, 5, 6, 7], [4, 5], [4], [8, 9, 10, 11]]
    runs.close()


class Small(GraphRuns):
    """Runs on a device with room for ``room`` samples, without the ones that it can never hold."""

    def __init__(self, room: int, never: set[int]) -> None:
        super().__init__(doubled, threads=1, device_id=None, limit=8, unit="samples")
        self._room, self._never = room, never

    def _feed(self, feeds: Any, indices: NDArray[np.intp]) -> None:
        if len(indices) > self._room or self._never & {*indices.tolist()}:
            raise RuntimeError(FULL)
        super()._feed(feeds, indices)


@pytest.mark.parametrize(("room", "never", "limit"), [(8, {5}, 8), (8, {0, 22}, 8), (2, set(), 2), (1, set(), 1)])
def test_only_a_batch_that_is_too_large_halves_the_limit(room: int, never: set[int], limit: int) -> None:
    """A sample that is too large alone must not cost all later batches their size."""
    runs, seen = Small(room, never), list[int]()
    numbers = [np.full(1, index, np.int32) for index in range(SAMPLES)]
    for _ in range(4):
        refused = runs.run(np.arange(SAMPLES), np.ones(SAMPLES, np.int64), {"number": numbers}, seen.extend)
        assert {*refused} == never
    assert runs._limit == limit
    assert sorted(seen) == sorted(4 * [index for index in range(SAMPLES) if index not in never])
    runs.close()
