"""Splits, subsets and joined datasets have the right samples, and behave like any other dataset."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from contents import content
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from mbaas.dataset import Dataset, concat, read_images, read_manifest, synthetic
from mbaas.dataset.base import Subset, bounded
from mbaas.dataset.subsets import random_share
from mbaas.errors import BadSampleError, ConfigError, DatasetError
from mbaas.samples.order import SampleOrder, Shuffle, split_order
from mbaas.tools.analysis.measuring.storage import SlowedDataset, local_spans

CLASSES = ("ant", "cat", "dog")
SAMPLES = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Different files in class folders, and a manifest with more fields of each."""
    root = tmp_path_factory.mktemp("parts")
    rows: dict[str, list[Any]] = {"uri": [], "kind": [], "age": [], "box": []}
    for number in range(SAMPLES):
        kind = CLASSES[min(number % 5, 2)]
        path = root / "tree" / kind / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{number} ".encode() * (1 + number % 7))
        for name, value in zip(rows, (f"tree/{kind}/{path.name}", kind, number, [number, 1.5]), strict=True):
            rows[name].append(value)
    pq.write_table(pa.table({**rows, "box": pa.array(rows["box"], pa.list_(pa.float32(), 2))}), root / "all.parquet")
    return root


def manifest(folder: Path) -> Dataset:
    return read_manifest(folder / "all.parquet", label_column="kind")


def tree(folder: Path) -> Dataset:
    return read_images(folder / "tree")


def joined(folder: Path) -> Dataset:
    """A concatenation of datasets on two file systems with different roots."""
    here = manifest(folder)
    elsewhere = SubTreeFileSystem(str(folder), LocalFileSystem())
    return concat([here, read_manifest("all.parquet", label_column="kind", filesystem=elsewhere), here.limit(7)])


def slowed(data: Dataset) -> Dataset:
    """Wrap a dataset with a read limit that is too high to slow a test."""
    return SlowedDataset.around(data, bytes_per_s=1e12)


KINDS: dict[str, Callable[[Path], Dataset]] = {
    "table": tree,
    "fields": manifest,
    "computed": lambda folder: synthetic(SAMPLES),
    "wrapped": lambda folder: slowed(manifest(folder).split(0.9, seed=2)[0]),
    "joined": joined,
    "part": lambda folder: manifest(folder).split(0.9, seed=5)[0],
    "part of computed": lambda folder: synthetic(200).limit(SAMPLES),
}


@pytest.fixture(params=KINDS)
def data(request: pytest.FixtureRequest, folder: Path) -> Dataset:
    """A divisible dataset of each kind."""
    return KINDS[request.param](folder)


def check_part(part: Dataset, whole: Dataset, ids: np.ndarray[Any, Any]) -> None:
    """Check that the part's samples have the same properties as in the whole."""
    mine = np.arange(len(part))
    assert (len(part), part.class_names, part.fields) == (len(ids), whole.class_names, whole.fields)
    assert part.source_ids(mine).tolist() == whole.source_ids(ids).tolist()
    for name, array in part.values(mine).items():
        np.testing.assert_array_equal(array, whole.values(ids)[name])
        assert array.dtype == whole.values(ids)[name].dtype
    assert part.lengths(mine).tolist() == whole.lengths(ids).tolist()
    assert part.total_bytes == int(whole.lengths(ids).sum())
    assert [part.uri(sample) for sample in mine.tolist()] == [whole.uri(sample) for sample in ids.tolist()]
    everything = content(whole)
    assert content(part) == [everything[sample] for sample in ids.tolist()]
    assert [(span.path, span.length) for span in local_spans(part, mine.tolist())] == [
        (span.path, span.length) for span in local_spans(whole, ids.tolist())
    ]


def test_a_part_tells_of_its_samples_what_the_whole_tells(data: Dataset) -> None:
    """Includes a part of a part, and a part after pickling."""
    ids = np.flatnonzero(np.arange(len(data)) % 3 != 1)
    part = data.select(ids)
    check_part(part, data, ids)
    again = pickle.loads(pickle.dumps(part, protocol=5))
    check_part(again, data, ids)
    assert again.fingerprint == part.fingerprint
    check_part(again.select(np.arange(0, len(ids), 2)), data, ids[::2])
    check_part(slowed(part).select(np.arange(5, 9)), data, ids[5:9])


