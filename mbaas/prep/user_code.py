"""Calls a user's function for one sample: whatever it does wrong is that sample's affair, not the block's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.prep.header import UndecodableError
from mbaas.transforms import Map
from mbaas.transforms.function import name_of


def call_map(transform: Map, sample: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return what a Map's function makes of a sample, which it may keep and change.

    Raises:
        UndecodableError: it raised something, or returned no array.
    """
    try:
        result = transform.fn(sample, rng)
    except Exception as error:  # a user's code may raise anything
        raise UndecodableError(f"{name_of(transform.fn)} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, np.ndarray):
        raise UndecodableError(f"{transform!r} must return a NumPy array, got {type(result).__name__}")
    return result
