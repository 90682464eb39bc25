"""Random numbers of samples and the hash of an epoch are pure, uniform and independent of batching."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.samples.order import generator, id_hash, id_hash_of_range, in_share, uniforms

seeds = st.integers(0, 2**63 - 1)
id_lists = st.lists(st.integers(0, 2**63 - 1), max_size=40)


@given(seed=seeds, epoch=st.integers(0, 2**40), ids=id_lists, substream=st.integers(0, 50), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_sample_draws_the_same_in_any_company(
    seed: int, epoch: int, ids: list[int], substream: int, data: st.DataObject
) -> None:
    together = uniforms(seed, epoch, np.array(ids, dtype=np.int64), substream=substream, draws=3)
    assert together.shape == (len(ids), 3)
    order = data.draw(st.permutations(range(len(ids))))
    shuffled = uniforms(seed, epoch, np.array(ids, dtype=np.int64)[order], substream=substream, draws=3)
    assert np.array_equal(shuffled, together[order])
    for row, sample_id in enumerate(ids[:5]):
        alone = uniforms(seed, epoch, np.array([sample_id]), substream=substream, draws=3)
        assert np.array_equal(alone[0], together[row])


def test_more_draws_leave_the_first_ones_as_they_are() -> None:
    ids = np.arange(10)
    assert np.array_equal(uniforms(1, 2, ids, substream=0, draws=7)[:, :4], uniforms(1, 2, ids, substream=0, draws=4))


@pytest.mark.parametrize("column", range(3))
def test_draws_are_uniform_over_consecutive_samples(column: int) -> None:
    """100 cells of 1,000 expected draws: chi-square with 99 degrees of freedom stays within 99 +- 4.5 x 14."""
    values = uniforms(3, 1, np.arange(100_000), substream=2, draws=3)[:, column]
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.bincount((values * 100).astype(int), minlength=100)
    assert abs(((counts - 1_000) ** 2 / 1_000).sum() - 99) < 4.5 * math.sqrt(2 * 99)


def test_low_bits_are_uniform_too() -> None:
    low = (uniforms(3, 1, np.arange(64_000), substream=2, draws=1)[:, 0] * 2.0**53).astype(np.int64) % 64
    counts = np.bincount(low, minlength=64)
    assert abs(((counts - 1_000) ** 2 / 1_000).sum() - 63) < 4.5 * math.sqrt(2 * 63)


def test_samples_epochs_seeds_streams_and_draws_are_uncorrelated() -> None:
    """The correlation of n independent pairs is 0 +- 1/sqrt(n): 0.0032 for 100,000."""
    ids = np.arange(100_001)
    base = uniforms(5, 10, ids, substream=1, draws=2)
    first = base[:-1, 0]
    others = {
        "next sample": base[1:, 0],
        "next draw": base[:-1, 1],
        "next draw of the sample before": np.roll(base[:-1, 1], 1),
        "next epoch": uniforms(5, 11, ids[:-1], substream=1, draws=1)[:, 0],
        "next seed": uniforms(6, 10, ids[:-1], substream=1, draws=1)[:, 0],
        "next substream": uniforms(5, 10, ids[:-1], substream=2, draws=1)[:, 0],
        "seed and epoch exchanged": uniforms(10, 5, ids[:-1], substream=1, draws=1)[:, 0],
        "epoch and substream exchanged": uniforms(5, 1, ids[:-1], substream=10, draws=1)[:, 0],
    }
    for name, other in others.items():
        assert abs(np.corrcoef(first, other)[0, 1]) < 4.5 / math.sqrt(len(first)), name


def test_pairs_of_draws_fill_the_square() -> None:
    """32 x 32 cells of about 100 pairs: detects structure in the plane that a correlation misses."""
    values = uniforms(0, 0, np.arange(102_400), substream=0, draws=2)
    for pair in (values, np.column_stack([values[:-1, 0], values[1:, 0]])):
        cell = (pair * 32).astype(int)
        counts = np.bincount(cell[:, 0] * 32 + cell[:, 1], minlength=1024)
        expected = len(pair) / 1024
        assert abs(((counts - expected) ** 2 / expected).sum() - 1023) < 4.5 * math.sqrt(2 * 1023)


def test_the_draws_never_change() -> None:
    """A feed resumed with a later release must prepare the same pixels."""
    assert uniforms(7, 3, np.array([11, 12]), substream=1, draws=2).tolist() == [
        [0.6682390110787679, 0.5874900599418187],
        [0.6031130918017038, 0.267196238287431],
    ]


@given(ids=id_lists, shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_larger_share_has_all_samples_of_a_smaller_one(ids: list[int], shares: tuple[float, float]) -> None:
    smaller, larger = (in_share(np.array(ids, np.int64), share) for share in sorted(shares))
    assert not np.any(smaller & ~larger)
    assert not in_share(np.array(ids, np.int64), 0).any()
    assert in_share(np.array(ids, np.int64), 1).all()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.97])
def test_a_share_is_as_large_as_it_says_and_has_no_neighbours_for_reasons(share: float) -> None:
    """100,000 samples and 100,000 pairs of neighbours, within 7.5 standard deviations (5 x 1.5)."""
    chosen = in_share(np.arange(100_001), share)
    for found, expected in ((chosen[:-1], share), (chosen[:-1] & chosen[1:], share**2)):
        assert abs(found.mean() - expected) < 5 * math.sqrt(expected * (1 - expected) / 100_000) * 1.5


def test_the_samples_of_a_share_never_change() -> None:
    """A feed served by a later release must prepare each sample with the same engine."""
    assert np.flatnonzero(in_share(np.arange(20), 0.3)).tolist() == [5, 7, 13, 14, 18]


@given(seed=seeds, epoch=st.integers(0, 2**40), sample_id=st.integers(0, 2**63 - 1), substream=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_a_generator_is_a_function_of_its_arguments(seed: int, epoch: int, sample_id: int, substream: int) -> None:
    first = generator(seed, epoch, sample_id, substream=substream)
    again = generator(seed, epoch, sample_id, substream=substream)
    assert np.array_equal(first.integers(0, 2**62, 8), again.integers(0, 2**62, 8))


def test_generators_of_neighbours_are_unrelated() -> None:
    arguments = [
        (1, 2, 3, 0),
        (2, 2, 3, 0),
        (1, 3, 3, 0),
        (1, 2, 4, 0),
        (1, 2, 3, 1),
        (2, 1, 3, 0),
        (1, 3, 2, 0),
    ]
    draws = np.array([generator(*rest, substream=substream).random(4_000) for *rest, substream in arguments])
    correlations = np.corrcoef(draws)
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(4_000)


def test_first_numbers_of_consecutive_generators_are_uniform() -> None:
    firsts = [generator(0, 0, sample_id, substream=0).random() for sample_id in range(5_000)]
    counts = np.bincount((np.array(firsts) * 50).astype(int), minlength=50)
    assert abs(((counts - 100) ** 2 / 100).sum() - 49) < 4.5 * math.sqrt(2 * 49)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"seed must be an integer in \[0, 2\*\*63\), got {seed}"):
        uniforms(seed, 0, np.arange(2), substream=0, draws=1)
    with pytest.raises(ConfigError, match=rf"got {seed}"):
        generator(seed, 0, 0, substream=0)


@given(ids=id_lists, data=st.data())
def test_the_hash_of_ids_ignores_order_and_adds_up(ids: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(ids))
    cut = data.draw(st.integers(0, len(ids)))
    parts = [np.array(part, dtype=np.int64) for part in (shuffled[:cut], shuffled[cut:])]
    assert id_hash(np.array(ids, dtype=np.int64)) == sum(map(id_hash, parts)) % 2**64


@pytest.mark.parametrize("num_samples", [0, 1, 8_191, 8_192, 8_193, 30_000])
def test_the_hash_of_a_range_is_that_of_its_ids(num_samples: int) -> None:
    everything = np.random.default_rng(0).permutation(num_samples)
    assert id_hash_of_range(num_samples) == id_hash(everything)


def test_a_missing_or_repeated_sample_changes_the_hash() -> None:
    everything = np.arange(1_000)
    whole = id_hash_of_range(1_000)
    for lost in (0, 1, 500, 999):
        assert id_hash(np.delete(everything, lost)) != whole
        for repeated in (0, 2, 998):
            swapped = everything.copy()
            swapped[lost] = repeated
            assert lost == repeated or id_hash(swapped) != whole
    balanced = everything.copy()
    balanced[[1, 4]] = 2, 3  # the plain sum is the same
    assert id_hash(balanced) != whole
