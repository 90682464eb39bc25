"""Reading an Arrow IPC stream file but for the bytes of one column, of which is learned where they lie."""

from __future__ import annotations

import io
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.faults import said
from mbaas.dataset.location import Location, join
from mbaas.errors import DatasetError

_CONTINUES = 0xFFFFFFFF  # begins each message
_HEADER, _BODY_BYTES = 2, 3  # fields of a message: what it is, and the length of what follows it
_COMPRESSION = 3  # field of a record batch and, behind its `data`, of a dictionary batch
_BUFFER_BYTES = 16 << 10
"""How much is read at a message: its small columns are then read with it, and cost no request of their own."""


@dataclass(frozen=True)
class StreamTable:
    """A table in whose memory everything lies where it lies in its file.

    Attributes:
        table: without the bytes that were left out: their memory is zeros.
        base: the address of the file's first byte.
        nbytes: size of the file.
    """

    table: pa.Table
    base: int
    nbytes: int


def read_stream(where: Location, name: str, *, columns: Sequence[str], without: str) -> StreamTable | None:
    """Read columns of an Arrow IPC stream file, and of one more column everything but its bytes.

    Only what is needed is read, by its place, so that this is quick for a file of large images in a bucket, too.
    The sources of the format are Arrow's Message.fbs and "Encapsulated message format" of its columnar format.

    Args:
        where: the folder of the file.
        name: of the file below it.
        columns: the columns to read.
        without: a column of binary, or of a struct with binary in its field ``bytes``.

    Returns:
        None if the file is compressed, so that nothing in it can be read by its place.

    Raises:
        DatasetError: the file cannot be read, is no Arrow IPC stream, or is cut off or damaged.
    """
    path = join(where.root, name)
    try:
        with where.filesystem.open_input_file(join(where.base, name)) as raw:
            file = _Sparse(io.BufferedReader(raw, _BUFFER_BYTES), raw.size())
            if any(_is_compressed(message) for message in _messages(file)):
                return None
            table = pa.ipc.open_stream(file.buffer).read_all()
            for column in (*columns, without):
                table[column].validate()  # pyarrow 26 crashes where columns within one have fewer rows than it
            for column in columns:
                for chunk in table[column].chunks:
                    file.fetch_buffers(chunk.buffers())
            for chunk in table[without].chunks:
                file.fetch_buffers(_all_but_bytes(chunk))
            return StreamTable(table, file.buffer.address, file.nbytes)
    except (DatasetError, MemoryError):
        raise
    except Exception as error:  # a file system of somebody else's raises what it likes
        raise DatasetError(f"{path} is no Arrow IPC stream, or cannot be read: {said(error)}") from error


class _Sparse:
    """A file of which only some parts are read: memory of its size, of which what is not read takes no room."""

    def __init__(self, file: io.BufferedReader, nbytes: int) -> None:
        self._file, self.nbytes = file, nbytes
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = pa.py_buffer(self._memory)

    def fetch(self, start: int, nbytes: int) -> memoryview:
        """Read some bytes; returns their memory."""
        part = memoryview(self._memory)[start : start + nbytes]
        if nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"it has {self.nbytes:,} bytes, and should have {nbytes:,} from byte {start:,} on")
        self._file.seek(start)
        if self._file.readinto(part) != nbytes:
            raise ValueError(f"it ends in the {nbytes:,} bytes from byte {start:,} on")
        return part

    def fetch_buffers(self, buffers: Sequence[pa.Buffer | None]) -> None:
        """Read what a column has in its buffers."""
        for buffer in buffers:
            if buffer is not None and buffer.size:
                self.fetch(buffer.address - self.buffer.address, buffer.size)


def _messages(file: _Sparse) -> Iterator[memoryview]:
    """Read the metadata of all messages, and yield it."""
    at = 0
    while at < file.nbytes:
        begins, nbytes = struct.unpack("<Ii", file.fetch(at, 8))
        if begins != _CONTINUES:
            raise ValueError(f"no message is at byte {at:,}")
        if not nbytes:
            return
        metadata = file.fetch(at + 8, nbytes)
        yield metadata
        place = _field(metadata, _root(metadata), _BODY_BYTES)
        body_bytes = _unpacked("<q", metadata, place) if place else 0
        if body_bytes < 0:
            raise ValueError(f"it is damaged: at byte {at:,} a message would end before it begins")
        at += 8 + nbytes + body_bytes


def _is_compressed(metadata: memoryview) -> bool:
    place = _field(metadata, _root(metadata), _HEADER)
    if not place:
        return False
    header = place + _unpacked("<I", metadata, place)
    return bool(_unpacked("<B", metadata, _field(metadata, _root(metadata), 1)) == 3) and bool(
        _field(metadata, header, _COMPRESSION)
    )


# A flatbuffer has tables; each begins with the distance back to a list of where its fields are.


def _root(metadata: memoryview) -> int:
    return _unpacked("<I", metadata, 0)


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Return where a field of a table is; 0 if the table does not have it."""
    fields = table - _unpacked("<i", metadata, table)
    entry = 4 + 2 * number
    place = _unpacked("<H", metadata, fields + entry) if entry < _unpacked("<H", metadata, fields) else 0
    return table + place if place else 0


def _unpacked(form: str, metadata: memoryview, place: int) -> int:
    if place < 0:
        raise ValueError("it is damaged: the metadata of a message point outside of it")
    return int(struct.unpack_from(form, metadata, place)[0])


def _all_but_bytes(chunk: pa.Array) -> list[pa.Buffer | None]:
    """Return the buffers of a column of images without those of their bytes."""
    if not pa.types.is_struct(chunk.type):
        return list(chunk.buffers()[:2])
    inner: Any = chunk.field("bytes")
    found = [chunk.buffers()[0], *inner.buffers()[:2]]
    if chunk.null_count or inner.null_count:  # then the other fields are needed, which may name a file
        for number, field in enumerate(chunk.type):
            found += chunk.field(number).buffers() if field.name != "bytes" else []
    return found
