"""Decoded samples as bytes: what a pipeline's prefix makes of a sample, in a container that caches keep like a file.

A container is a header of 128 bytes, the values in C order, and zeros up to a multiple of 64 bytes. So containers end
to end in memory that begins at a multiple of 64 have their values at multiples of 64, and are viewed where they lie.
For engines it is one more format of a file, of which some transforms are done already.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Collection
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.messages import EngineName
from mbaas.prep.header import Header, UndecodableError, check_pixels
from mbaas.transforms.base import Size
from mbaas.transforms.decoders import is_numeric

Array = NDArray[Any]

MAGIC = b"\x93mbaas\xff\n"
"""The first bytes of a container. No file of images, sound or arrays that there is a decoder for begins so."""

HEADER_BYTES = 128
"""Before the values."""

MOST_AXES = 8

_ALIGNED = 64  # bytes of a cache line, and of the widest vector instructions
_VERSION = 1
# Magic, version, transforms applied, axes, kind and size of a number, engine, height and width of the original image (0
# of what is none), and the lengths of the axes; a checksum of all that ends the header.
_HEADER = Struct("<8sHHBcBBII8Q")
_CHECKSUM = Struct("<I")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
_KINDS = (b"b", b"i", b"u", b"f", b"c")  # of numbers, by NumPy's letters
_ENGINES: tuple[EngineName, ...] = ("cpu", "dali")


class Decoded(NamedTuple):
    """A decoded sample.

    Attributes:
        values: what the first transforms of the pipeline made of it: read-only, in C order.
        applied: how many transforms that were, at least the decoder.
        original: (height, width) in pixels of the upright image as its file has it; None if it is no image.
        made_by: the engine that made it: another one would have made other values.
    """

    values: Array
    applied: int
    original: Size | None
    made_by: EngineName

    def check_applied(self, most: int) -> None:
        """Check that no more transforms made it than a pipeline begins with that may be done beforehand.

        Raises:
            UndecodableError: it is of another pipeline.
        """
        if self.applied > most:
            raise UndecodableError(
                f"it is a decoded sample after {self.applied} transforms, of which this pipeline begins with {most} "
                "that may be done beforehand"
            )

    def check_image(self, size: Size | None) -> None:
        """Check that it is an image of this size, uint8 [height, width, 3].

        Raises:
            UndecodableError: it is of another pipeline.
        """
        wanted = (*(size or ()), 3)
        if self.values.dtype != np.uint8 or self.values.shape != wanted:
            raise UndecodableError(
                f"it is a decoded sample, {self.values.dtype.name} {list(self.values.shape)}, but must be uint8 "
                f"{list(wanted)} after {self.applied} transforms"
            )


def is_decoded(data: memoryview) -> bool:
    """Whether these bytes claim to be a container."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def container_bytes(shape: Collection[int], dtype: np.dtype[Any]) -> int:
    """Return the size of the container of an array of this shape: a multiple of 64 bytes."""
    return HEADER_BYTES + -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def read_decoded(data: memoryview) -> Decoded:
    """Open a container: its values are viewed in ``data``, unless they lie at an address at which no number begins.

    Raises:
        UndecodableError: it is none, it is damaged, or another version of mbaas made it.
    """
    header = bytes(data[:HEADER_BYTES])
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise UndecodableError(f"it is no decoded sample: it starts with {header[:8]!r}")
    if _CHECKSUM.unpack_from(header, _CHECKED_BYTES)[0] != zlib.crc32(header[:_CHECKED_BYTES]):
        raise UndecodableError("damaged decoded sample: its header has the wrong checksum")
    _, version, applied, axes, kind, itemsize, engine, height, width, *lengths = _HEADER.unpack_from(header)
    if version != _VERSION:
        raise UndecodableError(f"it was decoded by another version of mbaas: format {version}, here {_VERSION}")
    shape, dtype = tuple(lengths[:axes]), _dtype(kind, itemsize)
    if dtype is None or axes > MOST_AXES or applied < 1 or engine >= len(_ENGINES):
        raise UndecodableError(
            f"damaged decoded sample: it claims {axes} axes of {kind!r}{itemsize} after {applied} transforms of engine "
            f"{engine}"
        )
    if len(data) != container_bytes(shape, dtype):
        raise UndecodableError(
            f"damaged decoded sample: {dtype.name} {list(shape)} takes {container_bytes(shape, dtype):,} bytes, and it "
            f"has {len(data):,}"
        )
    values: Array = np.frombuffer(data, dtype, math.prod(shape), HEADER_BYTES).reshape(shape)
    if not values.flags.aligned:
        values = values.copy()
    values.flags.writeable = False
    return Decoded(values, applied, (height, width) if height or width else None, _ENGINES[engine])


def image_header(decoded: Decoded, max_pixels: int) -> Header:
    """Return what `mbaas.prep.header.peek` says of an image, for one that is decoded, and check it in the same way.

    Raises:
        UndecodableError: it is no image, or its original is larger than ``max_pixels``.
    """
    if decoded.original is None:
        raise UndecodableError("it is a decoded sample, but not of an image")
    height, width = decoded.original
    check_pixels(height, width, max_pixels)
    return Header("decoded", height, width, channels=3, bits=8)


def _dtype(kind: bytes, itemsize: int) -> np.dtype[Any] | None:
    """Return the type of numbers that a header names, in the byte order of the machine; None if there is none."""
    if kind not in _KINDS:  # NumPy takes other letters for text that says more, and parses it
        return None
    try:
        dtype = np.dtype(f"{kind.decode()}{itemsize}")
    except TypeError:
        return None
    return dtype if is_numeric(dtype) else None


