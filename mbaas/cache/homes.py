"""Homes: which node keeps a sample, and prepares it.

Weighted rendezvous hashing: every sample draws a number on every node, and its home is the node where it draws the
best. Shares are proportional to the nodes' weights; a node that comes takes samples from the others only, a node that
goes gives its own to the others only. Nothing is stored for a sample: a home is computed from its id.

Memory is bounded: a node takes the samples that draw best there until its bytes are full, the others go to the node
where they draw second best, and so on (rendezvous hashing with bounded loads). What a node takes is told by one number,
the worst draw that it still takes. So all memories together fill up before any sample is left out, and every node knows
what every other keeps.

The hash: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998). The weights: Schindelhauer
and Schomaker, "Weighted Distributed Hash Tables" (2005), logarithmic method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.order import Ids, uniforms

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""

BINS = 1 << 16
"""A node's limit is found to this resolution: at most 1/65,536 of its share stays empty."""

CHUNK = 1 << 18
"""Samples that are looked at together: bounds memory."""

LOOKED_AT = 1 << 21
"""Of larger datasets, limits are found from so many samples."""

MARGIN = 0.995
"""Of larger datasets, so much of the memory is planned for: the samples that were not looked at may be longer."""


@dataclass(frozen=True)
class Host:
    """A node that may be the home of samples.

    Attributes:
        node: its id.
        cache_bytes: for raw samples.
        weight: its speed of preparing, in any unit common to all; above 0.
    """

    node: str
    cache_bytes: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0 or self.cache_bytes < 0:
            raise ConfigError(f"weight must be above 0 and cache_bytes at least 0, got {self}")


@dataclass(frozen=True)
class Homes:
    """Where samples live; made by `settle`.

    Attributes:
        version: grows with every change of hosts.
        hosts: in the order of their ids; a home is an index into them.
        limits: of each host: the worst draw that it keeps, infinite if it keeps all that come.
    """

    version: int
    hosts: tuple[Host, ...]
    limits: tuple[float, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the hosts."""
        return tuple(host.node for host in self.hosts)

    def index(self, node: str) -> int:
        """Index of a host; -1 if the node is none."""
        return self.nodes.index(node) if node in self.nodes else -1

    def of(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Homes of samples: int64[n] -> int64[n], indices into ``hosts``."""
        return self.homes_and_keeps(sample_ids)[0]

    def kept(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], whether the sample's home keeps it in memory, once it was read."""
        return self.homes_and_keeps(sample_ids)[1]

    def homes_and_keeps(self, sample_ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """`of` and `kept` in one go. A sample that nobody keeps has the host where it draws best as home."""
        if len(self.hosts) == 1:
            return np.zeros(len(sample_ids), np.int64), np.ones(len(sample_ids), np.bool_)
        draws = _draws(self.hosts, sample_ids)
        taken = np.where(draws <= np.array(self.limits), draws, np.inf)
        kept = np.isfinite(taken.min(axis=1))
        return np.where(kept, taken.argmin(axis=1), draws.argmin(axis=1)), kept


def settle(hosts: Sequence[Host], *, num_samples: int, lengths: Lengths, version: int) -> Homes:
    """Find the limits by which every host's memory suffices.

    Args:
        hosts: at least one, each node once.
        num_samples: of the dataset.
        lengths: bytes of its samples.
        version: of the result.

    Raises:
        ConfigError: no hosts, or a node twice.
    """
    hosts = tuple(sorted(hosts, key=lambda host: host.node))
    if not hosts or len({host.node for host in hosts}) != len(hosts):
        raise ConfigError(f"homes need at least one host and each node once, got {[host.node for host in hosts]}")
    if len(hosts) == 1:  # nothing to choose: its cache admits what comes first
        return Homes(version, hosts, (np.inf,))
    step = -(-num_samples // LOOKED_AT)
    budgets = np.array([host.cache_bytes for host in hosts]) * (MARGIN if step > 1 else 1.0) / step
    homes = Homes(version, hosts, (np.inf,) * len(hosts))
    while (limits := _tightened(homes, budgets, num_samples, step, lengths)) != homes.limits:
        homes = Homes(version, hosts, limits)
    return homes


def _tightened(
    homes: Homes, budgets: NDArray[np.float64], num_samples: int, step: int, lengths: Lengths
) -> tuple[float, ...]:
    """Limits that are lower where a host would keep more than it has bytes for; unchanged where it fits."""
    used = _bytes_by_draw(homes, num_samples, step, lengths)
    limits = []
    for host, budget, bins, limit in zip(homes.hosts, budgets, used, homes.limits, strict=True):
        filled = np.cumsum(bins)
        if filled[-1] <= budget:
            limits.append(limit)
        else:
            limits.append(_draw_of_bin(int(np.searchsorted(filled, budget, side="right")), host.weight))
    return tuple(limits)


def _bytes_by_draw(homes: Homes, num_samples: int, step: int, lengths: Lengths) -> NDArray[np.float64]:
    """float64[hosts, BINS]: bytes that each host keeps, by how good their draws are, best first."""
    used = np.zeros((len(homes.hosts), BINS))
    for first in range(0, num_samples, CHUNK * step):
        ids = np.arange(first, min(first + CHUNK * step, num_samples), step, dtype=np.int64)
        home, kept = homes.homes_and_keeps(ids)
        size = lengths(ids)
        for index, host in enumerate(homes.hosts):
            mine = kept & (home == index)
            draws = _draws((host,), ids[mine])[:, 0]
            bins = np.minimum((-np.expm1(-draws * host.weight) * BINS).astype(np.int64), BINS - 1)
            used[index] += np.bincount(bins, weights=size[mine], minlength=BINS)
    return used


def _draw_of_bin(number: int, weight: float) -> float:
    """The draw at the lower edge of a bin: all better ones lie in the bins before."""
    return float(-np.log1p(-number / BINS) / weight) if number else -1.0


def _draws(hosts: Sequence[Host], sample_ids: Ids) -> NDArray[np.float64]:
    """float64[n, hosts], exponential with the host's weight as rate: the smallest of a row wins, and a host wins in
    proportion to its weight.
    """
    columns = [-np.log1p(-uniforms(_key(host.node), 0, sample_ids, stream=0, draws=1)[:, 0]) for host in hosts]
    return np.stack(columns, axis=1) / np.array([host.weight for host in hosts])


def _key(node: str) -> int:
    """A node's own seed, from its id."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=7).digest(), "big")
