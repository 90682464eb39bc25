"""MinIO: which samples the cache keeps.

Samples are admitted as they are first read until the byte budget is full, and never evicted. On fresh random
orders no policy does better: every sample comes once an epoch, so an epoch's hits can never exceed what lay
in the cache at its start, and MinIO reaches exactly that (Mohan et al., "Analyzing and Mitigating Data Stalls
in DNN Training", VLDB 2021).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError


class MinIO:
    """The byte budget of the kept samples: admit until full, never evict.

    Attributes:
        budget_bytes: the most that all admitted samples together may hold.
        used_bytes: what they hold; in [0, budget_bytes].
    """

    def __init__(self, budget_bytes: int) -> None:
        """
        Raises:
            ConfigError: the budget is negative.
        """
        if budget_bytes < 0:
            raise ConfigError(f"cache_bytes must be at least 0, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def admit(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Takes samples one after the other, each if it still fits, and charges them to the budget.

        An empty sample is never admitted: there is nothing to keep.

        Args:
            lengths: int64[n], bytes of each sample.

        Returns:
            bool[n], true where the sample was admitted.
        """
        admitted = self._fitting(lengths)
        self.used_bytes += int(lengths[admitted].sum())
        return admitted

    def give_back(self, nbytes: int) -> None:
        """Returns the bytes of samples that were admitted and then could not be read."""
        self.used_bytes -= nbytes

    def _fitting(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        fitting = (lengths > 0) & (lengths <= self.free_bytes)
        if int(lengths[fitting].sum()) > self.free_bytes:
            free = self.free_bytes
            for row in np.flatnonzero(fitting).tolist():
                fitting[row] = lengths[row] <= free
                free -= int(lengths[row]) if fitting[row] else 0
        return fitting
