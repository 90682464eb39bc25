"""A Map with `fields` receives its sample's fields, and minibatches contain the fields that it returns."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engines import Batch, make_engine
from mbaas.samples.fields import Arrays, Field, Packed

ROWS = 5
FIELDS = (Field("label", (), "int64"), Field("place", (2,), "float32"), Field("tokens", (None,), "int32", 4))


def known() -> Arrays:
    """Sample i has label i, place (i, -i) and i tokens: 10 * i, 10 * i + 1, ..."""
    tokens = np.concatenate([10 * i + np.arange(i) for i in range(ROWS)]).astype(np.int32)
    bounds = np.cumsum([0, *range(ROWS)])
    places = np.stack([[i, -i] for i in range(ROWS)]).astype(np.float32)
    return {"label": np.arange(ROWS), "place": places, "tokens": Packed(tokens, bounds)}


def npy(value: float) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.full(3, value, np.float32))
    return stream.getvalue()


def prepared(*transforms: T.Transform, threads: int = 1) -> tuple[Any, dict[int, str], Arrays]:
    """Prepared values, reasons of bad rows and fields of good rows; the samples are the arrays 0, 1, ..."""
    pipeline = T.Pipeline([T.DecodeArray(), *transforms])
    assert pipeline.known(FIELDS) == FIELDS
    engine, before = make_engine("cpu", pipeline, seed=3, threads=threads), known()
    try:
        given = known()
        out = engine.field(npy(0.0), "x", {name: column[:1] for name, column in given.items()}).empty(ROWS)
        files = [npy(i) for i in range(ROWS)]
        result = engine.prepare(Batch(files, np.arange(100, 100 + ROWS), 2, given), out)
    finally:
        engine.close()
    for name, column in before.items():
        np.testing.assert_array_equal(values(given[name]), values(column), "what it was given changed")
    return out, {bad.row: bad.reason for bad in result.bad}, result.known


def values(column: Any) -> Any:
    return column.own()[0] if isinstance(column, Packed) else column


def test_it_gets_the_fields_of_its_own_sample_and_gives_them_other_values() -> None:
    def change(sample: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        assert list(sample) == ["array", "label", "tokens"]
        assert (sample["label"].shape, sample["label"].dtype, sample["tokens"].dtype) == ((), np.int64, np.int32)
        tokens = sample["tokens"]
        tokens += 1  # the function owns the array
        sample["array"] += sample["label"].astype(np.float32)
        return {"array": sample["array"], "label": 7 - int(sample["label"]), "tokens": tokens[::2]}

    for threads in (1, 3):
        out, bad, fields = prepared(T.Map(change, fields=["label", "tokens"]), threads=threads)
        assert not bad
        np.testing.assert_array_equal(out, np.repeat(2.0 * np.arange(ROWS), 3).reshape(ROWS, 3))
        assert (fields["label"].dtype, fields["label"].tolist()) == (np.int64, [7, 6, 5, 4, 3])
        assert [fields["tokens"][i : i + 1].own()[0].tolist() for i in range(ROWS)] == [
            [],
            [11],
            [21],
            [31, 33],
            [41, 43],
        ]
        assert fields["tokens"].dtype == np.int32
        np.testing.assert_array_equal(fields["place"], known()["place"])


def test_what_it_leaves_out_stays_and_the_next_one_sees_what_the_first_one_changed() -> None:
    def first(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"place": sample["place"] * 2 + rng.integers(1)}

    def second(sample: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        return {"place": (sample["place"] + 1).tolist()}

    out, bad, fields = prepared(T.Map(first, fields=["place"]), T.Map(second, fields=("place", "label")))
    assert not bad
    np.testing.assert_array_equal(out[:, 0], np.arange(ROWS))
    np.testing.assert_array_equal(fields["place"], known()["place"] * 2 + 1)
    np.testing.assert_array_equal(fields["label"], np.arange(ROWS))


def test_a_bad_sample_has_a_reason_and_the_others_keep_their_fields() -> None:
    def fails(sample: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        return {"label": 1 // (int(sample["label"]) - 2)}

    out, bad, fields = prepared(T.Map(fails, fields=["label"]))
    assert list(bad) == [2]
    assert "ZeroDivisionError" in bad[2]
    assert fields["label"].tolist() == [-1, -1, 1, 0]
    assert fields["tokens"].lengths.tolist() == [0, 1, 3, 4]
    assert not out[2].any()


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (3, "must return a dict with some of array, label, place, tokens, got int"),
        ({"labels": 3}, "must return a dict with some of array, label, place, tokens, got ['labels']"),
        ({"label": [1, 2]}, "field 'label' must be int64 [], got int64 [2]"),
        ({"label": 1.5}, "field 'label' must be int64 [], got float64 []"),
        ({"label": "x"}, "field 'label' must be int64 [], got "),
        ({"place": [1.0]}, "field 'place' must be float32 [2], got float64 [1]"),
        ({"place": [[1.0], [1.0, 2.0]]}, "field 'place' is not an array: "),
        (
            {"tokens": [1, 2, 3, 4, 5]},
            "field 'tokens' must be int32 [0], or shorter, got int64 [5]; Map's longest lets lists become longer",
        ),
        ({"tokens": 3}, "field 'tokens' must be int32 [0], or shorter, got int64 []"),
        ({"array": [1.0]}, "must return a NumPy array, got list"),
    ],
)
def test_what_is_of_another_form_is_a_bad_sample(returned: Any, reason: str) -> None:
    def wrong(sample: dict[str, Any], _: np.random.Generator) -> Any:
        return returned if sample["label"] == 0 else {}

    pipeline = T.Pipeline([T.DecodeArray(), T.Map(wrong, fields=["label", "place", "tokens"])])
    engine = make_engine("cpu", pipeline, seed=0)
    bad = engine.prepare(
        Batch([npy(i) for i in range(ROWS)], np.arange(ROWS), 0, known()), np.empty((ROWS, 3), np.float32)
    ).bad
    assert [each.row for each in bad] == [0]
    assert reason in bad[0].reason


def test_a_deterministic_function_gets_the_sample_alone_with_fields_or_without() -> None:
    def more(*given: Any) -> dict[str, Any]:
        (sample,) = given
        return {"label": sample["label"] + 10}

    def double(*given: Any) -> Any:
        (array,) = given
        return array * np.float32(2)

    out, bad, fields = prepared(T.Map(more, fields=["label"], deterministic=True), T.Map(double, deterministic=True))
    assert not bad
    assert out[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert fields["label"].tolist() == [10, 11, 12, 13, 14]


def test_images_are_mapped_with_their_fields_too() -> None:
    """One sample of the block has no valid header; fields stay with their samples."""
    import cv2

    def shift(sample: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        assert sample["image"].shape == (8, 6, 3)
        return {"image": sample["image"] + np.uint8(sample["label"]), "label": sample["label"] + 100}

    pipeline = T.Pipeline([T.DecodeImage(), T.Map(shift, fields=["label"]), T.RandomHorizontalFlip()])
    files = [cv2.imencode(".png", np.full((8, 6, 3), 10 * i, np.uint8))[1].tobytes() for i in range(ROWS)]
    files[1] = b"no image"
    engine, out = make_engine("cpu", pipeline, seed=0, threads=2), np.empty((ROWS, 8, 6, 3), np.uint8)
    try:
        result = engine.prepare(Batch(files, np.arange(ROWS), 0, known()), out)
    finally:
        engine.close()
    assert [bad.row for bad in result.bad] == [1]
    assert result.known["label"].tolist() == [100, 102, 103, 104]
    assert out[:, 0, 0, 0].tolist() == [0, 0, 22, 33, 44]
    assert result.known["tokens"].lengths.tolist() == [0, 2, 3, 4]


def test_what_it_may_take_is_checked_when_a_pipeline_meets_a_dataset() -> None:
    function = T.Map(np.add, fields=["lable"])
    with pytest.raises(ConfigError, match="takes the field 'lable', but samples have label, place, tokens"):
        T.Pipeline([T.DecodeArray(), function]).known(FIELDS)
    for wrong in ("label", [3], 3):
        with pytest.raises(ConfigError, match=r"Map's fields must be a list of names, such as \['label'\], got"):
            T.Map(np.add, fields=wrong)  # type: ignore[arg-type]


def test_lists_become_longer_up_to_what_it_says() -> None:
    def repeated(sample: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        return {"tokens": np.repeat(sample["tokens"], 2) if len(sample["tokens"]) else [7, 8]}

    longer = T.Map(repeated, fields=["tokens", "place"], longest=6)
    pipeline = T.Pipeline([T.DecodeArray(), longer])
    assert pipeline.known(FIELDS) == (*FIELDS[:2], Field("tokens", (None,), "int32", 6))
    engine = make_engine("cpu", pipeline, seed=0, threads=2)
    files, out = [npy(i) for i in range(ROWS)], np.empty((ROWS, 3), np.float32)
    result = engine.prepare(Batch(files, np.arange(ROWS), 0, known()), out)
    engine.close()
    assert [(bad.row, bad.reason) for bad in result.bad] == [
        (4, "field 'tokens' must be int32 [6], or shorter, got int32 [8]")
    ]
    tokens = result.known["tokens"]
    assert [tokens.value(row).tolist() for row in range(4)] == [
        [7, 8], [10, 10], [20, 20, 21, 21], [30, 30, 31, 31, 32, 32]
    ]  # fmt: skip


def test_a_list_may_always_be_as_long_as_it_was() -> None:
    """`longest` is raised to the dataset's own maximum length."""

    def more(sample: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        return {"tokens": sample["tokens"][:3] + 1}

    _, bad, fields = prepared(T.Map(more, fields=["tokens"], longest=2))
    assert not bad
    assert fields["tokens"].lengths.tolist() == [0, 1, 2, 3, 3]


def test_an_empty_list_is_one_of_any_type() -> None:
    _, bad, fields = prepared(T.Map(lambda sample, _: {"tokens": []}, fields=["tokens"]))
    assert not bad
    assert (fields["tokens"].lengths.tolist(), fields["tokens"].dtype) == ([0] * ROWS, np.int32)


def test_how_long_lists_may_become_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"how long lists may become, but none of its fields is one: label: int64$"):
        T.Pipeline([T.DecodeArray(), T.Map(np.add, fields=["label"], longest=3)]).known(FIELDS)
    with pytest.raises(ConfigError, match=r"^Map's longest is for lists among its fields, of which it has none, got"):
        T.Map(np.add, longest=3)
    with pytest.raises(ConfigError, match=r"^Map's longest must be a whole number in \[1, .*\], got 0$"):
        T.Map(np.add, fields=["tokens"], longest=0)


def test_it_is_another_transform_with_other_fields() -> None:
    fingerprints = {
        T.Pipeline([T.DecodeArray(), T.Map(np.add, fields=fields)]).fingerprint
        for fields in ((), ("label",), ("label", "place"))
    }
    fingerprints.add(T.Pipeline([T.DecodeArray(), T.Map(np.add, fields=["label"], longest=2)]).fingerprint)
    assert len(fingerprints) == 4
    assert repr(T.Map(np.add, fields=["label"])).endswith("add, fields=['label'])")
