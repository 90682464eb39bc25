"""The permutation is one-to-one, uniform over keys, cheap, and never changes."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise, permutations
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.samples.order import Permutation

pytestmark = pytest.mark.slow

keys = st.integers(0, 2**64 - 1)


def z_of_chi_square(counts: NDArray[np.int64]) -> float:
    """Deviation of the chi-square statistic from its mean (dof), in standard deviations (variance 2 dof).

    The keys of every test are fixed, so it always passes or always fails. The bound of 4.5 leaves room for random
    variation; a real bias far exceeds it.
    """
    expected = counts.mean()
    dof = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - dof) / math.sqrt(2 * dof))


@given(size=st.integers(1, 5_000), key=keys)
@example(size=1, key=0)
@example(size=2, key=0)
@example(size=3, key=2**64 - 1)
@example(size=256, key=7)
@example(size=257, key=7)
@example(size=4_096, key=7)
@example(size=4_097, key=7)
@settings(max_examples=60, deadline=None)
def test_every_element_comes_once(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    everything = np.arange(size)
    shuffled = permutation(everything)
    assert shuffled.dtype == np.int64
    assert np.array_equal(np.sort(shuffled), everything)


@pytest.mark.parametrize("size", [999_983, 1_000_000, 2**20 + 1])
def test_a_million_elements_come_once_each(size: int) -> None:
    shuffled = Permutation(size, 3)(np.arange(size))
    assert np.array_equal(np.bincount(shuffled, minlength=size), np.ones(size))


@given(size=st.sampled_from([10**12, 10**12 - 11, 2**40, 2**62 - 1, 2**62]), key=keys, data=st.data())
@settings(max_examples=30, deadline=None)
def test_elements_of_huge_domains_differ_and_stay_inside(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    permutation = Permutation(size, key)
    shuffled = permutation(np.array(positions))
    assert len(set(shuffled.tolist())) == len(positions)
    assert (shuffled >= 0).all()
    assert (shuffled < size).all()


def test_a_batch_longer_than_a_chunk_equals_its_parts() -> None:
    permutation = Permutation(10**8, 5)
    positions = np.arange(20_000, 45_001)
    one_by_one = [int(permutation(positions[i : i + 1])[0]) for i in (0, 8_191, 8_192, 25_000)]
    assert permutation(positions)[[0, 8_191, 8_192, 25_000]].tolist() == one_by_one


def test_the_input_is_left_alone_and_an_empty_batch_is_empty() -> None:
    positions = np.arange(1_000)
    positions.flags.writeable = False
    for size in (1_000, 1):
        assert Permutation(size, 1)(positions[:0]).tolist() == []
    Permutation(1_000, 1)(positions)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_tiny_domains_see_all_their_permutations_equally_often(size: int) -> None:
    """30,000 keys over at most 720 permutations: at least 40 of each expected."""
    seen = Counter(tuple(Permutation(size, key)(np.arange(size)).tolist()) for key in range(30_000))
    counts = np.array([seen[order] for order in permutations(range(size))])
    assert z_of_chi_square(counts) < 4.5


@pytest.mark.parametrize("size", [30, 257, 300, 1_000])
def test_the_first_position_is_uniform_over_keys(size: int) -> None:
    """10 expected in each cell."""
    firsts = [int(Permutation(size, key)(np.arange(1))[0]) for key in range(10 * size)]
    assert abs(z_of_chi_square(np.bincount(firsts, minlength=size))) < 4.5


@pytest.mark.parametrize("size", [41, 257, 1_000, 10**6])
def test_pairs_of_positions_are_uniform_over_keys(size: int) -> None:
    """Each pair falls into one of 16 x 16 cells, 31 expected in each.

    A cell's probability is not quite 1/256: the two positions differ, and the ranges are not all equally long.
    """
    number_of_keys = 8_000
    positions = np.array([0, 1, 7, 17, 40])
    cells = np.array([Permutation(size, key)(positions) for key in range(number_of_keys)]) * 16 // size
    lengths = np.bincount(np.arange(size) * 16 // size)
    expected = (np.outer(lengths, lengths) - np.diag(lengths)).ravel() / (size * (size - 1)) * number_of_keys
    for a, b in combinations(range(len(positions)), 2):
        counts = np.bincount(cells[:, a] * 16 + cells[:, b], minlength=256)
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) / math.sqrt(2 * 255) < 4.5


@pytest.mark.parametrize("size", [100, 500, 10_000])
def test_the_distance_of_neighbours_is_uniform_over_keys(size: int) -> None:
    """In a random order, (p[i+1] - p[i]) mod size is uniform over 1 .. size-1: no runs, no series."""
    runs = -(-30 * size // 99)
    distances = np.concatenate([np.diff(Permutation(size, key)(np.arange(100))) % size for key in range(runs)])
    counts = np.bincount(distances, minlength=size)
    assert counts[0] == 0
    assert abs(z_of_chi_square(counts[1:])) < 4.5


def test_ascents_are_as_frequent_as_in_a_random_order() -> None:
    """A random order ascends at (n-1)/2 of its steps, with variance (n+1)/12: +- 289 for a million."""
    size = 10**6
    for key in range(5):
        ascents = int((np.diff(Permutation(size, key)(np.arange(size))) > 0).sum())
        assert abs(ascents - (size - 1) / 2) < 4.5 * math.sqrt((size + 1) / 12)


def test_neighbouring_keys_give_unrelated_orders() -> None:
    """Two random orders share one fixed position on average (Poisson): 100 +- 10 for 100 pairs."""
    everything = np.arange(1_000)
    orders = [Permutation(1_000, key)(everything) for key in range(101)]
    shared = sum(int((a == b).sum()) for a, b in pairwise(orders))
    assert 60 < shared < 140


def test_the_arithmetic_never_changes() -> None:
    """A feed resumed with a later release must continue in the same order."""
    assert Permutation(10, 0)(np.arange(10)).tolist() == [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]
    assert Permutation(1_000, 42)(np.arange(5)).tolist() == [695, 757, 875, 247, 249]
    assert Permutation(10**12, 2**64 - 1)(np.arange(3)).tolist() == [420611093377, 604341346057, 39366619986]


@pytest.mark.parametrize(("size", "position"), [(10, 10), (10, -1), (1_000, 1_000), (10**12, -5)])
def test_a_position_outside_is_refused_with_both_values(size: int, position: int) -> None:
    with pytest.raises(ConfigError, match=rf"\[0, {size}\), got {position}"):
        Permutation(size, 0)(np.array([0, position, 1]))


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"got {size}"):
        Permutation(size, 0)


def test_memory_does_not_grow_with_the_domain() -> None:
    """A batch of 1,024 takes less than 20 arrays of its own size, even in a domain of 10**12."""
    positions = np.arange(1_024)
    for size in (10**4, 10**12):
        tracemalloc.start()
        Permutation(size, 1)(positions)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 * positions.nbytes


def seconds(call: Callable[[], object], rounds: int = 41) -> float:
    """Median time of a call in seconds; the median of many short calls is stable on a busy machine."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def ten_steps(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten multiplications and shifts of each value: the unit of cost on this machine."""
    for _ in range(10):
        values = (values * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(7)
    return values


@pytest.mark.parametrize("size", [5_000, 10**8])
def test_a_sample_costs_less_than_150_multiplications_and_shifts(size: int) -> None:
    """Measured: 40, in 90 ns (4,096 samples per call, slow core, 2 cores, 22 Nov 2026)."""
    permutation, positions = Permutation(size, 1), np.arange(4_096)
    values = positions.astype(np.uint64)
    ratios = [seconds(partial(permutation, positions), 5) / seconds(partial(ten_steps, values), 5) for _ in range(15)]
    assert median(ratios) < 15


def test_the_cost_of_a_sample_is_flat_from_a_thousand_to_a_hundred_million() -> None:
    positions = np.arange(1_000)
    small, large = Permutation(1_000, 1), Permutation(10**8, 1)
    ratios = [seconds(lambda: large(positions), 5) / seconds(lambda: small(positions), 5) for _ in range(15)]
    assert median(ratios) < 1.5
