"""Samples are drawn in proportion to their weights, reproducibly, and invalid weights are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contents import content, values
from hypothesis import given
from hypothesis import strategies as st

import mbaas
from mbaas.dataset import Dataset, read_manifest, synthetic
from mbaas.dataset.base import bounded
from mbaas.dataset.subsets import Draws, drawn_ids
from mbaas.errors import ConfigError

ROWS = 97


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """80 owls, 16 ants and one bee; the weight of each is its row number."""
    top = tmp_path_factory.mktemp("manifest")
    kinds = ["owl"] * 80 + ["ant"] * 16 + ["bee"]
    for row in range(ROWS):
        (top / f"{row}.png").write_bytes(bytes([row]) * (row + 1))
    lines = [f"{row}.png,{kind},{row},{row / 2}" for row, kind in enumerate(kinds)]
    (top / "all.csv").write_text("\n".join(["uri,label,weight,half", *lines]))
    return read_manifest(top / "all.csv")


def drawn(part: Dataset) -> list[int]:
    """Ids of the drawn samples, in order."""
    ids: list[int] = part.source_ids(np.arange(len(part))).tolist()
    return ids


weights_of_samples = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=50).filter(any)


@given(weights_of_samples, st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_each_sample_is_drawn_as_often_as_is_expected_but_for_rounding(
    weights: list[float], samples: int, seed: int
) -> None:
    ids = drawn_ids(Draws(np.array(weights), samples, seed))
    times = np.bincount(ids, minlength=len(weights))
    expected = samples * np.array(weights) / sum(weights)
    assert (len(ids), len(times)) == (samples, len(weights))
    assert (np.diff(ids) >= 0).all()
    assert (times >= np.floor(expected - 1e-6)).all()
    assert (times <= np.ceil(expected + 1e-6)).all()
    assert not times[np.array(weights) == 0].any()


def test_on_average_it_is_drawn_as_often_as_is_expected() -> None:
    """Three draws give the samples 1.8, 0.6, 0.6 and 0 on average: over 4,000 seeds, within five standard errors."""
    weights = np.array([3.0, 1.0, 1.0, 0.0])
    times = np.array([np.bincount(drawn_ids(Draws(weights, 3, seed)) % 4, minlength=4) for seed in range(4000)])
    np.testing.assert_allclose(times.mean(axis=0), [1.8, 0.6, 0.6, 0.0], atol=5 * 0.5 / 4000**0.5)
    assert np.corrcoef(times[:, 1], times[:, 2])[0, 1] < 0, "a point that hits one does not hit the other"


def test_draws_are_the_same_on_every_machine_and_in_every_version() -> None:
    found = drawn_ids(Draws(np.arange(1000.0), 20, 7))
    assert found.dtype == np.int64
    assert found.tolist() == [
        124,
        300,
        319,
        332,
        398,
        443,
        520,
        537,
        551,
        573,
        583,
        601,
        602,
        630,
        700,
        764,
        792,
        843,
        937,
        956,
    ]


def test_equal_weights_and_as_many_draws_as_samples_change_nothing(data: Dataset) -> None:
    assert data.resample(np.ones(ROWS), each_epoch=False) is data
    assert data.resample(np.full(ROWS, 1.7e308), seed=5, each_epoch=False) is data
    anew = data.resample(np.ones(ROWS))
    for epoch in (0, 9):
        assert anew.stored_ids(np.arange(ROWS), epoch).tolist() == list(range(ROWS))
    assert anew.fields[-1].name == "source_id", "which trials may read, whatever the weights are"


def test_a_dataset_has_what_was_drawn(data: Dataset) -> None:
    part = data.resample("weight", samples=300, seed=1, each_epoch=False)
    ids = drawn(part)
    assert len(part) == len(ids) == 300
    times = np.bincount(ids, minlength=ROWS)
    expected = 300 * np.arange(ROWS) / np.arange(ROWS).sum()
    assert (np.abs(times - expected) < 1).all()
    assert content(part) == [content(data)[row] for row in ids]
    assert values(part) == {name: [column[row] for row in ids] for name, column in values(data).items()}
    assert part.total_bytes == sum(row + 1 for row in ids)
    assert (part.uri(0), part.class_names) == (data.uri(ids[0]), data.class_names)
    again = data.resample(2.5 * np.arange(ROWS), samples=300, seed=1, each_epoch=False)
    assert (again.fingerprint, drawn(again)) == (part.fingerprint, ids), "weights have no unit"
    other = data.resample("weight", samples=300, seed=2, each_epoch=False)
    assert (other.fingerprint != part.fingerprint) & (drawn(other) != ids)
    assert part.fingerprint != data.fingerprint
    as_many = data.resample("weight", each_epoch=False)
    assert (len(as_many), len({*drawn(as_many)}) < 90, 0 in drawn(as_many)) == (ROWS, True, False)


def test_classes_come_equally_often(data: Dataset) -> None:
    """100 draws are 33 or 34 per class: each of 80 owls at most once, each of 16 ants two or three times."""
    for seed in range(20):
        part = data.balance(samples=100, seed=seed, each_epoch=False)
        assert sorted(np.bincount(part.labels(np.arange(100))).tolist()) == [33, 33, 34]
        times = np.bincount(drawn(part), minlength=ROWS)
        assert times[:80].max() == 1
        assert {*times[80:96].tolist()} == {2, 3}
    assert len(data.balance()) == ROWS
    assert data.balance("weight", each_epoch=False) is data, "each has its own weight"


def test_what_was_drawn_can_be_divided_and_joined(data: Dataset) -> None:
    part = mbaas.concat([data, data]).balance(samples=300, each_epoch=False)
    assert np.bincount(part.labels(np.arange(300))).tolist() == [100, 100, 100]
    bees = drawn(part.select(np.flatnonzero(part.labels(np.arange(300)) == 1)))
    assert bees == [96] * 50 + [96 + ROWS] * 50
    assert content(part) == [content(data)[row % ROWS] for row in drawn(part)]
    few = part.limit(150)
    assert drawn(few) == drawn(part)[:150]
    computed = synthetic(5).resample(np.array([0, 0, 0, 1, 1]), samples=7, each_epoch=False)
    assert drawn(computed)[:3] == [3, 3, 3]
    assert content(computed) == [content(synthetic(5))[row] for row in drawn(computed)]


def test_each_epoch_draws_anew_and_all_of_a_large_class_come_in_the_end(data: Dataset) -> None:
    part = data.balance(samples=60, seed=4)
    assert len(part) == 60
    everything, drawn_in = np.arange(60), []
    for epoch in range(40):
        ids = part.stored_ids(everything, epoch)
        found = part.values_in(epoch, everything)
        assert found["source_id"].tolist() == ids.tolist()
        assert found["label"].tolist() == data.labels(ids).tolist()
        assert np.bincount(found["label"]).tolist() == [20, 20, 20]
        np.testing.assert_array_equal(part.stored_ids(everything[7:9], epoch), ids[7:9])
        drawn_in.append({*ids.tolist()})
    assert len({frozenset(ids) for ids in drawn_in}) == 40
    assert {*range(80)} < set().union(*drawn_in), "each epoch has 20 of the 80 owls"
    assert part.stored is data
    again = data.balance(samples=60, seed=4)
    assert again.fingerprint == part.fingerprint
    np.testing.assert_array_equal(again.stored_ids(everything, 5), part.stored_ids(everything, 5))
    others = [data.balance(samples=60, seed=5), data.balance("weight", samples=60, seed=4), data]
    assert part.fingerprint not in [other.fingerprint for other in others]


def test_as_a_list_it_has_what_the_first_epoch_draws(data: Dataset) -> None:
    part = data.resample("weight", samples=300, seed=1)
    ids = part.source_ids(np.arange(300))
    assert part.stored_ids(np.arange(300), 0).tolist() == (ids - 1).tolist(), "the first has no weight"
    assert content(part) == [content(data)[row] for row in ids]
    assert values(part) == {
        **{name: [column[row] for row in ids] for name, column in values(data).items()},
        "source_id": ids.tolist(),
    }
    assert part.uri(299) == data.uri(int(ids[299]))
    assert [field.name for field in part.fields] == ["label", "weight", "half", "source_id"]
    assert (len(part.stored), part.total_bytes) == (96, data.total_bytes - 1)
    assert content(part.stored) == content(data)[1:]


def test_the_draws_of_an_epoch_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert drawn_ids(Draws(np.arange(1000.0), 9, 7), 3).tolist() == [169, 490, 506, 702, 762, 924, 958, 979, 986]


def test_a_sample_that_is_too_large_is_bad_however_often_it_is_drawn(data: Dataset) -> None:
    part = bounded(data.resample("weight", samples=300), most_bytes=90)
    lengths = part.lengths(np.arange(300))
    assert lengths.tolist() == [row + 1 if row < 90 else 0 for row in part.source_ids(np.arange(300))]
    assert (
        part.stored_ids(np.arange(300), 8).tolist()
        == data.resample("weight", samples=300).stored_ids(np.arange(300), 8).tolist()
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda part: part.limit(3), "drawn again in each epoch: split, filter and limit before you draw"),
        (lambda part: part.split(0.5), "drawn again in each epoch: split, filter and limit before you draw"),
        (lambda part: part.balance(samples=4), "drawn again in each epoch already"),
        (lambda part: mbaas.concat([part, part]), "drawn again in each epoch: concatenate datasets before you draw"),
    ],
)
def test_draws_that_are_made_anew_are_the_last_thing(data: Dataset, make: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(data.balance(samples=30))


def test_a_field_that_has_the_name_of_what_was_drawn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"0")
    (tmp_path / "all.csv").write_text("uri,source_id\n0.png,1\n")
    with pytest.raises(ConfigError, match="have a field 'source_id'"):
        read_manifest(tmp_path / "all.csv").resample(np.ones(1), samples=5)


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (
            lambda data: data.resample("size"),
            r"weights must name a field of numbers .* has label, weight, half.*, got 's",
        ),
        (
            lambda data: data.resample([1, 2]),
            r"weights must have a number for each of 97 samples, got an array of shap",
        ),
        (lambda data: data.resample(np.arange(ROWS) - 3.0), r"finite numbers of at least 0, got -3.0 for sample 0"),
        (lambda data: data.resample(np.full(ROWS, np.nan)), r"finite numbers of at least 0, got nan for sample 0"),
        (lambda data: data.resample(np.zeros(ROWS)), r"weights must have at least one number above 0, got none"),
        (lambda data: data.resample(["a"] * ROWS), r"weights must be numbers or the name of a numeric field, got"),
        (lambda data: data.resample("weight", samples=0), r"samples must be a whole number of at least 1, got 0"),
        (lambda data: data.resample("weight", samples=2.5), r"samples must be a whole number of at least 1, got 2\.5"),
        (lambda data: data.resample("weight", seed=-1), r"seed must be an integer in \[0, 2\*\*63\), got -1"),
        (
            lambda data: data.balance("half"),
            r"field must name a field of whole numbers .* has label, weight.*, got 'half",
        ),
        (lambda data: data.balance(samples=True), r"samples must be a whole number of at least 1, got True"),
    ],
)
def test_what_cannot_be_drawn_is_named(data: Dataset, draw: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        draw(data)


def test_weights_of_a_field_that_cannot_be_are_named(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"0")
    (tmp_path / "all.csv").write_text("uri,w\n0.png,-1\n")
    with pytest.raises(
        ConfigError, match=r"the field 'w' must have finite numbers of at least 0, got -1.0 for sample 0"
    ):
        read_manifest(tmp_path / "all.csv").resample("w")
