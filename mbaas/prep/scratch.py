"""Memory that is used again and again, so that no sample pays for fresh pages."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray


class Scratch:
    """Named uint8 buffers that grow to what was asked for; one per thread.

    A fresh array of some hundred kilobytes costs 0.1 ms in page faults, a tenth of what decoding a photograph
    costs.
    """

    def __init__(self, keep_bytes: int = 64 << 20) -> None:
        """Buffers up to ``keep_bytes`` are kept, larger ones are made anew each time."""
        self._keep_bytes = keep_bytes
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(self, slot: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An uninitialised uint8 array; the one that ``slot`` gave before loses its content."""
        size = prod(shape)
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.size < size:
            buffer = np.empty(size, np.uint8)
            if size <= self._keep_bytes:
                self._buffers[slot] = buffer
        return buffer[:size].reshape(shape)
