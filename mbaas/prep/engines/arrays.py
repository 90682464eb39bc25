"""The cpu engine for samples other than images: audio, spectrograms, volumes and other arrays."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import size
from mbaas.errors import BadSampleError, ConfigError
from mbaas.prep.decoded import DecodedRow, DecodedRows, is_decoded, read_decoded
from mbaas.prep.engines import DEFAULT_MAX_BYTES, BadRow, Encoded, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.prep.process import SampleThreads
from mbaas.prep.sound import SoundDecoder
from mbaas.prep.user_code import SampleFields, call_map
from mbaas.samples.fields import Arrays, Column, Field, Packed
from mbaas.samples.order import generator, uniforms
from mbaas.transforms import DecodeAudio, Map, Pipeline
from mbaas.transforms.arrays import ArrayTransform, ArrayWindow, UnfitError
from mbaas.transforms.decoders import DecodeArray, is_numeric
from mbaas.wire.samples import EngineName

Array = NDArray[Any]
_Decode = Callable[[memoryview, NDArray[np.float64]], tuple[Array, bool]]
"""(bytes, random numbers of the second transform) -> (decoded sample, True if the second transform is included)."""


class ArrayEngine:
    """An engine that prepares audio and other arrays, ``threads`` samples at a time. See `mbaas.prep.engines.Engine`.

    Raises ConfigError if a package needed by the decoder is missing.
    """

    name: EngineName = "cpu"

    def __init__(self, pipeline: Pipeline, *, seed: int, threads: int = 1, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._pipeline = pipeline
        self._steps = ArraySteps(pipeline, seed=seed, max_bytes=max_bytes)
        self._threads = SampleThreads(threads)

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        try:
            sample = self._steps.sample(self._steps.part([encoded], np.zeros(1, np.int64), 0, known), 0)
        except (UndecodableError, UnfitError) as error:
            raise BadSampleError(uri, str(error)) from error
        last, name = self._pipeline.forms[-1], self._pipeline.decoder.made
        if not is_numeric(sample.dtype):
            raise ConfigError(f"samples are arrays of {sample.dtype.name}, and must be numbers that torch has")
        if not last.differing:
            return Field(name, sample.shape, sample.dtype.name)
        if sample.ndim < last.differing:
            first = "length" if last.differing == 1 else f"{last.differing} lengths"
            has = "a number without any" if not sample.ndim else f"{sample.dtype.name} {list(sample.shape)}"
            raise ConfigError(f"samples may differ in their first {first}, but the first one is {has}")
        assert last.longest is not None  # checked by the pipeline
        shape = (*(None,) * last.differing, *sample.shape[last.differing :])
        return Field(name, shape, sample.dtype.name, last.longest)

    def prepare(
        self,
        encoded: Sequence[Encoded],
        sample_ids: NDArray[np.int64],
        epoch: int,
        known: Arrays,
        out: Array,
        keep: DecodedRows | None = None,
    ) -> Prepared:
        part = self._steps.part(encoded, sample_ids, epoch, known)
        results = ArrayResults(out, self._pipeline.forms[-1].differing)

        def work(row: int) -> None:
            with results.judged(row, keep):
                results.put(row, self._steps.sample(part, row, keep))

        self._threads.run(work, len(encoded))
        return results.finish(part.fields.columns())

    def set_threads(self, threads: int) -> None:
        self.close()
        self._threads = SampleThreads(threads)

    def close(self) -> None:
        self._threads.close()


class ArrayResults:
    """The results of n samples. Threads may put different samples at the same time.

    Args:
        out: [n, *shape], memory for the results; see `Engine.prepare`.
        differing: number of leading axes whose lengths vary; they are one axis in ``out``, long enough for their
            largest product. 0 if all samples have the same shape.

    Attributes:
        bad: samples that could not be prepared so far, in any order.
    """

    def __init__(self, out: Array, differing: int) -> None:
        self.bad: list[BadRow] = []
        self._out, self._differing = out, differing
        self._shapes = np.zeros((len(out), differing), np.int64)

    @contextmanager
    def judged(self, row: int, keep: DecodedRows | None = None) -> Iterator[None]:
        """Record a sample as bad, and drop its decoded form, if it cannot be decoded, transformed or stored."""
        try:
            yield
        except (UndecodableError, UnfitError) as error:
            self.bad.append(BadRow(row, str(error)))
            if keep is not None:
                keep.drop(row)

    def put(self, row: int, sample: Array) -> None:
        """Copy a sample to its row; raise UndecodableError if it does not fit."""
        room = self._out[row, ...]  # `...` gives an array, even for a scalar
        into = _room_for(sample, room, self._differing) if self._differing else room
        if (sample.shape, sample.dtype) != (into.shape, into.dtype):
            got, wanted = (f"{each.dtype.name} {list(each.shape)}" for each in (sample, into))
            raise UndecodableError(
                f"it is prepared to {got}, but the samples of this feed are {wanted}; a RandomCrop or a CropOrPad in "
                "the pipeline gives all the same lengths"
            )
        np.copyto(into, sample)
        self._shapes[row] = into.shape[: self._differing]

    def finish(self, known: Arrays) -> Prepared:
        """Zero the rows of bad samples; return them in order, with the fields of the good samples out of ``known``."""
        bad = sorted(self.bad, key=lambda each: each.row)
        if bad:
            rows = [each.row for each in bad]
            self._out[rows] = 0
            good = np.setdiff1d(np.arange(len(self._out)), rows)
            known = {name: column[good] for name, column in known.items()}
        return Prepared(bad, known, self._made())

    def _made(self) -> Column:
        if not self._differing:
            return self._out
        return Packed.closed_up(self._out, self._shapes.prod(axis=1), self._shapes if self._differing > 1 else None)


def _room_for(sample: Array, row: Array, differing: int) -> Array:
    """Return the leading part of a row that a sample needs, in the sample's shape."""
    first = sample.shape[:differing]
    count = math.prod(first)
    if len(first) == differing and count <= len(row):
        return row[:count].reshape(*first, *row.shape[1:])
    must = f"and must have the {differing} lengths in which samples differ"
    if differing == 1 or len(first) == differing:
        of = "its first length" if differing == 1 else f"the product of its first {differing} lengths"
        must = f"and {of} must be at most {len(row):,}"
    raise UndecodableError(f"it is prepared to {sample.dtype.name} {list(sample.shape)}, {must}")


