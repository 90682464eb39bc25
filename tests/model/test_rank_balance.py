"""Samples of a minibatch are divided among ranks by locality."""

from __future__ import annotations

import math
import time
from functools import cache
from itertools import combinations, pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.model.balance import SampleMove, assign, balance, even_targets, largest_home_share, travelling_share
from mbaas.samples.placement import NodeWeight, place_samples


def test_the_largest_surplus_goes_to_the_largest_deficit() -> None:
    """Surpluses 5 and 2, deficits 4 and 3: 4 of the 5 go to the 4, then 2 (index 1) to the 3, then the last 1."""
    moves = balance([15, 12, 6, 7], targets=[10, 10, 10, 10])
    assert moves == [SampleMove(0, 2, 4), SampleMove(1, 3, 2), SampleMove(0, 3, 1)]


def test_balanced_counts_need_no_message() -> None:
    assert balance([3, 4], targets=[3, 4]) == []
    assert balance([], targets=[]) == []


@st.composite
def unbalanced(draw: st.DrawFn, most: int) -> tuple[list[int], list[int]]:
    """Counts and targets with the same sum."""
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=most))
    cuts = draw(st.lists(st.integers(0, sum(counts)), min_size=len(counts) - 1, max_size=len(counts) - 1))
    edges = [0, *sorted(cuts), sum(counts)]
    return counts, [b - a for a, b in pairwise(edges)]


@given(unbalanced(64))
def test_moves_meet_the_targets_with_few_messages(case: tuple[list[int], list[int]]) -> None:
    counts, targets = case
    moves = balance(counts, targets=targets)
    after = list(counts)
    for move in moves:
        assert move.count > 0
        after[move.giver] -= move.count
        after[move.taker] += move.count
    assert after == targets
    assert len(moves) <= max(0, len(counts) - 1)
    deficits = sum(max(0, target - count) for count, target in zip(counts, targets, strict=True))
    assert sum(move.count for move in moves) == deficits
    assert not {move.giver for move in moves} & {move.taker for move in moves}


