"""TFRecord files are read feature by feature as the package tfrecord reads them; invalid ones are refused."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from contents import content, values
from hypothesis import given
from hypothesis import strategies as st
from tfrecord import TFRecordWriter, tfrecord_loader

from mbaas import transforms as T
from mbaas.dataset import read_tfrecord
from mbaas.errors import BadSampleError, ConfigError, DatasetError
from mbaas.pictures.samples import first_samples
from mbaas.samples.fields import Field

KINDS = {
    "image/encoded": "byte",
    "image/class/label": "int",
    "kind": "byte",
    "age": "float",
    "box": "float",
    "k": "int",
}

SAMPLES: list[dict[str, tuple[Any, str]]] = [
    {
        "image/encoded": (bytes([number]) * (1 + 3000 * (number % 3)), "byte"),
        "image/class/label": (number % 5 - 1, "int"),
        "kind": ("ab"[number % 2].encode(), "byte"),
        "age": (number / 2, "float"),
        "box": ([number, 1.5, 0, -number], "float"),
        "k": ([*range(-number, number)], "int"),
    }
    for number in range(11)
]


def written(path: Path, samples: list[dict[str, tuple[Any, str]]] = SAMPLES) -> Path:
    """Write a file with the package tfrecord."""
    writer = TFRecordWriter(str(path))
    for sample in samples:
        writer.write(sample)
    writer.close()
    return path


def by_tfrecord(*files: Path) -> list[dict[str, Any]]:
    return [sample for file in files for sample in tfrecord_loader(str(file), None, KINDS)]


def test_each_feature_is_what_the_package_reads(tmp_path: Path) -> None:
    files = [written(tmp_path / f"t-0000{n}-of-00002", part) for n, part in enumerate((SAMPLES[:4], SAMPLES[4:]))]
    data = read_tfrecord(tmp_path / "t-{00000..00001}-of-00002", fields=["age", "box", "k"])
    read = by_tfrecord(*files)
    assert content(data) == [bytes(sample["image/encoded"]) for sample in read]
    ids = np.arange(11)
    found = data.values(ids)
    assert found["label"].tolist() == [int(sample["image/class/label"][0]) for sample in read]
    np.testing.assert_array_equal(found["age"], [sample["age"][0] for sample in read])
    np.testing.assert_array_equal(found["box"], [sample["box"] for sample in read])
    for row, sample in enumerate(read):
        wanted = sample.get("k", [])
        assert found["k"][row : row + 1].own()[0].tolist() == list(wanted)
    assert data.fields == (
        Field("label", (), "int64"),
        Field("age", (), "float32"),
        Field("box", (4,), "float32"),
        Field("k", (None,), "int64", 20),
    )
    assert (data.uri(0), data.uri(10)) == (f"{files[0]}#0", f"{files[1]}#6")


def test_labels_may_be_text_numbers_or_missing(tmp_path: Path) -> None:
    file = written(tmp_path / "a.tfrecord")
    named = read_tfrecord(file, label_column="kind")
    assert (named.class_names, values(named)) == (("a", "b"), {"label": [number % 2 for number in range(11)]})
    assert read_tfrecord(file, label_column=None).fields == ()
    assert read_tfrecord(file, label_column="box").fields == (Field("label", (4,), "float32"),)
    one = read_tfrecord(written(tmp_path / "one", SAMPLES[1:2]), label_column=None, fields=["k"])
    assert one.fields == (Field("k", (2,), "int64"),), "two values in each sample"


def varint(number: int) -> bytes:
    """A protobuf varint: seven bits per byte, lowest first."""
    *before, last = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([byte | 0x80 for byte in before] + [last])


def example(features: dict[bytes, bytes], *, by_hand: bytes = b"") -> bytes:
    """An Example with features that are already encoded."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(value)) + value

    entries = b"".join(field(1, field(1, name) + field(2, value)) for name, value in features.items())
    return field(1, entries) + by_hand


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    masked = TFRecordWriter.masked_crc
    return length + masked(length) + content + masked(content)


INTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5)


@given(INTS, st.booleans(), st.integers(0, 9000))
def test_numbers_are_read_however_they_are_written(numbers: list[int], packed: bool, nbytes: int) -> None:
    """Includes unpacked numbers, as old protobuf writers encode them, and unknown fields around them."""
    written = [varint(number % 2**64) for number in numbers]
    ints = b"\x0a" + varint(sum(map(len, written))) + b"".join(written) if packed else b""
    ints = ints or b"".join(b"\x08" + number for number in written)
    image = b"\x0a" + varint(nbytes) + bytes(nbytes)
    features = {
        b"n": b"\x1a" + varint(len(ints)) + ints,
        b"x": b"\x0a" + varint(len(image)) + image,
        b"f": b"\x12\x0a\x0d" + struct.pack("<f", 1.5) + b"\x0d" + struct.pack("<f", -2),
    }
    content = example(features, by_hand=b"\x10\x05\x19" + bytes(8) + b"\x25" + bytes(4))
    filesystem = pyarrow.fs._MockFileSystem()
    with filesystem.open_output_stream("a") as file:
        file.write(record(content) * 2)
    data = read_tfrecord("a", image_column="x", label_column=None, fields=["n", "f"], filesystem=filesystem)
    single = numbers[0] if len(numbers) == 1 else numbers
    assert values(data) == {"n": [single, single], "f": [[1.5, -2], [1.5, -2]]}
    assert data.lengths(np.arange(2)).tolist() == [nbytes, nbytes]


