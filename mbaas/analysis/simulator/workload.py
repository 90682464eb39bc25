"""What is trained: the dataset, and how it is swept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.order import check_seed

Sizes = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class DatasetShape:
    """How many samples there are, and how large.

    Attributes:
        samples: F.
        sample_bytes: mean size of a raw sample.
        sigma_bytes: standard deviation of a normal distribution of sizes.
        pixel_bytes: of a sample once prepared; None where it is as large as before. Only policies that move prepared
            samples between machines, or stage them as such, look at it.

    Raises:
        ConfigError: an attribute is out of range.
    """

    samples: int
    sample_bytes: float
    sigma_bytes: float = 0.0
    pixel_bytes: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.samples < 2**31:
            raise ConfigError(f"samples must be in [1, 2**31), got {self.samples}")
        if not self.sample_bytes > 0:
            raise ConfigError(f"sample_bytes must be above 0, got {self.sample_bytes}")
        if self.sigma_bytes < 0:
            raise ConfigError(f"sigma_bytes must be at least 0, got {self.sigma_bytes}")

    @property
    def nbytes(self) -> float:
        return self.samples * self.sample_bytes

    @property
    def staged_bytes(self) -> float:
        """Of a sample once prepared."""
        return self.sample_bytes if self.pixel_bytes is None else self.pixel_bytes

    def sizes(self, seed: int) -> Sizes:
        """Bytes of each sample, float32[F], the same for the same seed.

        Normal, floored at a hundredth of the mean, then scaled back to the mean: the floor alone would make a dataset
        of widely varying sizes heavier than it is.
        """
        if not self.sigma_bytes:
            return np.full(self.samples, self.sample_bytes, dtype=np.float32)
        drawn = np.random.default_rng(seed).standard_normal(self.samples, dtype=np.float32)
        drawn *= np.float32(self.sigma_bytes)
        drawn += np.float32(self.sample_bytes)
        np.maximum(drawn, np.float32(self.sample_bytes / 100), out=drawn)
        drawn *= np.float32(self.sample_bytes / drawn.mean(dtype=np.float64))
        return drawn


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data-parallel training, by one trial or several.

    Attributes:
        workers: N; each is a machine with an accelerator for each trial.
        batch: samples of a minibatch on one worker.
        epochs: E.
        trials: that train at the same time on the same workers and dataset, each on all N workers.
        seed: of sizes and of every epoch's order.

    Raises:
        ConfigError: an attribute is out of range.
    """

    workers: int = 1
    batch: int = 1
    epochs: int = 1
    trials: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("workers", "batch", "epochs", "trials"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
