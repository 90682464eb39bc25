"""Reads TFRecord files: their records are located once, then read at random."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pyarrow.fs

from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import checked_fields
from mbaas.dataset.readers.listing import ShardSample, indexed_once
from mbaas.errors import DatasetError


@knows_names
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
        options={"image_column": image_column, "label_column": label_column, "fields": known},
        label=label_column,
        fields=known,
        columns=columns,
        find=partial(_samples_of, image=image_column, columns=columns),
        single_values=True,
    )


def _samples_of(file: BinaryIO, nbytes: int, shard: str, image: str, columns: tuple[str, ...]) -> Iterator[ShardSample]:
    for number, record in enumerate(_records(file, nbytes, shard)):
        found, names = _features_of(file, record, shard, (image, *columns), columns)
        for name in (image, *columns):
            if name not in found:
                there = ", ".join(map(repr, sorted(names))) or "none"
                raise DatasetError(f"{shard}: record {number} has no feature {name!r}; it has {there}")
        spans, _ = found[image]
        if len(spans) != 1:
            has = f"must have one value of bytes, but has {len(spans) or 'none'}"
            raise DatasetError(f"{shard}: the feature {image!a} of record {number} {has}")
        values: dict[str, list[Any]] = {}
        for name in columns:
            try:
                values[name] = [value.decode() if isinstance(value, bytes) else value for value in found[name][1]]
            except UnicodeDecodeError:
                wrong = "must have numbers or text, but has bytes that are not text"
                raise DatasetError(f"{shard}: the feature {name!a} of record {number} {wrong}") from None
        yield ShardSample(str(number), spans[0].offset, spans[0].length, values)


# ---- records and Examples ----


def first_example(file: BinaryIO, nbytes: int, shard: str) -> dict[str, Sequence[bytes | float | int]]:
    """Return the features of the first record: name -> values.

    Raises:
        DatasetError: not a TFRecord file of Examples, or an empty one.
    """
    record = next(_records(file, nbytes, shard), None)
    if record is None:
        raise DatasetError(f"{shard} is empty")
    _, names = _features_of(file, record, shard, (), ())
    found, _ = _features_of(file, record, shard, names, names)
    return {name: values for name, (_, values) in found.items()}


_HEADER, _FOOTER = struct.Struct("<QI"), 4
_WINDOW = 4096
"""Bytes read together: usually a whole Example except its image."""

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

_FEATURES, _FEATURE, _KEY, _VALUE = 1, 1, 1, 2
_BYTES, _FLOATS, _INTS, _LIST = 1, 2, 3, 1
"""Field numbers in Example, Features, an entry of its map, Feature, and the lists."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}
"""First bytes of a compressed file -> format."""


class _Span(NamedTuple):
    offset: int
    length: int


_Feature: TypeAlias = tuple[list[_Span], Sequence[bytes | float | int]]
"""A feature of an Example: positions of its strings or bytes in the file, and its values, empty if not requested."""


def _records(file: BinaryIO, nbytes: int, shard: str) -> Iterator[_Span]:
    """Yield the position of each record's contents in a TFRecord file; ``shard`` is its name in messages.

    Raises:
        DatasetError: not a TFRecord file, or a compressed, truncated or damaged one.
    """
    at = 0
    while at < nbytes:
        file.seek(at)
        header = file.read(_HEADER.size)
        length, checksum = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, -1)
        if checksum != _checksum(header[:8]):
            raise DatasetError(f"{shard} {_description(header, at)}")
        content = _Span(at + _HEADER.size, length)
        at += _HEADER.size + length + _FOOTER
        if at > nbytes:
            raise DatasetError(
                f"{shard} is cut off: its record at byte {content.offset:,} would end at byte {at:,}, and the file has "
                f"{nbytes:,} bytes"
            )
        yield content


def _description(header: bytes, at: int) -> str:
    if at:
        return f"is cut off or damaged: at byte {at:,}, where a record must begin, is none"
    if (how := _COMPRESSED.get(header[:2])) is not None:
        return f"is compressed by {how}, but must be plain, so that single records can be read: decompress it"
    return "is not a TFRecord file"


