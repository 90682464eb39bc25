"""Private memory for minibatches that is used again as soon as nothing refers to it.

A copy of a large minibatch is mostly spent on new memory: what is larger than 32 MiB comes from the system each time,
zeroed page by page, and goes back with the minibatch. 256 images of 224x224 are 38 MB. Copying them to memory that was
used before takes half the time.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LEAST_BYTES = 2**20
"""Smaller arrays are left to NumPy, whose allocator keeps such memory anyway."""

KEPT = 2
"""How many pieces wait to be used again: a trial has one minibatch in hand while it is given the next."""

SPARE = 8
"""A piece is larger by one part in this many than it was asked for, so that it also holds what is a bit larger."""


class RecycledMemory:
    """Hands out arrays whose memory others had before; for one thread, though any may let arrays go.

    An array is its holder's alone as long as it, a view of it, or a tensor that shares its memory is referred to.
    """

    def __init__(self) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=KEPT)  # what nobody refers to; the oldest are let go

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array, whatever is in it; C order, writable."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < LEAST_BYTES:
            return np.empty(shape, dtype)
        memory = self._taken()
        if memory is None or memory.nbytes < nbytes:
            memory = np.empty(nbytes + nbytes // SPARE, np.uint8)
        # An array of its own for each holder: NumPy's views all refer to it, and none to ``memory`` directly, because
        # there is a buffer between the two. So when it goes, nobody sees the memory any more.
        array = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array.view(dtype).reshape(shape)

    def _taken(self) -> NDArray[np.uint8] | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy, in C order."""
        own = self.empty(array.shape, array.dtype)
        np.copyto(own, array)
        return own