class KeptMemory:
    """Memory for the containers of a block, which is used again for the next one: fresh memory costs 0.1 ms in page
    faults for each 600 kB.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def first(self, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes, from an address on that is a multiple of 64; what was there before may be gone.

        Pages that nobody writes take no memory.
        """
        if len(self._buffer) < nbytes:
            whole = np.empty(nbytes + _ALIGNED, np.uint8)
            start = -whole.ctypes.data % _ALIGNED
            self._buffer = whole[start : start + nbytes]
        return self._buffer[:nbytes]


class _Place(NamedTuple):
    start: int
    nbytes: int


class KeptRows:
    """The decoded samples of those rows of a block that are to be kept, as an engine makes them. Threads may share it.

    Args:
        rows: of the block, whose decoded samples are wanted.
        most_bytes: of their containers together; rows for which there is no room any more are not kept.
        memory: for the containers, of nobody else until what `taken` returned is not needed any more; by default, new.

    Attributes:
        most_bytes: the same.
    """

    def __init__(self, rows: Collection[int], most_bytes: int, memory: KeptMemory | None = None) -> None:
        self.most_bytes = most_bytes
        self._wanted = {*rows}
        self._memory = (KeptMemory() if memory is None else memory).first(most_bytes)
        self._places: dict[int, _Place] = {}  # in ascending order of their starts
        self._end = 0  # of the last of them
        self._lock = threading.Lock()

    def wants(self, row: int) -> bool:
        """Whether a row is to be kept, as far as there is room; not any more if it turned out that it cannot be."""
        return row in self._wanted

    def room(
        self,
        row: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        applied: int,
        original: Size | None = None,
        made_by: EngineName = "cpu",
    ) -> Array | None:
        """Return memory in which the decoded sample of a row is to be written, in C order; or none, if it is not
        wanted, does not fit into the bytes that are left, or is no array of numbers of up to 8 axes.

        Args:
            row: of the block. If it has room already, that is given up.
            shape: of the decoded sample.
            dtype: of the decoded sample.
            applied: how many transforms of the pipeline made it.
            original: (height, width) in pixels of the upright image, as its file has it.
            made_by: the engine that makes it.
        """
        if row not in self._wanted or not is_numeric(dtype) or not dtype.isnative or len(shape) > MOST_AXES:
            return None
        nbytes = container_bytes(shape, dtype)
        with self._lock:
            self._forget(row)
            start = self._end
            if start + nbytes > len(self._memory):
                return None
            self._places[row], self._end = _Place(start, nbytes), start + nbytes
        container = self._memory[start : start + nbytes]
        lengths = (*shape, *(0,) * (MOST_AXES - len(shape)))
        height, width = original or (0, 0)
        container[:HEADER_BYTES] = 0
        _HEADER.pack_into(
            container.data,
            0,
            MAGIC,
            _VERSION,
            applied,
            len(shape),
            dtype.kind.encode(),
            dtype.itemsize,
            _ENGINES.index(made_by),
            height,
            width,
            *lengths,
        )
        _CHECKSUM.pack_into(container.data, _CHECKED_BYTES, zlib.crc32(container[:_CHECKED_BYTES].data))
        end = HEADER_BYTES + math.prod(shape) * dtype.itemsize
        container[end:] = 0
        return container[HEADER_BYTES:end].view(dtype).reshape(shape)

    def drop(self, row: int) -> None:
        """Keep nothing of a row: its decoding failed, it is bad for another reason, or it is not to be relied on."""
        with self._lock:
            self._wanted.discard(row)
            self._forget(row)

    def _forget(self, row: int) -> None:
        place = self._places.pop(row, None)
        if place is not None and place.start + place.nbytes == self._end:
            self._end = place.start

    def taken(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Return the containers that were made, when the engine is done with the block.

        Returns:
            The rows, int64[k], in any order; the length of each one's container, int64[k], in bytes; and the containers
            end to end, uint8[sum of the lengths], which is memory that the next block's go to.
        """
        with self._lock:
            end = 0
            for row, (start, nbytes) in self._places.items():
                if start != end:  # one before it was dropped
                    self._memory[end : end + nbytes] = self._memory[start : start + nbytes]
                    self._places[row] = _Place(end, nbytes)
                end += nbytes
            self._end = end
            rows = np.fromiter(self._places, np.int64, len(self._places))
            lengths = np.array([place.nbytes for place in self._places.values()], np.int64)
            return rows, lengths, self._memory[:end]


class KeptSample:
    """Where the decoded form of one sample goes.

    Args:
        keep: of its block.
        row: its row there.
        applied: how many transforms make what is kept.
        original: see `KeptRows.room`.
    """

    def __init__(self, keep: KeptRows, row: int, applied: int, original: Size | None = None) -> None:
        self.applied = applied
        self._keep, self._row, self._original = keep, row, original

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """See `KeptRows.room`."""
        return self._keep.room(self._row, shape, dtype, applied=self.applied, original=self._original)

    def put(self, values: Array) -> Array:
        """Copy a decoded sample there, and return a view that stays as it is; if there is no room, ``values``."""
        # Of a class of its own an array may be another thing than its numbers.
        room = self.room(values.shape, values.dtype) if type(values) is np.ndarray else None
        if room is None:
            return values
        np.copyto(room, values)
        return sealed(room)

    def drop(self) -> None:
        """See `KeptRows.drop`."""
        self._keep.drop(self._row)


def sealed(values: Array) -> Array:
    """Return a view of an array that cannot be written."""
    view = values.view()
    view.flags.writeable = False
    return view
