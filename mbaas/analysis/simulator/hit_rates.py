"""What share of each epoch one worker's cache serves: MinIO's against LRU's."""

from __future__ import annotations

from typing import Literal

import numpy as np

from mbaas.analysis.simulator.lru import Lru
from mbaas.analysis.simulator.orders import Orders
from mbaas.errors import ConfigError

CachePolicy = Literal["minio", "lru"]
POLICIES: tuple[CachePolicy, ...] = ("minio", "lru")


def hit_fractions(
    policy: CachePolicy, *, cached: float, epochs: int, samples: int = 100_000, seed: int = 0
) -> tuple[float, ...]:
    """Hits / samples of each epoch, the first of which finds the cache empty.

    MinIO keeps what it admitted, so it hits its own contents once an epoch, exactly. LRU is simulated, access by
    access; in a long run it comes to `lru_fraction`.

    Args:
        policy: "minio" or "lru".
        cached: share of the samples that the cache holds; it is rounded down to whole samples.
        epochs: number of epochs.
        samples: of the dataset, all of one size.
        seed: of the orders.

    Raises:
        ConfigError: an argument is out of range.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not 0 <= cached <= 1:
        raise ConfigError(f"cached must be a share from 0 to 1, got {cached}")
    for name, value in (("epochs", epochs), ("samples", samples)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    room = int(cached * samples + 1e-9)
    if policy == "minio":
        return (0.0, *[room / samples] * (epochs - 1))
    cache = Lru(capacity_bytes=room, sizes=np.ones(samples))
    orders = Orders(samples, seed=seed, kept_bytes=0)
    return tuple(float(np.count_nonzero(cache.read(orders(epoch))) / samples) for epoch in range(epochs))


def lru_fraction(cached: float) -> float:
    """What LRU hits in the long run where each epoch has an order of its own: x + (1 - x) ln(1 - x).

    A sample read at u of an epoch and at v of the next, both as shares, has 1 - u (1 - v) different samples between;
    it hits where u (1 - v) > 1 - x, and the product of two uniform numbers exceeds a with probability 1 - a + a ln a.
    """
    missing = 1 - cached
    return 1.0 if missing == 0 else float(1 - missing + missing * np.log(missing))