@dataclass(frozen=True)
class ArrayPart:
    """The samples of a block, before they are prepared.

    Attributes:
        encoded: bytes of the n samples.
        sample_ids: int64[n], their ids.
        epoch: seeds the random transforms.
        chance: uniform random numbers of each transform of the pipeline, float64[n, draws].
        fields: the samples' fields, which Maps may change.
    """

    encoded: Sequence[Encoded]
    sample_ids: NDArray[np.int64]
    epoch: int
    chance: list[NDArray[np.float64]]
    fields: SampleFields


class ArraySteps:
    """Applies the first ``count`` transforms of a pipeline (None: all) to one sample at a time. Thread-safe.

    Raises ConfigError if a package needed by the decoder is missing.
    """

    def __init__(self, pipeline: Pipeline, *, seed: int, max_bytes: int, count: int | None = None) -> None:
        self._pipeline, self._seed = pipeline, seed
        self._stages = list(enumerate(pipeline.transforms))[:count]
        window = self._stages[1][1] if len(self._stages) > 1 else None
        of_sound = isinstance(pipeline.decoder, DecodeAudio)
        if not (of_sound and isinstance(window, ArrayWindow) and len(window.sizes) == 1):
            window = None
        self._decode, self._decode_whole = (_decoder_of(pipeline, max_bytes, each) for each in (window, None))
        # These steps may end before the pipeline's prefix does.
        self._kept = min(pipeline.prefix, len(self._stages))

    def part(self, encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, known: Arrays) -> ArrayPart:
        """Draw the random numbers of all samples at once; one by one would cost more than a transform."""
        chance = [
            uniforms(self._seed, epoch, sample_ids, substream=index, draws=transform.draws)
            for index, transform in enumerate(self._pipeline.transforms)
        ]
        return ArrayPart(encoded, sample_ids, epoch, chance, SampleFields(known, self._pipeline))

    def sample(self, part: ArrayPart, row: int, keep: DecodedRows | None = None) -> Array:
        """Prepare one sample, and keep its decoded form if ``keep`` wants it.

        Raises:
            UndecodableError: it cannot be decoded, or a Map's function fails.
            UnfitError: a transform does not accept it.
        """
        encoded = memoryview(cast("Any", part.encoded[row]))
        if is_decoded(encoded):
            return self._rest(part, row, *self._opened(encoded), None)
        kept = DecodedRow(keep, row, self._kept) if keep is not None and keep.wants(row) else None
        u = part.chance[1 if len(part.chance) > 1 else 0][row]
        array, is_window = self._decode(encoded, u)
        done = 2 if is_window else 1
        if kept is not None and self._kept == done:
            kept.put(array)
        elif kept is not None and self._kept < done:
            self._keep_whole(encoded, array, u, kept)
        return self._rest(part, row, array, done, kept)

    def _opened(self, container: memoryview) -> tuple[Array, int]:
        decoded = read_decoded(container)
        if decoded.original is not None:
            raise UndecodableError("it is a decoded image, and this pipeline makes none")
        decoded.check_applied(self._kept)
        return decoded.values, decoded.applied

    def _keep_whole(self, encoded: memoryview, window: Array, u: NDArray[np.float64], kept: DecodedRow) -> None:
        # Not kept if damaged elsewhere: the sample is good while windows do not reach the damage. Nor if its window
        # differs from the one read alone, as in files where the decoder cannot seek exactly.
        transform = self._pipeline.transforms[1]
        assert isinstance(transform, ArrayWindow)
        try:
            whole, _ = self._decode_whole(encoded, u)
            same = np.array_equal(transform.apply(whole, u, self._pipeline.forms[0]), window)
        except (UndecodableError, UnfitError):
            same = False
        if same:
            kept.put(whole)
        else:
            kept.drop()

    def _rest(self, part: ArrayPart, row: int, array: Array, done: int, kept: DecodedRow | None) -> Array:
        for index, transform in self._stages[done:]:
            if isinstance(transform, Map):
                # Copy, because the function may change its input, which may be a view of the sample's bytes.
                rng = partial(generator, self._seed, part.epoch, int(part.sample_ids[row]), substream=index)
                array = call_map(transform, self._pipeline.decoder.made, array.copy(), part.fields, row, rng)
            elif isinstance(transform, ArrayTransform):
                # Large values may overflow when squared; a warning would not name the sample.
                with np.errstate(over="ignore", invalid="ignore"):
                    array = transform.apply(array, part.chance[index][row], self._pipeline.forms[index - 1])
            if kept is not None and self._kept == index + 1:
                kept.put(array)
        return array


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
            raise UndecodableError(f"it is no npy file: it starts with {bytes(encoded[:8])!r}")
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
            raise UndecodableError(f"it is no npz file: it starts with {bytes(encoded[:8])!r}")
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
