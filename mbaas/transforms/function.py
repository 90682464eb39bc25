"""A user's own function as a transform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms.base import Transform
from mbaas.transforms.identity import digest_of, name_of, pickled

SampleFunction = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[Any]]


@dataclass(frozen=True)
class Map(Transform):
    """Apply ``fn`` to the sample: ``fn(image, rng) -> array``.

    ``image`` is uint8 [height, width, 3] and belongs to ``fn``, which may change it; ``rng`` is a
    ``numpy.random.Generator`` of this sample, epoch and place in the pipeline, the only randomness ``fn`` may
    use. The result may have any shape and dtype, but the same for all samples; image transforms after it need
    uint8 [height, width, 3]. Runs on the cpu engine.

    Args:
        fn: a function that pickles (by cloudpickle) and depends on nothing but its arguments.
    """

    fn: SampleFunction

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f"Map's fn must be a function fn(image, rng), got {self.fn!r}")
        # Tried here, where the user can see which line it was, and not when the first worker starts.
        try:
            pickled(self.fn)
        except Exception as error:
            message = f"Map's fn must pickle to reach the prep workers, but {name_of(self.fn)} does not: {error}"
            raise ConfigError(message) from error

    def __repr__(self) -> str:
        return f"Map({name_of(self.fn)})"

    def identity(self) -> str:
        """Name of the function, and a hash of its code, constants, defaults and closure.

        Stable between processes and runs of one Python version: bytecode differs between versions. Global
        names that the function reads are not followed: a changed helper function or module constant goes
        unnoticed.
        """
        return f"Map({name_of(self.fn)}, {digest_of(self.fn)})"
