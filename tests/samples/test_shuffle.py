"""Shuffles within segments give a consumer that joins mid-epoch each sample exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.samples.order import SampleOrder, Shuffle

SAMPLES = 500
ORDER = SampleOrder(num_samples=SAMPLES, seed=7, block_samples=64)


def samples(shuffle: Shuffle, start: int = 0, stop: int = SAMPLES) -> list[int]:
    return ORDER.samples_at(shuffle, start, stop).tolist()


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_whoever_begins_in_the_middle_of_an_epoch_gets_each_sample_once(seed: int) -> None:
    """Consumers join in the middle of any epoch, stay for some epochs of their own, and leave."""
    rng = random.Random(seed)
    begins: dict[int, int] = {}  # consumer -> start of its epochs
    shuffle, before = Shuffle(0), Shuffle(0)
    for epoch in range(1, 12):
        for name in [n for n in begins if rng.random() < 0.3]:
            del begins[name]
        here = dict(begins)
        if rng.random() < 0.6:
            begins[epoch] = rng.randrange(1, SAMPLES)
        before, shuffle = shuffle, shuffle.after(epoch, begins.values())
        assert sorted(samples(shuffle)) == [*range(SAMPLES)]
        for begin in begins.values():
            assert shuffle.keeps(begin, before)
            assert sorted(samples(before, begin) + samples(shuffle, 0, begin)) == [*range(SAMPLES)]
        assert {*here.values()} <= {*shuffle.cuts}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_what_is_said_to_be_kept_is_kept(seed: int) -> None:
    """Checked between any two epochs, not only consecutive ones."""
    rng = random.Random(seed)
    shuffles, cuts = [Shuffle(0)], [100, 250, 251]
    for epoch in range(1, 9):
        shuffles.append(rng.choice(shuffles[-2:]).after(epoch, rng.sample(cuts, rng.randint(0, 3))))
    kept = 0
    for one in shuffles:
        for other in shuffles:
            for cut in cuts:
                if one.keeps(cut, other):
                    kept += 1
                    assert sorted(samples(one, 0, cut)) == sorted(samples(other, 0, cut))
    assert kept >= len(shuffles) * len(cuts), "each shuffle keeps its own samples"


def test_a_shuffle_that_keeps_nothing_says_so() -> None:
    first = Shuffle(0)
    second = first.after(1, [200])
    assert second.keeps(200, first)
    assert not second.keeps(201, first)
    assert not Shuffle(1).keeps(200, first)
    assert not second.after(2, [100]).keeps(200, first)
    assert Shuffle(5).keeps(0, first), "nothing precedes the beginning"


def test_segments_are_shuffled_anew_in_every_epoch() -> None:
    first = Shuffle(0)
    second = first.after(1, [200])
    third = second.after(2, [200])
    orders = [samples(shuffle, 0, 200) for shuffle in (first, second, third)]
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    moved = np.array(orders[1]) != np.array(orders[0])
    assert moved.mean() > 0.9


def test_without_cuts_an_epoch_is_shuffled_as_if_nobody_had_been_out_of_phase() -> None:
    assert Shuffle(3, (10,), Shuffle(2)).after(4, []) == Shuffle(4)
    blocks = range(4 * ORDER.blocks_per_epoch, 5 * ORDER.blocks_per_epoch)
    assert samples(Shuffle(4)) == [i for block in blocks for i in ORDER.sample_ids(block).tolist()]


def test_a_cut_that_stays_costs_no_further_level() -> None:
    shuffle = Shuffle(0)
    for epoch in range(1, 100):
        shuffle = shuffle.after(epoch, [40, 80])
    assert shuffle.levels == 2
    assert shuffle.after(100, [80]).levels == 2, "nor does one that goes"
    assert shuffle.after(100, [40, 80, 120]).levels == 3


def pairs_met(shuffles: Iterable[Shuffle]) -> float:
    """Fraction of all pairs of 2,048 samples that shared a minibatch of 32 in some epoch."""
    size, batch = 2048, 32
    order, met = SampleOrder(num_samples=size, seed=1, block_samples=batch), np.zeros((size, size), np.bool_)
    for shuffle in shuffles:
        for ids in order.samples_at(shuffle, 0, size).reshape(-1, batch):
            met[np.ix_(ids, ids)] = True
    return float((met.sum() - size) / (size * (size - 1)))


def with_cuts(*cuts: int) -> list[Shuffle]:
    shuffles = [Shuffle(0)]
    for epoch in range(1, 40):
        shuffles.append(shuffles[-1].after(epoch, cuts))
    return shuffles


def with_short_trials() -> list[Shuffle]:
    """Shuffles of 40 epochs, with one trial per epoch that starts at a random position and stays for five."""
    rng = np.random.default_rng(0)
    begins = [int(rng.integers(1, 64)) * 32 for _ in range(40)]
    shuffles = [Shuffle(0)]
    for epoch in range(1, 40):
        shuffles.append(shuffles[-1].after(epoch, begins[max(0, epoch - 5) : epoch]))
    return shuffles


def test_what_it_costs_in_pairs_that_meet_is_what_the_documents_say() -> None:
    found = {
        "whole": pairs_met(with_cuts()),
        "a tenth": pairs_met(with_cuts(192)),
        "half": pairs_met(with_cuts(1024)),
        "quarters": pairs_met(with_cuts(512, 1024, 1536)),
        "short trials": pairs_met(with_short_trials()),
    }
    told = {"whole": 0.46, "a tenth": 0.41, "half": 0.35, "quarters": 0.23, "short trials": 0.38}
    assert found == pytest.approx(told, abs=0.01)


def test_in_the_datasets_own_order_every_cut_keeps_its_samples() -> None:
    order = SampleOrder(num_samples=10, seed=0, block_samples=3, shuffled=False)
    assert order.samples_at(Shuffle(5, (4,), Shuffle(4)), 2, 6).tolist() == [2, 3, 4, 5]


def test_a_block_is_cut_from_the_shuffle_that_is_given() -> None:
    shuffle = Shuffle(1, (70,), Shuffle(0))
    assert ORDER.sample_ids(9, shuffle).tolist() == samples(shuffle, 64, 128)
    assert ORDER.sample_ids(9).tolist() == samples(Shuffle(1), 64, 128)


def test_the_order_of_a_segment_stays_what_it_was() -> None:
    """Saved states refer to it: another order under the same name would repeat or lose samples."""
    assert samples(Shuffle(2, (5,), Shuffle(1)), 0, 5) == GOLDEN


GOLDEN = [445, 380, 465, 486, 178]


@pytest.mark.parametrize(
    ("cuts", "base", "words"),
    [
        ((), Shuffle(0), "exactly if it has a base"),
        ((4,), None, "exactly if it has a base"),
        ((4, 4), Shuffle(0), "must ascend"),
        ((0, 4), Shuffle(0), "above 0"),
    ],
)
def test_a_shuffle_that_cannot_be_is_refused(cuts: tuple[int, ...], base: Shuffle | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Shuffle(1, cuts, base)
