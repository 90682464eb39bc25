"""The interface of random changes of whole minibatches. Importing `mbaas.transforms` would delay each trial's start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class BatchTransform(ABC):
    """A random change of each minibatch, for ``batch_fn`` of `mbaas.join` and `tune_integration.get_loader`."""

    @abstractmethod
    def apply(self, batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the changed minibatch, a function of ``batch`` and ``rng`` alone."""
