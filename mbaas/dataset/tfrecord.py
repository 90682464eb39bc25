"""Reading TensorFlow's records: files of many samples each, found once and then read by their places."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.shard_index import FoundSample, checked_names, indexed_once
from mbaas.dataset.tf_example import Span, features_of, records
from mbaas.errors import DatasetError


def read_tfrecord(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    image: str = "image/encoded",
    label: str | None = "image/class/label",
    fields: Sequence[str] = (),
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Find the samples in files of TensorFlow's records; read none of their images.

    Each record holds a `tf.train.Example`, and is a sample. The files are looked through once: where each record's
    image is, and the features that labels and fields come from; later each image is read by its place, in any order.
    TensorFlow is not needed. Files that are compressed as a whole are refused. A record's checksum is not looked at, as
    it is one of bytes that are not read; a file that has another size by then is not the one that was read, and its
    samples are bad.

    Features are lists. One that has exactly one value in all samples is a field of single values; of others a field has
    lists, as `read_manifest` takes them.

    Args:
        shards: a local path, or a URI that `pyarrow.fs` opens; a pattern with braces for several, such as
            ``train-{00000..01023}-of-01024``; or a list of these. All are in one file system.
        image: the feature with the bytes of an encoded image, exactly one in each sample; for pipelines of sound or
            arrays with the bytes of these, such as ``"x"`` of CosmoFlow's volumes, which `DecodeArray` takes as raw.
        label: the feature with the label: numbers, or a text. If values are texts, the distinct ones, sorted, are the
            classes (`Dataset.class_names`), and labels int64 indices into them. None: minibatches have no ``label``.
        fields: features of numbers, or of texts as `read_manifest` takes them, that minibatches have under these names.
        filesystem: where the files are, for credentials or file systems that a URI cannot express.
        listing: a Parquet file, by its path or URI, in which is kept what was found: written if it is not there, or
            if the size or time of a file, or the list of them, has changed since; else read, which takes a second.

    Raises:
        ConfigError: a pattern or a field that cannot be.
        DatasetError: a file is not there, is compressed, cut off or damaged, or has other records; a sample has no
            image, or several, or lacks a label or a field; names the file and the record. Or ``listing`` cannot be read
            or written, is damaged, or is of other files or options.
    """
    known = checked_names(fields, "features")
    columns = tuple(dict.fromkeys([*([label] if label is not None else []), *known]))
    return indexed_once(
        shards,
        filesystem,
        listing,
        writer="read_tfrecord",
        asked={"image": image, "label": label, "fields": known},
        label=label,
        fields=known,
        columns=columns,
        find=partial(_samples_of, image=image, columns=columns),
        single_values=True,
    )


def _samples_of(file: BinaryIO, nbytes: int, shard: str, image: str, columns: tuple[str, ...]) -> Iterator[FoundSample]:
    for number, record in enumerate(records(file, nbytes, shard)):
        found, names = features_of(file, record, shard, spans=[image], values=columns)
        for name in (image, *columns):
            if name not in found:
                there = ", ".join(map(repr, sorted(names))) or "none"
                raise DatasetError(f"{shard}: record {number} has no feature {name!r}; it has {there}")
        span = _only(found[image].spans, f"{shard}: the feature {image!a} of record {number}")
        values = {
            name: _as_text(found[name].values, f"{shard}: the feature {name!a} of record {number}") for name in columns
        }
        yield FoundSample(str(number), span.offset, span.length, values)


def _only(spans: list[Span], feature: str) -> Span:
    if len(spans) != 1:
        has = f"has {len(spans)}" if spans else "has none"
        raise DatasetError(f"{feature} must have one value of bytes, but {has}")
    return spans[0]


def _as_text(values: Any, feature: str) -> list[Any]:
    """Return values, with bytes as the texts that they must be."""
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError:
        raise DatasetError(f"{feature} must have numbers or text, but has bytes that are no text") from None