def fewest_messages(rest: tuple[int, ...]) -> int:
    """Parties with a surplus or deficit, minus the maximum number of groups that balance internally."""
    people = tuple(over for over in rest if over)

    @cache
    def groups(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        first, others = left[0], range(1, len(left))
        best = 0
        for size in range(1, len(left)):
            for chosen in combinations(others, size):
                if first + sum(left[i] for i in chosen) == 0:
                    best = max(best, 1 + groups(tuple(left[i] for i in others if i not in chosen)))
        return best

    return len(people) - groups(people)


@settings(deadline=None)
@given(unbalanced(7))
def test_messages_are_within_a_factor_two_of_the_fewest(case: tuple[list[int], list[int]]) -> None:
    rest = tuple(count - target for count, target in zip(*case, strict=True))
    assert len(balance(case[0], targets=case[1])) <= 2 * fewest_messages(rest)


def test_everybody_knows_its_share() -> None:
    assert even_targets(11, ranks=4).tolist() == [3, 3, 3, 2]
    assert even_targets(2, ranks=3).tolist() == [1, 1, 0]


def test_samples_stay_at_home_and_the_last_surplus_moves() -> None:
    """Node 0 holds 4 samples and keeps 3; node 1 holds 2 and gets the last one of node 0."""
    assert assign([0, 1, 0, 0, 1, 0], rank_nodes=[0, 1]).tolist() == [0, 1, 0, 0, 1, 1]


def test_samples_cached_nowhere_fill_deficits_without_a_message() -> None:
    """Node 0 holds 3 of its 3, node 1 holds 1, node 2 holds 2: two go to node 1 and one to node 2."""
    homes = [0, -1, 2, 0, 1, -1, 0, 2, -1]
    ranks = assign(homes, rank_nodes=[0, 1, 2])
    assert ranks.tolist() == [0, 2, 2, 0, 1, 1, 0, 2, 1]  # smaller deficits first


def test_ranks_of_one_node_share_what_it_holds() -> None:
    """Node 5 has ranks 0 and 2 and holds all six: four for its ranks, in order, and two go to node 9."""
    homes = [5] * 6
    assert assign(homes, rank_nodes=[5, 9, 5]).tolist() == [0, 0, 2, 2, 1, 1]


def test_a_home_without_ranks_gives_all_it_has() -> None:
    """Node 7 has no rank: its three samples go to nodes 0 and 1, which lack two and one."""
    homes = [7, 0, 7, 7, 1, 1]
    ranks = assign(homes, rank_nodes=[0, 1])
    assert ranks.tolist() == [0, 0, 0, 1, 1, 1]


def test_fewer_samples_than_ranks() -> None:
    assert assign([1, -1], rank_nodes=[0, 1, 2]).tolist() == [1, 0]
    assert assign([], rank_nodes=[0, 1]).tolist() == []


@st.composite
def minibatches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    rank_nodes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    homes = draw(st.lists(st.sampled_from([-1, 0, 1, 2, 3, 8, 12]), max_size=50))
    return homes, rank_nodes


@given(minibatches())
def test_every_rank_gets_its_share_and_no_sample_travels_without_need(case: tuple[list[int], list[int]]) -> None:
    """The number of moved samples is the nodes' total deficit after uncached samples are assigned."""
    homes, rank_nodes = case
    ranks = assign(homes, rank_nodes=rank_nodes)
    number, size = len(rank_nodes), len(homes)
    assert ranks.dtype == np.int64
    assert np.array_equal(np.bincount(ranks, minlength=number), even_targets(size, ranks=number))
    travelling = sum(home not in (-1, rank_nodes[rank]) for home, rank in zip(homes, ranks.tolist(), strict=True))
    shares = even_targets(size, ranks=number).tolist()
    lacking = sum(
        max(0, sum(share for share, at in zip(shares, rank_nodes, strict=True) if at == node) - homes.count(node))
        for node in set(rank_nodes)
    )
    assert travelling == lacking - homes.count(-1)


@given(minibatches())
def test_messages_between_nodes_are_fewer_than_nodes(case: tuple[list[int], list[int]]) -> None:
    homes, rank_nodes = case
    ranks = assign(homes, rank_nodes=rank_nodes)
    pairs = {(home, rank_nodes[rank]) for home, rank in zip(homes, ranks.tolist(), strict=True) if home != -1}
    nodes = {*homes, *rank_nodes} - {-1}
    assert len({(a, b) for a, b in pairs if a != b}) <= max(0, len(nodes) - 1)


@given(minibatches(), st.integers(1, 1000))
def test_the_answer_does_not_depend_on_how_nodes_are_numbered(case: tuple[list[int], list[int]], more: int) -> None:
    """Larger node numbers in the same order, and lists or arrays of any integer type."""
    homes, rank_nodes = case
    ranks = assign(homes, rank_nodes=rank_nodes)
    renumbered = np.array([home if home == -1 else home + more for home in homes], dtype=np.int32)
    assert np.array_equal(ranks, assign(renumbered, rank_nodes=np.array(rank_nodes) + more))


@pytest.mark.parametrize("ranks", [4, 32])
@pytest.mark.parametrize("local", [32, 128])
def test_imbalance_depends_on_the_local_batch_and_hardly_on_the_ranks(ranks: int, local: int) -> None:
    """A rank holds Binomial(p b, 1/p) samples: sigma = sqrt(b (1 - 1/p)), mean deficit sigma / sqrt(2 pi).

    So the share is 0.399 sqrt((1 - 1/p) / b): 0.0611 and 0.0694 for b = 32 and 4 or 32 ranks, and half for b = 128.
    """
    random = np.random.default_rng(ranks * local)
    steps = [random.integers(0, ranks, ranks * local) for _ in range(300)]
    fractions = [float((assign(homes, rank_nodes=range(ranks)) != homes).mean()) for homes in steps]
    expected = math.sqrt((1 - 1 / ranks) / (2 * math.pi * local))
    assert mean(fractions) == pytest.approx(expected, rel=0.08)


def test_the_travelling_share_by_hand() -> None:
    """Two nodes that need one sample each of two: in half of the cases one holds both, and half of them travel.

    Four nodes with 32 samples each: (1 - 1/4) P(Binomial(128, 1/4) = 32) = 0.75 x 0.0812, against 3/4 without locality.
    """
    assert travelling_share(2, local_batch=1, locality=True) == pytest.approx(0.25)
    assert travelling_share(4, local_batch=32, locality=True) == pytest.approx(0.0609, abs=1e-4)
    assert travelling_share(4, local_batch=32, locality=False) == 0.75
    assert travelling_share(1, local_batch=32, locality=True) == 0


@pytest.mark.parametrize("ranks", [2, 5, 32])
@pytest.mark.parametrize("local", [1, 7, 64])
def test_the_travelling_share_is_what_is_assigned_to_other_nodes(ranks: int, local: int) -> None:
    random = np.random.default_rng(ranks * local)
    steps = [random.integers(0, ranks, ranks * local) for _ in range(400)]
    fractions = [float((assign(homes, rank_nodes=range(ranks)) != homes).mean()) for homes in steps]
    assert travelling_share(ranks, local_batch=local, locality=True) == pytest.approx(mean(fractions), rel=0.1)


@pytest.mark.parametrize(("nodes", "samples"), [(2, 1000), (4, 1000), pytest.param(16, 3000, marks=pytest.mark.slow)])
def test_the_fullest_home_of_a_placement(nodes: int, samples: int) -> None:
    """Means over 100 placements: of all samples, and of those that equal caches of half the dataset leave out."""
    ids, largest, uncached = np.arange(samples), [], []
    for number in range(100):
        weights = [NodeWeight(f"{number}-{node}", samples // 2 // nodes) for node in range(nodes)]
        placement = place_samples(weights, num_samples=samples, lengths=np.ones_like, version=0)
        homes, kept = placement.homes_and_kept(ids)
        unlimited = place_samples(weights, num_samples=samples, lengths=np.ones_like, version=0, limited=False)
        largest.append(int(np.bincount(unlimited.of(ids)).max()))
        uncached.append(int(np.bincount(homes[~kept]).max()))
    found = largest_home_share(nodes, samples=samples)
    assert found == pytest.approx(mean(largest) * nodes / samples, rel=0.01)
    assert found - 0.5 == pytest.approx(mean(uncached) * nodes / samples, rel=0.04)


def test_one_node_is_the_home_of_all() -> None:
    """Few samples may all have the same home, but not more than all."""
    assert largest_home_share(1, samples=7) == 1
    assert largest_home_share(4, samples=1) <= 4


@pytest.mark.parametrize("nodes", [8, 64])
def test_a_minibatch_of_8192_takes_less_than_two_milliseconds(nodes: int) -> None:
    """About 0.5 ms for 64 ranks on 8 or 64 nodes, with an eighth of the samples uncached."""
    random = np.random.default_rng(0)
    homes = random.integers(0, nodes, 8192)
    homes[random.random(8192) < 1 / 8] = -1
    rank_nodes = np.arange(64) % nodes
    times = []
    for _ in range(31):
        begun = time.perf_counter()
        assign(homes, rank_nodes=rank_nodes)
        times.append(time.perf_counter() - begun)
    assert min(times) < 2e-3
