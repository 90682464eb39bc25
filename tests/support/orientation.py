"""Images as stored by cameras that were not held upright."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def oriented(upright: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return the stored array that EXIF ``orientation`` turns into ``upright``."""
    turns: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    return np.ascontiguousarray(turns[orientation](upright))
