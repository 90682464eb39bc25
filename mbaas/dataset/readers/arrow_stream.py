"""Reads an Arrow IPC stream file without the bytes of one column, and locates these bytes."""

from __future__ import annotations

import io
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.storage.faults import message_of
from mbaas.dataset.storage.location import Location, join
from mbaas.errors import DatasetError

_CONTINUES = 0xFFFFFFFF  # begins each message
_HEADER, _COMPRESSION = 2, 3  # numbers of fields: a message's header, and a record batch's compression
_BUFFER_BYTES = 16 << 10
"""Bytes read per message: its small columns are read with it and need no further request."""


@dataclass(frozen=True)
class StreamTable:
    """A table in memory with the layout of its file of ``nbytes``, which begins at address ``base``.

    Bytes that were left out are zeros.
    """

    table: pa.Table
    base: int
    nbytes: int


def read_stream(where: Location, name: str, *, columns: Sequence[str], without: str) -> StreamTable | None:
    """Read ``columns`` of an Arrow IPC stream file, and the column ``without`` except for its bytes.

    Only the required byte ranges are read, so it is fast even for a file of large images in a bucket. pyarrow itself
    would read whole messages.

    Args:
        where, name: the file's folder, and its name there.
        columns: columns to read completely.
        without: a binary column, or a struct with a binary field ``bytes``.

    Returns:
        None if the file is compressed, because single values cannot be located.

    Raises:
        DatasetError: the file cannot be read, is not an Arrow IPC stream, or is truncated or damaged.
    """
    path = join(where.root, name)
    try:
        with where.filesystem.open_input_file(join(where.base, name)) as raw:
            file = _Sparse(io.BufferedReader(raw, _BUFFER_BYTES), raw.size())
            if not _read_metadata(file):
                return None
            table = pa.ipc.open_stream(file.buffer).read_all()
            for column in (*columns, without):
                table[column].validate()  # pyarrow 26 crashes if nested columns have fewer rows than their parent
            for column in columns:
                for chunk in table[column].chunks:
                    file.fetch_buffers(chunk.buffers())
            for chunk in table[without].chunks:
                file.fetch_buffers(_all_but_bytes(chunk))
            return StreamTable(table, file.buffer.address, file.nbytes)
    except (DatasetError, MemoryError):
        raise
    except Exception as error:  # third-party file systems raise any exception
        raise DatasetError(f"{path} is no Arrow IPC stream, or cannot be read: {message_of(error)}") from error


class _Sparse:
    # Memory of the file's size; the parts that are never read take no physical memory.

    def __init__(self, file: io.BufferedReader, nbytes: int) -> None:
        self._file, self.nbytes = file, nbytes
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = pa.py_buffer(self._memory)

    def fetch(self, start: int, nbytes: int) -> memoryview:
        part = memoryview(self._memory)[start : start + nbytes]
        if nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"it has {self.nbytes:,} bytes, and should have {nbytes:,} from byte {start:,} on")
        self._file.seek(start)
        if self._file.readinto(part) != nbytes:
            raise ValueError(f"it ends in the {nbytes:,} bytes from byte {start:,} on")
        return part

    def fetch_buffers(self, buffers: Sequence[pa.Buffer | None]) -> None:
        for buffer in buffers:
            if buffer is not None and buffer.size:
                self.fetch(buffer.address - self.buffer.address, buffer.size)


def _read_metadata(file: _Sparse) -> bool:
    """Read the metadata of all messages; return False if one is compressed."""
    messages, at = pa.BufferReader(file.buffer), 0
    while at < file.nbytes:
        begins, nbytes = struct.unpack("<Ii", file.fetch(at, 8))
        if begins != _CONTINUES:
            raise ValueError(f"no message is at byte {at:,}")
        if not nbytes:
            break
        file.fetch(at + 8, nbytes)
        message = pa.ipc.read_message(messages)  # verifies the metadata; does not touch the body
        if message.type == "record batch" and _is_compressed(memoryview(message.metadata)):
            return False
        at = messages.tell()
    return True


def _is_compressed(metadata: memoryview) -> bool:
    # pyarrow does not tell. The metadata is a flatbuffer of tables; a position in it is relative to itself.
    (message,) = struct.unpack_from("<I", metadata)
    header = _field(metadata, message, _HEADER)
    (batch,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + batch, _COMPRESSION) != 0


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Return the position of a table's field; 0 if absent."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    entry, (nbytes,) = 4 + 2 * number, struct.unpack_from("<H", metadata, fields)
    (offset,) = struct.unpack_from("<H", metadata, fields + entry) if entry < nbytes else (0,)
    return table + offset if offset else 0


def _all_but_bytes(chunk: pa.Array) -> list[pa.Buffer | None]:
    if not pa.types.is_struct(chunk.type):
        return list(chunk.buffers()[:2])
    inner: Any = chunk.field("bytes")
    found = [chunk.buffers()[0], *inner.buffers()[:2]]
    if chunk.null_count or inner.null_count:  # the other fields may name a file
        for number, field in enumerate(chunk.type):
            found += chunk.field(number).buffers() if field.name != "bytes" else []
    return found
