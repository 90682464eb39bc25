"""Decoded samples: their containers, memory for them, and their way to a node's cache.

A decoded sample is the output of a pipeline's prefix. Its container is a header of 128 bytes, the values in C order,
and zeros up to a multiple of 64 bytes. So containers end to end in memory aligned to 64 bytes have aligned values,
which are viewed in place. Caches store a container like a file. For engines, it is one more file format, with some
transforms already applied.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mbaas.base import units
from mbaas.prep.header import Header, UndecodableError, check_pixels
from mbaas.samples.placement import ENCODED, PartRequest
from mbaas.transforms.base import Size
from mbaas.transforms.decoders import is_numeric
from mbaas.wire.samples import EngineName

if TYPE_CHECKING:  # only prep workers need the cache and Ray
    from mbaas.cache.reader import CacheReader

Array = NDArray[Any]

MAGIC = b"\x93mbaas\xff\n"
"""First bytes of a container; no image, audio or array format with a decoder starts with them."""

HEADER_BYTES = 128
"""Size of the header, which precedes the values."""

MOST_AXES = 8

_ALIGNED = 64  # cache line, and the widest vector instructions
_VERSION = 1
# Magic, version, transforms applied, axes, kind and size of a number, engine, height and width of the original image,
# lengths of the axes. Height and width are 0 if the sample is not an image. The header ends with a checksum.
_HEADER = Struct("<8sHHBcBBII8Q")
_CHECKSUM = Struct("<I")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
_ENGINES: tuple[EngineName, ...] = ("cpu", "dali")


PIECE_BYTES = 64 << 20
"""Approximate bytes per hand-in. They occupy the object store a second time until the cache has copied them."""

COPIED_S = 10.0
"""Timeout for the cache to copy the previous piece. After that, no more samples of the part are handed in."""

SLACK = 2
"""Memory reserved for a piece, as a multiple of the expected bytes. Untouched memory costs nothing."""

_log = logging.getLogger(__name__)


class Decoded(NamedTuple):
    """A decoded sample.

    Attributes:
        values: output of the first transforms of the pipeline, read-only, in C order.
        applied: number of transforms applied, at least 1 (the decoder).
        original: (height, width) in pixels of the file's upright image; None if the sample is not an image.
        made_by: the engine that decoded it; another engine's values may differ.
    """

    values: Array
    applied: int
    original: Size | None
    made_by: EngineName

    def check_applied(self, most: int) -> None:
        """Raise UndecodableError if more than ``most`` transforms (the deterministic prefix) were applied."""
        if self.applied > most:
            raise UndecodableError(
                f"it is a decoded sample after {self.applied} transforms, of which this pipeline begins with {most} "
                "that may be done beforehand"
            )

    def check_image(self, size: Size | None) -> None:
        """Raise UndecodableError unless the sample is an image of this size, uint8 [height, width, 3]."""
        wanted = (*(size or ()), 3)
        if self.values.dtype != np.uint8 or self.values.shape != wanted:
            raise UndecodableError(
                f"it is a decoded sample, {self.values.dtype.name} {list(self.values.shape)}, but must be uint8 "
                f"{list(wanted)} after {self.applied} transforms"
            )


def is_decoded(data: memoryview) -> bool:
    """Return whether the bytes start like a container."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def container_bytes(shape: Collection[int], dtype: np.dtype[Any]) -> int:
    """Return the container size for an array of this shape: a multiple of 64 bytes."""
    return HEADER_BYTES + -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def read_decoded(data: memoryview) -> Decoded:
    """Open a container. Its values are a view of ``data``, or a copy if ``data`` is misaligned.

    Raises:
        UndecodableError: not a container, damaged, or written by another version of mbaas.
    """
    header = bytes(data[:HEADER_BYTES])
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise UndecodableError(f"it is not a decoded sample: it starts with {header[:8]!r}")
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
    """Return the header of a decoded image, with the same checks as `mbaas.prep.header.peek`.

    Raises:
        UndecodableError: not an image, or its original is larger than ``max_pixels``.
    """
    if decoded.original is None:
        raise UndecodableError("it is a decoded sample, but not of an image")
    height, width = decoded.original
    check_pixels(height, width, max_pixels)
    return Header("decoded", height, width, channels=3, bits=8)