def test_volumes_are_trained_on_as_raw_arrays(tmp_path: Path) -> None:
    """The format of CosmoFlow: particle counts as raw bytes, and four parameters as the label."""
    volumes = np.random.default_rng(0).integers(0, 900, (3, 4, 4, 4, 2)).astype(np.int16)
    samples = [{"x": (each.tobytes(), "byte"), "y": ([*map(float, range(4))], "float")} for each in volumes]
    data = read_tfrecord(written(tmp_path / "c.tfrecord", samples), image_column="x", label_column="y")
    decode = T.DecodeArray("raw", shape=(4, 4, 4, 2), dtype="int16")
    shown = first_samples(data, T.Pipeline([decode]), count=3, shuffle=False)
    np.testing.assert_array_equal(shown.samples, volumes)
    assert shown.known["label"].tolist() == [[0, 1, 2, 3]] * 3


def test_what_was_kept_is_read_until_a_file_changes(tmp_path: Path) -> None:
    file, kept = written(tmp_path / "a.tfrecord"), tmp_path / "kept.parquet"
    first = read_tfrecord(file, listing=kept)
    assert read_tfrecord(file, listing=kept).fingerprint == first.fingerprint
    written(file, SAMPLES[:3])
    with pytest.raises(BadSampleError, match=r"a\.tfrecord#0.*bytes"):
        content(first)
    assert len(read_tfrecord(file, listing=kept)) == 3
    with pytest.raises(DatasetError, match=r"was made with image_column 'image/encoded', not 'kind'"):
        read_tfrecord(file, image_column="kind", listing=kept)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image_column": "image"}, r"record 0 has no feature 'image'; it has 'age', 'box', 'image/class/label', "),
        ({"fields": ["size"]}, r"record 0 has no feature 'size'; it has 'age'"),
        ({"image_column": "age"}, r"the feature 'age' of record 0 must have one value of bytes, but has none"),
        (
            {"label_column": "image/encoded"},
            r"the feature 'image/encoded' of record \d+ must have numbers or text, but has b",
        ),
    ],
)
def test_what_a_sample_lacks_is_named(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    samples = [{**sample, "image/encoded": (b"\xff", "byte")} for sample in SAMPLES]
    with pytest.raises(DatasetError, match=told):
        read_tfrecord(written(tmp_path / "a.tfrecord", samples), **options)


def test_fields_that_cannot_be_are_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.tfrecord")
    with pytest.raises(ConfigError, match="fields must be a list of features, such as \\['age'\\], got 'age'"):
        read_tfrecord(file, fields="age")
    ragged = [{**SAMPLES[0], "kind": ([b"a", b"b"], "byte")}]
    with pytest.raises(ConfigError, match=r"column 'kind' of .* must have numbers, .*, or strings, got list<"):
        read_tfrecord(written(tmp_path / "b.tfrecord", ragged), fields=["kind"])


def test_what_is_no_file_of_records_is_named(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.tfrecord").read_bytes()
    for name, wrong, told in (
        ("z", gzip.compress(plain), "is compressed by gzip, but must be plain"),
        ("n", b"no records at all", "is not a TFRecord file"),
        ("s", plain + b"more", "cut off or damaged: at byte .*, where a record must begin, is none"),
        ("e", b"", "no sample is in 1 shard"),
        ("p", record(b"\x0a\x05abc"), "the record at byte 12 is not an Example: at byte 12 a field would end at"),
        ("v", record(b"\xff" * 20), "is not an Example: at byte 12 a number does not end"),
        ("u", record(b"\x0b"), "a field has the unknown wire type 3"),
    ):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(DatasetError, match=told):
            read_tfrecord(tmp_path / name, label_column=None)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.tfrecord", SAMPLES[:2]).read_bytes()
    first = 12 + struct.unpack("<Q", plain[:8])[0] + 4
    for end in [*range(1, 40), *range(first - 6, first), *range(first + 1, first + 30), len(plain) - 1]:
        (tmp_path / "cut").write_bytes(plain[:end])
        with pytest.raises(DatasetError, match=r"cut off|is not a TFRecord file"):
            read_tfrecord(tmp_path / "cut", label_column=None)
