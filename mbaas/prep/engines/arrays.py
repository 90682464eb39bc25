"""The cpu engine for samples other than images: audio, spectrograms, volumes and other arrays."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import size
from mbaas.prep.decoded import DecodedRow, DecodedRows, is_decoded, read_decoded
from mbaas.prep.engines import DEFAULT_MAX_BYTES, Batch, Engine, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.prep.part import Results, SampleFields, call_map
from mbaas.prep.sound import SoundDecoder
from mbaas.samples.order import generator, uniforms
from mbaas.transforms import DecodeAudio, Map, Pipeline
from mbaas.transforms.arrays import ArrayTransform, ArrayWindow, UnfitError
from mbaas.transforms.decoders import DecodeArray, is_numeric

Array = NDArray[Any]
_Decode = Callable[[memoryview, NDArray[np.float64]], tuple[Array, bool]]
"""(bytes, random numbers of the second transform) -> (decoded sample, True if the second transform is included)."""


@dataclass(frozen=True)
class ArrayPart:
    """The samples of a block while an engine prepares them.

    Attributes:
        chance: uniform random numbers of each transform of the pipeline, float64[n, draws].
    """

    batch: Batch
    chance: list[NDArray[np.float64]]
    fields: SampleFields
    results: Results


class ArrayEngine(Engine):
    """An engine that prepares audio and other arrays, ``threads`` samples at a time. See `mbaas.prep.engines.Engine`.

    Raises ConfigError if a package needed by the decoder is missing.
    """

    def __init__(self, pipeline: Pipeline, *, seed: int, threads: int = 1, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        super().__init__(pipeline, seed, threads)
        second = pipeline.transforms[1] if len(pipeline.transforms) > 1 else None
        of_sound = isinstance(pipeline.decoder, DecodeAudio)
        window = second if of_sound and isinstance(second, ArrayWindow) and len(second.sizes) == 1 else None
        self._decode, self._decode_whole = (_decoder_of(pipeline, max_bytes, each) for each in (window, None))

    def _first_sample(self, batch: Batch) -> Array:
        return self._sample(self._part(batch, np.empty(1)), 0)

    def prepare(self, batch: Batch, out: Array, keep: DecodedRows | None = None) -> Prepared:
        part = self._part(batch, out, keep)
        self._make(part, range(len(batch)))
        return part.results.finish(part.fields.columns())

    def _part(self, batch: Batch, out: Array, keep: DecodedRows | None = None) -> ArrayPart:
        # The random numbers of all samples at once; one by one would cost more than a transform.
        chance = [
            uniforms(self._seed, batch.epoch, batch.ids, substream=index, draws=transform.draws)
            for index, transform in enumerate(self._pipeline.transforms)
        ]
        results = Results(out, self._pipeline, keep)
        return ArrayPart(batch, chance, SampleFields(batch.known, self._pipeline), results)

    def _make(self, part: ArrayPart, rows: Sequence[int]) -> None:
        """Prepare samples of a block; those that cannot be prepared become bad."""

        def make(row: int) -> None:
            part.results.put(row, self._sample(part, row))

        self._threads.run(lambda number: part.results.attempt(rows[number], make, rows[number]), len(rows))

    def _sample(self, part: ArrayPart, row: int, count: int | None = None) -> Array:
        """Apply the first ``count`` transforms (None: all) to one sample, and keep its decoded form if it is wanted.

        Raises:
            UnfitError: it cannot be decoded, a transform does not accept it, or a Map's function fails.
        """
        encoded = memoryview(cast("Any", part.batch.encoded[row]))
        kept = DecodedRow(part.results.keep, row, len(self._kept_after))
        if is_decoded(encoded):
            array, done = self._opened(encoded)
        else:
            u = part.chance[1 if len(part.chance) > 1 else 0][row]
            array, is_window = self._decode(encoded, u)
            done = 2 if is_window else 1
            kept.put(done, array)
            if kept.applied < done and part.results.keep.wants(row):
                self._keep_whole(encoded, array, u, kept)
        for index, transform in [*enumerate(self._pipeline.transforms)][done:count]:
            if isinstance(transform, Map):
                # Copy, because the function may change its input, which may be a view of the sample's bytes.
                batch = part.batch
                rng = partial(generator, self._seed, batch.epoch, int(batch.ids[row]), substream=index)
                array = call_map(transform, self._pipeline.decoder.field, array.copy(), part.fields, row, rng)
            elif isinstance(transform, ArrayTransform):
                # Large values may overflow when squared; a warning would not name the sample.
                with np.errstate(over="ignore", invalid="ignore"):
                    array = transform.apply(array, part.chance[index][row], self._pipeline.forms[index - 1])
            kept.put(index + 1, array)
        return array

    def _opened(self, container: memoryview) -> tuple[Array, int]:
        decoded = read_decoded(container)
        if decoded.original is not None:
            raise UndecodableError("it is a decoded image, and this pipeline makes none")
        decoded.check_applied(len(self._kept_after))
        return decoded.values, decoded.applied

    def _keep_whole(self, encoded: memoryview, window: Array, u: NDArray[np.float64], kept: DecodedRow) -> None:
        # Not kept if damaged elsewhere: the sample is good while windows do not reach the damage. Nor if its window
        # differs from the one read alone, as in files where the decoder cannot seek exactly.
        transform = self._pipeline.transforms[1]
        assert isinstance(transform, ArrayWindow)
        try:
            whole, _ = self._decode_whole(encoded, u)
            same = np.array_equal(transform.apply(whole, u, self._pipeline.forms[0]), window)
        except UnfitError:
            same = False
        if same:
            kept.put(kept.applied, whole)
        else:
            kept.drop()


def _decoder_of(pipeline: Pipeline, max_bytes: int, window: ArrayWindow | None) -> _Decode:
    decoder = pipeline.decoder
    if isinstance(decoder, DecodeAudio):
        return SoundDecoder(decoder, max_bytes, window)
    assert isinstance(decoder, DecodeArray), decoder
    read = _ArrayReader(decoder, max_bytes)
    return lambda encoded, _: (read(encoded), False)


# ---- npy, npz and raw files ----

_MAGIC, _ZIP = b"\x93NUMPY", b"PK"


class _ArrayReader:
    """Reads arrays from files in the format of ``decode``, in native byte order. Thread-safe.

    Arrays over ``max_bytes`` are rejected by their header, before memory is allocated.
    """

    def __init__(self, decode: DecodeArray, max_bytes: int) -> None:
        self._of, self._max_bytes = decode, max_bytes

    def __call__(self, encoded: memoryview) -> Array:
        """Read one array, which may be a view of ``encoded``.

        Raises:
            UndecodableError: the file is damaged, too large, or does not match ``decode``.
        """
        array = {"npy": self._npy, "npz": self._npz, "raw": self._raw}[self._of.format](encoded)
        if self._of.dtype is not None and array.dtype != np.dtype(self._of.dtype):
            raise UndecodableError(f"its numbers are {array.dtype.name}, and must be {np.dtype(self._of.dtype).name}")
        if self._of.shape is not None:
            self._check_shape(array.shape)
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        wanted, longest = self._of.shape, self._of.longest
        assert wanted is not None
        if len(shape) != len(wanted) or any(n not in (None, m) for n, m in zip(wanted, shape, strict=True)):
            lengths = ", ".join("any" if n is None else str(n) for n in wanted)
            raise UndecodableError(f"it has the shape {list(shape)}, and must have [{lengths}]")
        differing = wanted.count(None)
        if longest is not None and math.prod(shape[:differing]) > longest:
            first = f"its first length is {shape[0]:,}"
            if differing > 1:
                first = f"it has the shape {list(shape)}, of whose first {differing} lengths the product is "
                first += f"{math.prod(shape[:differing]):,}"
            raise UndecodableError(f"{first}, over the limit of {longest:,} (longest)")

    def _npy(self, encoded: memoryview) -> Array:
        if bytes(encoded[: len(_MAGIC)]) != _MAGIC:
            raise UndecodableError(f"it is not an npy file: it starts with {bytes(encoded[:8])!r}")
        file = io.BytesIO(encoded[: 1 << 16])  # longer than any header; NumPy rejects headers above 10,000 bytes
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
        except Exception as error:  # NumPy parses the header as Python, which may raise anything
            raise UndecodableError(f"its npy header cannot be read: {str(error).partition(chr(10))[0]}") from error
        if any(length < 0 for length in shape):
            raise UndecodableError(f"its npy header has a shape that cannot be: {list(shape)}")
        if not is_numeric(dtype):
            raise UndecodableError(f"it holds {dtype}, and an array must be of numbers")
        # Like numpy.load, ignore bytes after the first array, such as another array or padding.
        start = file.tell()
        values = self._values(encoded[start : start + math.prod(shape) * dtype.itemsize], dtype, shape)
        return values.reshape(shape, order="F" if is_fortran else "C")

    def _npz(self, encoded: memoryview) -> Array:
        if bytes(encoded[: len(_ZIP)]) != _ZIP:
            raise UndecodableError(f"it is not an npz file: it starts with {bytes(encoded[:8])!r}")
        try:
            with zipfile.ZipFile(io.BytesIO(encoded)) as archive:
                member = self._member(archive)
                if member.file_size > self._max_bytes:
                    raise UndecodableError(
                        f"{member.filename!r} in it is {size(member.file_size)}, over the limit of "
                        f"{size(self._max_bytes)}"
                    )
                # Read only the claimed size: the member may decompress to more.
                with archive.open(member) as file:
                    content = file.read(member.file_size)
        except UndecodableError:
            raise
        except Exception as error:  # zipfile raises many types, such as ValueError for a negative offset
            raise UndecodableError(f"its zip archive is damaged: {error}") from error
        return self._npy(memoryview(content))

    def _member(self, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
        files = {info.filename: info for info in archive.infolist()}
        members = {name.removesuffix(".npy"): info for name, info in files.items()} | files
        there = ", ".join(repr(name.removesuffix(".npy")) for name in files) or "none"
        if self._of.key is None:
            if len(files) != 1:
                raise UndecodableError(f"it has the arrays {there}; name one with DecodeArray's key")
            return next(iter(files.values()))
        if self._of.key not in members:
            raise UndecodableError(f"it has no array {self._of.key!r}; it has {there}")
        return members[self._of.key]

    def _raw(self, encoded: memoryview) -> Array:
        assert self._of.dtype is not None
        assert self._of.shape is not None
        dtype = np.dtype(self._of.dtype)
        row = math.prod(n for n in self._of.shape if n is not None) * dtype.itemsize
        rows = len(encoded) // row
        shape = tuple(rows if n is None else n for n in self._of.shape)
        return self._values(encoded, dtype, shape).reshape(shape)

    def _values(self, content: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        if len(content) != nbytes:
            raise UndecodableError(
                f"it has {len(content):,} bytes of numbers, and {dtype.name} {list(shape)} takes {nbytes:,}"
            )
        if nbytes > self._max_bytes:
            raise UndecodableError(f"it is {size(nbytes)}, over the limit of {size(self._max_bytes)}")
        return np.frombuffer(content, dtype)