@pytest.mark.parametrize("stratify", [None, "label"])
def test_a_split_divides_all_samples_and_is_the_same_everywhere(data: Dataset, stratify: str | None) -> None:
    first, second = data.split(0.8, seed=3, stratify=stratify)
    parts = [part.source_ids(np.arange(len(part))) for part in (first, second)]
    whole = data.source_ids(np.arange(len(data)))
    assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())
    assert len(first) == int(len(data) * 0.8 + 0.5)
    again = [*pickle.loads(pickle.dumps(data)).split(0.8, seed=3, stratify=stratify), *data.split(0.8, seed=4)]
    prints = [part.fingerprint for part in (first, second, *again)]
    assert prints[:2] == prints[2:4]
    assert len({data.fingerprint, *prints}) == 5
    if stratify is not None:
        there, here = (np.bincount(each.labels(np.arange(len(each)))) for each in (data, first))
        assert (abs(here - 0.8 * there) <= 1).all(), "of each class"
    else:
        assert parts[0].tolist() == whole[np.sort(split_order(len(data), 3)[: len(first)])].tolist()


@given(
    values=st.lists(st.integers(-3, 5), min_size=1, max_size=300),
    fraction=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_each_stratum_has_its_fraction_to_within_one_sample(values: list[int], fraction: float, seed: int) -> None:
    strata = np.array(values)
    first = random_share(len(strata), fraction, seed, strata)
    assert first.sum() == int(np.floor(len(strata) * fraction + 0.5))
    for value in np.unique(strata):
        share = fraction * (strata == value).sum()
        assert abs(first[strata == value].sum() - share) <= 1 + 1e-9
    assert np.array_equal(first, random_share(len(strata), fraction, seed, strata))


@given(count=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_smaller_fraction_is_a_part_of_a_larger_one(count: int, seed: int, fractions: tuple[float, float]) -> None:
    few, many = (random_share(count, fraction, seed) for fraction in sorted(fractions))
    assert not (few & ~many).any()
    assert few.sum() == int(np.floor(count * min(fractions) + 0.5))


def test_which_samples_are_drawn_never_changes() -> None:
    """Otherwise a run resumed with a new release would train on samples that were held out for validation."""
    assert np.flatnonzero(random_share(20, 0.25, 7)).tolist() == [1, 2, 9, 13, 16]
    assert np.flatnonzero(random_share(20, 0.25, 7, np.arange(20) % 2)).tolist() == [2, 8, 9, 13, 16]
    assert np.flatnonzero(random_share(1000, 0.005, 7)).tolist() == [123, 196, 525, 902, 971]


def test_a_split_is_random_and_has_nothing_to_do_with_an_epochs_order() -> None:
    """Half of 10,000: 2,500 of the first 5,000 are drawn, to within six standard deviations (6 x 25 = 150)."""
    assert abs(int(random_share(10_000, 0.5, 0)[:5_000].sum()) - 2_500) < 150
    epoch = SampleOrder(10_000, 0, 64).samples_at(Shuffle(0), 0, 5_000)
    assert abs(int(random_share(10_000, 0.5, 0)[epoch].sum()) - 2_500) < 150
    seeds = np.array([random_share(1_000, 0.5, seed) for seed in range(400)])
    assert np.abs(seeds.mean(axis=0) - 0.5).max() < 0.15, "no sample is always in the same part"


def test_the_first_samples_are_taken(data: Dataset) -> None:
    check_part(data.limit(5), data, np.arange(5))
    assert data.limit(len(data)) is data
    assert data.limit(6).limit(5).source_ids(np.arange(5)).tolist() == data.source_ids(np.arange(5)).tolist()


def test_those_are_kept_of_which_an_expression_is_true(data: Dataset) -> None:
    labels = data.labels(np.arange(len(data)))
    check_part(data.filter(pc.field("label") < 2), data, np.flatnonzero(labels < 2))
    name = data.class_names[-1]
    last = np.flatnonzero(labels == len(data.class_names) - 1)
    assert data.filter(pc.field("class") == name).fingerprint == data.select(last).fingerprint
    assert data.filter(pc.field("class").isin([name, "none"])).fingerprint == data.select(last).fingerprint
    assert data.filter(pc.field("label") >= 0) is data


def test_an_expression_sees_all_fields_of_many_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, lists, and class names (unless a field is called ``class``), in steps that fit in memory."""
    whole = [part.fingerprint for part in manifest(folder).split(0.5, stratify="label")]
    monkeypatch.setattr("mbaas.dataset.subsets._BATCH_SAMPLES", 10)
    data = manifest(folder)
    found = data.filter((pc.field("age") >= 40) & (pc.list_element(pc.field("box"), 0) < 52))
    assert found.values(np.arange(len(found)))["age"].tolist() == [*range(40, 52)]
    assert [part.fingerprint for part in data.split(0.5, stratify="label")] == whole
    bare = read_manifest(folder / "all.parquet", label_column="age", fields=())
    with pytest.raises(
        ConfigError, match=r"cannot filter .* by \(class == \"cat\"\): there is no field class; its fields are label$"
    ):
        bare.filter(pc.field("class") == "cat")
    path = folder / "own.jsonl"
    path.write_text("".join(f'{{"uri": "tree/ant/000.png", "label": "{kind}", "class": 7}}\n' for kind in CLASSES))
    assert len(read_manifest(path).filter(pc.field("class") == 7)) == 3


def test_a_part_of_a_large_table_travels_alone(folder: Path) -> None:
    """The pickle of a part contains its own rows only, not the names of the other files."""
    data = concat([manifest(folder)] * 2)
    few, all_of_it = (len(pickle.dumps(each, protocol=5)) for each in (data.limit(10), data))
    assert few < all_of_it / 3
    buffers: list[pickle.PickleBuffer] = []
    part = manifest(folder).limit(60)
    stream = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < sum(len(buffer.raw()) for buffer in buffers), "columns are out of band"
    shared = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    again = pickle.loads(stream, buffers=shared)
    column = again._values["label"]
    assert any(np.shares_memory(column, np.frombuffer(each, np.uint8)) for each in shared if len(each))


def test_a_part_of_a_dataset_that_has_no_table_shares_it() -> None:
    buffers: list[pickle.PickleBuffer] = []
    part = synthetic(1_000_000).split(0.01)[1].split(0.001)[0]
    assert isinstance(part, Subset)
    assert not isinstance(part.inner, Subset), "one look-up, however often it was divided"
    pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [8 * len(part)]


def test_the_places_of_files_are_known_of_parts_too(folder: Path) -> None:
    """Measurements use them to drop the files from the page cache."""
    data = concat([slowed(manifest(folder)).limit(5), manifest(folder).split(0.5)[0]])
    ids = [*range(0, len(data), 3)]
    assert [span.path for span in local_spans(data, ids)] == [data.uri(sample) for sample in ids]
    assert local_spans(synthetic(9).limit(3), [0, 2]) == []


def test_samples_of_joined_datasets_follow_one_another(folder: Path) -> None:
    a, b, c = manifest(folder), manifest(folder).limit(7), manifest(folder).split(0.5)[1]
    data = concat([a, b, c])
    ids = np.array([SAMPLES + 6, 0, SAMPLES + 7, SAMPLES - 1, len(data) - 1])
    ages = [
        int(part.values(np.array([i]))["age"][0]) for part, i in ((b, 6), (a, 0), (c, 0), (a, -1 % SAMPLES), (c, -1))
    ]
    assert data.values(ids)["age"].tolist() == ages
    assert content(data) == content(a) + content(b) + content(c)
    assert data.source_ids(ids).tolist() == ids.tolist()
    assert concat([a]) is a
    prints = [concat(parts).fingerprint for parts in ([a, b], [b, a], [a, b, c], [a, a])]
    assert len({*prints, a.fingerprint}) == 5
    assert concat([manifest(folder), manifest(folder).limit(7)]).fingerprint == prints[0]


def test_a_sample_that_is_too_large_stays_so_in_a_part(folder: Path) -> None:
    part = bounded(tree(folder), 10).filter(pc.field("label") == 1)
    sample = int(np.flatnonzero(part.lengths(np.arange(len(part))) == 0)[0])
    with pytest.raises(BadSampleError, match="over the limit of 10 bytes"):
        part.reader().read_into(sample, np.empty(0, np.uint8))


@pytest.mark.parametrize(
    ("divide", "told"),
    [
        (lambda data: data.split(1.0), r"^fraction must be a number above 0 and below 1, got 1\.0$"),
        (lambda data: data.split(float("nan")), r"^fraction must be .*, got nan$"),
        (lambda data: data.split("0.8"), r"^fraction must be .*, got '0\.8'$"),
        (lambda data: data.split(0.001), r"^fraction 0\.001 of the 101 samples of .* leaves none for the first part$"),
        (lambda data: data.split(0.999), r"^fraction 0\.999 of the 101 samples of .* leaves none for the second part$"),
        (lambda data: data.split(0.5, seed=-1), r"^seed must be an integer in \[0, 2\*\*63\), got -1$"),
        (
            lambda data: data.split(0.5, stratify="box"),
            r"^stratify must name a field of whole numbers \(.* has label, age\), got 'box'$",
        ),
        (lambda data: data.limit(0), r"^count must be a whole number in \[1, 101\], the number of .*, got 0$"),
        (lambda data: data.limit(102), r"^count must be .*, got 102$"),
        (lambda data: data.limit(True), r"^count must be .*, got True$"),
        (lambda data: data.limit(2.0), r"^count must be .*, got 2\.0$"),
        (lambda data: data.filter("label < 5"), r"^a filter must be an expression over fields, .* 'label < 5'$"),
        (lambda data: data.filter(pc.field("no") == 1), r"by \(no == 1\): there is no field no; its fields are "),
        (lambda data: data.filter(pc.field("age") + 1), r"must evaluate to bool, but .*; its fields are label, age"),
        (lambda data: data.filter(pc.field("age") == "x"), r"no kernel matching input types"),
        (lambda data: data.select([3, 3]), r"^sample_ids must ascend, each once, got 3 after 3$"),
        (lambda data: data.select([5, 101]), r"^sample_ids must be in \[0, 101\), got 101$"),
        (lambda data: data.select([-1, 1]), r"^sample_ids must be in \[0, 101\), got -1$"),
        (lambda data: data.select([0.5]), r"^sample_ids must be a list of whole numbers, got \[0\.5\]$"),
        (lambda data: data.select(np.ones(101, bool)), r"^sample_ids must be a list of whole numbers, got array"),
        (lambda data: concat([]), r"^concat needs at least one dataset, got none$"),
        (lambda data: concat(data), r"^concat needs a list of datasets, got Dataset"),
        (lambda data: concat([data, "b"]), r"^concat needs a list of datasets, got one with 'b' in it$"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_is_one_sentence(folder: Path, divide: Callable[[Any], Dataset], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        divide(manifest(folder))
    assert "\n" not in str(caught.value)


def test_a_part_without_samples_is_one_sentence(folder: Path) -> None:
    data = manifest(folder)
    with pytest.raises(DatasetError, match=r"^none of the 101 samples of .* passes the filter \(age < 0\)$"):
        data.filter(pc.field("age") < 0)
    with pytest.raises(DatasetError, match=r"^a part of .* must have at least one sample, got none$"):
        data.select([])


def test_datasets_whose_minibatches_or_classes_differ_are_not_joined(folder: Path) -> None:
    data = manifest(folder)
    with pytest.raises(
        ConfigError, match=r"the same fields: .* has label \(int64\), age \(int64\), box \(float32 \[2\]\), a"
    ):
        concat([data, tree(folder)])
    with pytest.raises(ConfigError, match=r"the same class names: .* has ant, cat, dog, and synthetic.* has 0, 1, 2$"):
        concat([tree(folder), synthetic(9, num_classes=3)])