@functools.cache
def _dtype(kind: bytes, itemsize: int) -> np.dtype[Any] | None:
    """Return the numeric dtype named by a header, in native byte order; None if it is invalid."""
    dtypes = (np.dtype(code) for code in np.typecodes["All"] if is_numeric(np.dtype(code)))
    return next((each for each in dtypes if (each.kind.encode(), each.itemsize) == (kind, itemsize)), None)


class DecodedBuffer:
    """Buffer for a block's containers, reused because fresh memory costs 0.1 ms of page faults per 600 kB."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def first(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ``nbytes`` bytes, aligned to 64 bytes, with any content. Untouched pages take no memory."""
        if len(self._buffer) < nbytes:
            whole = np.empty(nbytes + _ALIGNED, np.uint8)
            start = -whole.ctypes.data % _ALIGNED
            self._buffer = whole[start : start + nbytes]
        return self._buffer[:nbytes]


class DecodedRows:
    """Decoded samples of selected rows of a block, collected while an engine prepares the block. Thread-safe.

    Args:
        most_bytes: capacity for all containers; rows that no longer fit are not kept.
        memory: buffer for exclusive use until the result of `taken` is no longer needed; default: new memory.
        applied: number of transforms after which a sample is kept; default: as many as the engine can keep.
    """

    def __init__(
        self, rows: Collection[int], most_bytes: int, memory: DecodedBuffer | None = None, applied: int | None = None
    ) -> None:
        self.most_bytes, self.applied = most_bytes, applied
        self._wanted = {*rows}
        self._memory = (DecodedBuffer() if memory is None else memory).first(most_bytes)
        self._places: dict[int, tuple[int, int]] = {}  # start and bytes, in ascending order of their starts
        self._end = 0  # of the last container
        self._lock = threading.Lock()

    def wants(self, row: int) -> bool:
        """Return whether a row is wanted; False after `drop`."""
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
        """Return memory for the decoded sample of a row, replacing any earlier one, to be written in C order.

        None if the row is not wanted or does not fit, or if it is not a native numeric array of at most 8 axes.

        Args:
            row, shape, dtype: row of the block, and form of its decoded sample.
            applied, made_by: number of transforms applied to it, and the engine.
            original: (height, width) in pixels of the file's upright image.
        """
        if row not in self._wanted or not is_numeric(dtype) or not dtype.isnative or len(shape) > MOST_AXES:
            return None
        nbytes = container_bytes(shape, dtype)
        with self._lock:
            self._forget(row)
            start = self._end
            if start + nbytes > len(self._memory):
                return None
            self._places[row], self._end = (start, nbytes), start + nbytes
        container = self._memory[start : start + nbytes]
        axes = (len(shape), dtype.kind.encode(), dtype.itemsize)
        lengths = (*shape, *(0,) * (MOST_AXES - len(shape)))
        header = (MAGIC, _VERSION, applied, *axes, _ENGINES.index(made_by), *(original or (0, 0)), *lengths)
        container[:HEADER_BYTES] = 0
        _HEADER.pack_into(container.data, 0, *header)
        _CHECKSUM.pack_into(container.data, _CHECKED_BYTES, zlib.crc32(container[:_CHECKED_BYTES].data))
        end = HEADER_BYTES + math.prod(shape) * dtype.itemsize
        container[end:] = 0
        return container[HEADER_BYTES:end].view(dtype).reshape(shape)

    def drop(self, row: int) -> None:
        """Stop keeping a row: its decoding failed, it is bad for another reason, or it is unreliable."""
        with self._lock:
            self._wanted.discard(row)
            self._forget(row)

    def _forget(self, row: int) -> None:
        start, nbytes = self._places.pop(row, (0, 0))
        if nbytes and start + nbytes == self._end:
            self._end = start

    def taken(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Return the finished containers, after the engine has prepared the block.

        Returns:
            Rows, int64[k], in any order; bytes of each container, int64[k]; and the containers end to end, uint8[sum of
            bytes], in memory that the next block overwrites.
        """
        with self._lock:
            end = 0
            for row, (start, nbytes) in self._places.items():
                if start != end:  # an earlier one was dropped: close the gap
                    self._memory[end : end + nbytes] = self._memory[start : start + nbytes]
                    self._places[row] = end, nbytes
                end += nbytes
            self._end = end
            rows = np.fromiter(self._places, np.int64, len(self._places))
            lengths = np.array([nbytes for _, nbytes in self._places.values()], np.int64)
            return rows, lengths, self._memory[:end]


class DecodedRow:
    """Destination of a sample's decoded form in ``keep``, after ``applied`` transforms unless that names a number."""

    def __init__(
        self, keep: DecodedRows, row: int, applied: int, original: Size | None = None, made_by: EngineName = "cpu"
    ) -> None:
        self.applied = applied if keep.applied is None else keep.applied
        self._keep, self._row, self._original, self._made_by = keep, row, original, made_by

    def room(self, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> Array | None:
        """See `DecodedRows.room`."""
        return self._keep.room(
            self._row, shape, np.dtype(dtype), applied=self.applied, original=self._original, made_by=self._made_by
        )

    def put(self, applied: int, values: Array) -> Array:
        """Keep ``values`` if they are the decoded form; return a read-only view, or ``values`` if they are not kept."""
        # An array subclass may carry more than its numbers.
        room = self.room(values.shape, values.dtype) if applied == self.applied and type(values) is np.ndarray else None
        if room is None:
            return values
        np.copyto(room, values)
        return sealed(room)

    def drop(self) -> None:
        self._keep.drop(self._row)


def sealed(values: Array) -> Array:
    view = values.view()
    view.flags.writeable = False
    return view


def handed_in(
    reader: CacheReader | None,
    request: PartRequest,
    rows: Sequence[int],
    asked_for: Mapping[int, int],
    nbytes: int,
    memory: DecodedBuffer,
    *,
    form: int = ENCODED,
    applied: int | None = None,
) -> Iterator[tuple[slice, DecodedRows]]:
    """Yield slices of the ``rows`` of a part, each with the `DecodedRows` for its decoded samples.

    A piece's decoded samples are handed in to the node's cache when the next piece is requested.

    Args:
        reader: reader of the node's cache; may be None if no sample is requested.
        asked_for: row of the part whose decoded sample the cache requests -> id of the stored sample.
        form, applied: the requested form, and the number of transforms after which samples have it.
    """
    import ray

    wanted = [index for index, row in enumerate(rows) if row in asked_for]
    sample_bytes = max(1, nbytes) / max(1, len(asked_for))
    starts = [0, *wanted[(step := max(1, int(PIECE_BYTES // sample_bytes))) :: step]]
    before: Any = None  # the hand-in that the cache is copying
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        asked = {index - start: asked_for[rows[index]] for index in wanted if start <= index < end}
        keep = DecodedRows(asked, int(SLACK * len(asked) * sample_bytes), memory, applied)
        yield slice(start, end), keep
        if not asked_for:
            return
        if before is not None and not ray.wait([before], timeout=COPIED_S)[0]:
            waited = units.seconds(COPIED_S)
            _log.warning("the cache has not copied decoded samples within %s; it gets no more of this part", waited)
            if end < len(rows):
                yield slice(end, len(rows)), DecodedRows((), 0)
            return
        assert reader is not None, "rows were not requested"
        kept, lengths, packed = keep.taken()
        ids = np.array([asked[row] for row in kept.tolist()], np.int64)
        # Samples that did not fit are requested again later, unless they need more than all the remaining memory.
        had_room = len(packed) <= keep.most_bytes / 2
        unfit = [i for row, i in asked.items() if row not in kept and (had_room or not keep.wants(row))]
        before = reader.hand_in(request, form, ids, lengths, packed, unfit, is_last=end == len(rows))
