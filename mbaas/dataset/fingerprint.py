"""A hash of what a table of samples says, whatever way Arrow holds it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from mbaas.dataset.columns import integers, string_bounds

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
        offsets, data = string_bounds(chunk)
        text.update(data[offsets[0] : offsets[-1]])
        lengths.update(np.diff(offsets).astype("<i8", copy=False).data)
    return text.digest() + lengths.digest()


def _of_integers(chunks: Iterable[pa.Array]) -> bytes:
    digest = blake2b()
    for chunk in chunks:
        digest.update(integers(chunk).astype("<i8", copy=False).data)
    return digest.digest()