def _features_of(
    file: BinaryIO, record: _Span, shard: str, wanted: Collection[str], to_read: Collection[str]
) -> tuple[dict[str, _Feature], list[str]]:
    """Return the features ``wanted`` of a record's Example, if they exist, and the names of all its features.

    The values of features ``to_read`` are read.

    Raises:
        DatasetError: the record is not an Example.
    """
    source = _Source(file, record)
    found: dict[str, _Feature] = {}
    names: list[str] = []
    try:
        for features in source.messages(record, _FEATURES):
            for entry in source.messages(features, _FEATURE):
                name = b"".join(source.read(key) for key in source.messages(entry, _KEY)).decode()
                names.append(name)
                if name in wanted:
                    found[name] = _feature(source, entry, to_read=name in to_read)
    except (ValueError, struct.error) as error:
        raise DatasetError(f"{shard}: the record at byte {record.offset:,} is not an Example: {error}") from None
    return found, names


def _feature(source: _Source, entry: _Span, *, to_read: bool) -> _Feature:
    spans: list[_Span] = []
    values: Sequence[bytes | float | int] = []
    for feature in source.messages(entry, _VALUE):
        for kind, wire_type, at in source.fields(feature):
            if wire_type != _LENGTH or kind not in (_BYTES, _FLOATS, _INTS):
                continue
            if kind == _BYTES:
                spans = [*source.messages(at, _LIST)]
                values = [source.read(span) for span in spans] if to_read else []
            elif to_read:
                values = _floats(source, at) if kind == _FLOATS else _ints(source, at)
    return spans, values


def _floats(source: _Source, of: _Span) -> list[float]:
    # Packed, as TensorFlow writes them, or single values.
    parts = [
        source.read(at)
        for number, wire_type, at in source.fields(of)
        if number == _LIST and wire_type in (_LENGTH, _FIXED_32)
    ]
    return [*np.frombuffer(b"".join(parts), "<f4")]


def _ints(source: _Source, of: _Span) -> list[int]:
    found: list[int] = []
    for number, wire_type, at in source.fields(of):
        end = at.offset + at.length
        while number == _LIST and wire_type in (_LENGTH, _VARINT) and at.offset < end:
            value, after = source.varint(at.offset, end)
            found.append(value - (1 << 64) if value >> 63 else value)
            at = _Span(after, end - after)
    return found


class _Source:
    # A window of the record is in memory. Positions refer to the file.

    def __init__(self, file: BinaryIO, record: _Span) -> None:
        self._file, self._end = file, record.offset + record.length
        self._start, self._window = record.offset, b""

    def read(self, span: _Span) -> bytes:
        first = span.offset - self._start
        if first < 0 or first + span.length > len(self._window):
            self._file.seek(span.offset)
            self._start, first = span.offset, 0
            self._window = self._file.read(min(max(span.length, _WINDOW), self._end - span.offset))
        return self._window[first : first + span.length]

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return the value and the position after it."""
        value = 0
        for position, byte in enumerate(self.read(_Span(at, min(10, end - at)))):
            value |= (byte & 0x7F) << 7 * position
            if not byte & 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at + position + 1
        raise ValueError(f"at byte {at:,} a number does not end")

    def fields(self, message: _Span) -> Iterator[tuple[int, int, _Span]]:
        """Yield field number, wire type and position of each value."""
        at, end = message.offset, message.offset + message.length
        while at < end:
            tag, start = self.varint(at, end)
            wire_type = tag & 7
            if wire_type == _LENGTH:
                length, start = self.varint(start, end)
            elif wire_type == _VARINT:
                length = self.varint(start, end)[1] - start
            elif wire_type in (_FIXED_32, _FIXED_64):
                length = 4 if wire_type == _FIXED_32 else 8
            else:
                raise ValueError(f"at byte {at:,} a field has the unknown wire type {wire_type}")
            if start + length > end:
                raise ValueError(f"at byte {at:,} a field would end at byte {start + length:,}, after its message")
            yield tag >> 3, wire_type, _Span(start, length)
            at = start + length

    def messages(self, within: _Span, number: int) -> Iterator[_Span]:
        """Yield the positions of a field's values with a length: messages, strings or bytes."""
        return (at for found, wire_type, at in self.fields(within) if found == number and wire_type == _LENGTH)


def _checksum(content: bytes) -> int:
    """Return the masked CRC-32C (Castagnoli) that TensorFlow uses."""
    crc = 0xFFFF_FFFF
    for byte in content:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFF_FFFF
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F6_3B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]
