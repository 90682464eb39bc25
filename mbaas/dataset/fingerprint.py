"""A hash of what a table of samples says, whatever way Arrow holds it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_DIGEST_BYTES = 16


def fingerprint_of(table: pa.Table, class_names: Iterable[str]) -> str:
    """32 hex digits that depend on the rows, their order and the class names, and on nothing else.

    How the table is cut in chunks and whether strings have 32- or 64-bit offsets makes no difference.
    Takes 8 bytes of memory for each row of the largest chunk.

    Args:
        table: columns uri (string), offset, length, label (int64), without nulls.
        class_names: name of each label.
    """
    parts = [_of_strings(table["uri"].chunks)]
    parts += [_of_integers(table[name].chunks) for name in ("offset", "length", "label")]
    parts.append(_of_strings([pa.array(list(class_names), pa.string())]))
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).hexdigest()


def _of_strings(chunks: Iterable[pa.Array]) -> bytes:
    """A digest of all bytes and one of all lengths: together they leave no doubt where a string ends."""
    text, lengths = blake2b(), blake2b()
    for chunk in chunks:
        offsets, data = _offsets_and_data(chunk)
        text.update(data[offsets[0] : offsets[-1]])
        lengths.update(np.diff(offsets).astype("<i8", copy=False).data)
    return text.digest() + lengths.digest()


def _of_integers(chunks: Iterable[pa.Array]) -> bytes:
    digest = blake2b()
    for chunk in chunks:
        digest.update(chunk.to_numpy().astype("<i8", copy=False).data)
    return digest.digest()


def _offsets_and_data(chunk: pa.Array) -> tuple[NDArray[Any], memoryview]:
    """Where each string of a chunk begins, and where the last ends (int[n + 1]), in its bytes."""
    _, offsets, data = chunk.buffers()
    if offsets is None or len(chunk) == 0:
        return np.zeros(1, np.int64), memoryview(b"")
    width = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
    bounds = np.frombuffer(offsets, width)[chunk.offset : chunk.offset + len(chunk) + 1]
    return bounds, memoryview(data if data is not None else b"")
