"""C: how fast bytes that are cached come from memory."""

from __future__ import annotations

import time

import numpy as np

from mbaas.analysis.measuring.effort import Effort, repeated
from mbaas.analysis.quantity import Quantity

HELD_BYTES = 256 << 20
"""Much more than the caches of processors hold."""


def memory_rate(sample_bytes: int, effort: Effort, *, seed: int = 0) -> Quantity:
    """bytes/s of copying samples of this size from random places of a large buffer, by one thread."""
    held = np.ones(HELD_BYTES, np.uint8)
    size = min(max(1, sample_bytes), HELD_BYTES // 2)
    into = np.empty(size, np.uint8)
    starts = np.random.default_rng(seed).integers(0, HELD_BYTES - size, 4096).tolist()

    def rate() -> float:
        copied, began = 0, time.perf_counter()
        while time.perf_counter() - began < effort.window_s:
            for start in starts[: max(1, min(len(starts), (32 << 20) // size))]:
                np.copyto(into, held[start : start + size])
                copied += size
        return copied / (time.perf_counter() - began)

    return repeated(rate, effort, unit="bytes/s")
