"""NumPy views of Arrow arrays, zero-copy.

`pyarrow.Array.to_numpy` would do for integers, but its first call imports pandas where that is installed:
about a second, in each process that uses a dataset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def integers(chunk: pa.Array) -> NDArray[np.int64]:
    """The values of an int64 array without nulls: int64[n], read-only."""
    _, data = chunk.buffers()
    return _view(data, np.int64, chunk.offset, len(chunk))


def string_bounds(chunk: pa.Array) -> tuple[NDArray[Any], memoryview]:
    """The strings of a string or large_string array without nulls.

    Returns:
        int[n + 1] and bytes: string i lies in bytes [bounds[i], bounds[i + 1]).
    """
    _, offsets, data = chunk.buffers()
    width = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
    bounds = _view(offsets, width, chunk.offset, len(chunk) + 1) if len(chunk) else np.zeros(1, width)
    return bounds, memoryview(data or b"")


def _view(data: pa.Buffer | None, dtype: Any, start: int, count: int) -> NDArray[Any]:
    return np.frombuffer(data or b"", dtype)[start : start + count]
