"""Reads arrays from npy, npz and raw files. Sizes in headers are checked before memory is allocated."""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import size
from mbaas.prep.header import UndecodableError
from mbaas.transforms import DecodeArray
from mbaas.transforms.decoders import is_numeric

Array = NDArray[Any]

_MAGIC, _ZIP = b"\x93NUMPY", b"PK"


class ArrayReader:
    """Reads arrays from files in the format of ``decode``, in native byte order. Thread-safe.

    Arrays over ``max_bytes`` are rejected by their header.
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
