"""Reads TFRecord files: their records are located once, then read at random."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import checked_fields
from mbaas.dataset.readers.shards import FoundSample, indexed_once
from mbaas.dataset.readers.tf_example import Span, features_of, records
from mbaas.errors import DatasetError


def read_tfrecord(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    image_column: str = "image/encoded",
    label_column: str | None = "image/class/label",
    fields: Sequence[str] = (),
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the samples in TFRecord files, without reading their images.

    Each record is a `tf.train.Example` and a sample. The files are scanned once for the position of each image and for
    the features of labels and fields. Images are read later, in any order. TensorFlow is not needed. Compressed files
    are refused. Checksums are not verified, because they cover bytes that are not read. If a file's size changes later,
    its samples are bad.

    Features are lists. A feature with exactly one value in all samples becomes a field of single values, any other a
    field of lists, as in `read_manifest`.

    Args:
        path: a local path, or a URI that `pyarrow.fs` opens; a pattern with braces for several files, such as
            ``train-{00000..01023}-of-01024``; or a list of both. All are in one file system.
        image_column: feature with the bytes of an encoded image, exactly one per sample. For audio and array pipelines,
            the feature with their bytes, such as ``"x"`` of CosmoFlow volumes, which `DecodeArray` reads as raw.
        label_column: feature with the label, a number or a string. Distinct strings, sorted, become the classes
            (`Dataset.class_names`), and labels are int64 indices into them. None: minibatches have no ``label``.
        fields: features that become fields of minibatches: numbers, or strings as in `read_manifest`.
        filesystem: file system of the files, for credentials or file systems that a URI cannot express.
        listing: path or URI of a Parquet file that caches the result. It is written if it does not exist, or if the
            list of files or the size or time of one changed. Otherwise it is read, which takes a second.

    Raises:
        ConfigError: an invalid pattern or field.
        DatasetError: a file does not exist, is compressed, truncated or damaged, or has other records; or a sample has
            no image or several, or lacks a label or field. The message names the file and the record. Also if
            ``listing`` cannot be read or written, is damaged, or belongs to other files or options.
    """
    known = checked_fields(fields, "features") or ()
    columns = tuple(dict.fromkeys([*([label_column] if label_column is not None else []), *known]))
    return indexed_once(
        path,
        filesystem,
        listing,
        writer="read_tfrecord",
        asked={"image_column": image_column, "label_column": label_column, "fields": known},
        label=label_column,
        fields=known,
        columns=columns,
        find=partial(_samples_of, image=image_column, columns=columns),
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
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError:
        raise DatasetError(f"{feature} must have numbers or text, but has bytes that are no text") from None
