"""Data shared by all policies of a simulation: sizes, orders, assignment of samples, and counts of bytes by tier."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.simulator.model import Floats, Ints, Load, Tiers
from mbaas.analysis.simulator.system import Sizes, System
from mbaas.model.tiers import StorageClass
from mbaas.order import SampleOrder, Shuffle

Samples = NDArray[np.int32]

KEPT_BYTES = 1 << 30
"""Memory for cached orders: 209 of ImageNet-1k, 18 of ImageNet-22k."""

_PIECE = 1 << 20
"""Positions of an order that are computed together, to keep temporary 64-bit arrays small."""


class Orders:
    """Order of the samples in each epoch, by mbaas's own keyed permutation.

    Recent orders are cached, up to ``kept_bytes`` of memory; at least one is cached.
    """

    def __init__(self, samples: int, *, seed: int, kept_bytes: int = KEPT_BYTES) -> None:
        self.samples = samples
        self.seed = seed
        self._order = SampleOrder(num_samples=samples, seed=seed, block_samples=1)
        self._kept: OrderedDict[int, Samples] = OrderedDict()
        self._room = max(kept_bytes // (4 * samples), 1)

    def __call__(self, epoch: int) -> Samples:
        """Return the sample ids in the order of ``epoch``: int32[F], read-only."""
        if epoch not in self._kept:
            while len(self._kept) >= self._room:
                self._kept.popitem(last=False)
            self._kept[epoch] = self._made(epoch)
        self._kept.move_to_end(epoch)
        return self._kept[epoch]

    def _made(self, epoch: int) -> Samples:
        order = np.empty(self.samples, dtype=np.int32)
        for start in range(0, self.samples, _PIECE):
            stop = min(start + _PIECE, self.samples)
            order[start:stop] = self._order.samples_at(Shuffle(epoch), start, stop)
        order.flags.writeable = False
        return order


Codes = NDArray[np.int8]
"""Numbers of storage classes (`NOWHERE` for none), or of tiers."""

Owners = NDArray[np.uint16]

NOWHERE = np.int8(-1)


@dataclass(frozen=True)
class Traffic:
    """Bytes that the workers read for the steps of one epoch.

    Attributes:
        nbytes: raw bytes by step, reading worker and tier: float64[H, N, tiers].
        samples: samples by tier, int64[tiers]; their sum is F.
        decoded: the part of ``nbytes`` whose samples are cached decoded; None for none.
    """

    nbytes: Floats
    samples: Ints
    decoded: Floats | None = None


class World:
    """A system with its sizes and orders.

    Sequences of samples are flat: step after step, and within a step worker by worker in turn. Position q belongs to
    step q // (B N) and worker q % N, as in a distributed sampler. The last step is padded with sample F, which has no
    bytes.
    """

    def __init__(self, system: System, *, orders: Orders | None = None) -> None:
        self.system = system
        training, dataset = system.training, system.dataset
        self.workers, self.batch, self.steps = training.workers, training.batch, system.steps
        self.epochs = range(training.epochs)
        self.samples = dataset.samples
        self.orders = orders if orders is not None else Orders(dataset.samples, seed=training.seed)
        self.tiers = Tiers(system.machine, readers=training.workers * system.machine.staging.threads)
        self._dealt: tuple[int, Samples] | None = None

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of each sample, and 0 for the padding sample: float32[F + 1]."""
        return np.append(self.system.dataset.sizes(self.system.training.seed), np.float32(0))

    @property
    def classes(self) -> tuple[StorageClass, ...]:
        """Storage classes of each worker."""
        return self.system.machine.classes

    @cached_property
    def load(self) -> Load | None:
        """CPU demand of steps on each machine; None if there are enough cores."""
        system = self.system
        if system.machine.cores is None:
            return None
        return Load(
            cores=system.machine.cores,
            sample_bytes=system.dataset.sample_bytes,
            workers=self.workers,
            trials=system.training.trials,
        )

    def dealt(self, epoch: int) -> Samples:
        """Return the samples of an epoch in the order of a distributed sampler: int32[H B N]."""
        # Policies run epoch by epoch, so only the last one is requested again.
        if self._dealt is None or self._dealt[0] != epoch:
            # Sample F has no bytes, so the last step needs no special case.
            full = np.full(self.steps * self.batch * self.workers, self.samples, dtype=np.int32)
            full[: self.samples] = self.orders(epoch)
            self._dealt = (epoch, full)
        return self._dealt[1]

    def readers(self, epoch: int) -> Owners:
        """Return the worker to which a distributed sampler assigns each sample: uint16[F + 1]."""
        readers = np.zeros(self.samples + 1, dtype=np.uint16)
        readers[self.dealt(epoch)] = np.resize(np.arange(self.workers, dtype=np.uint16), len(self.dealt(epoch)))
        return readers

    @cached_property
    def homes(self) -> Owners:
        """Home of each sample, even and independent of the order: uint16[F + 1]."""
        # In turn instead of hashed as in a feed: orders are random already, so only even shares matter.
        return np.resize(np.arange(self.workers, dtype=np.uint16), self.samples + 1)

    @cached_property
    def turn(self) -> Owners:
        """Worker of each position: uint16[H B N]."""
        return np.resize(np.arange(self.workers, dtype=np.uint16), self.steps * self.batch * self.workers)

    def by_home(self, epoch: int) -> Samples:
        """Return an epoch in which each worker takes the samples of its home, in order: int32[H B N]."""
        order = self.orders(epoch)
        homes = self.homes[order]
        grouped = order[np.argsort(homes, kind="stable")]  # stable, so that each home keeps the epoch's order
        counts = np.bincount(homes, minlength=self.workers)
        table = np.full((self.steps * self.batch, self.workers), self.samples, dtype=np.int32)
        for worker, (start, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
            table[:count, worker] = grouped[start : start + count]
        return table.reshape(-1)

    def admitted(self, sizes: NDArray[Any], classes: Sequence[StorageClass], *, used_bytes: float = 0.0) -> Codes:
        """Return the class of each sample if samples are admitted in order, filling the fastest class first: int8[n].

        ``used_bytes`` are in use already.
        """
        # In double precision: a sum of millions of float32 sizes would be off by whole samples.
        ends = used_bytes + np.cumsum(sizes, dtype=np.float64)
        cuts = np.searchsorted(ends, np.cumsum([each.capacity_bytes for each in classes]), side="right")
        codes = np.full(len(sizes), NOWHERE, dtype=np.int8)
        for number in range(len(classes) - 1, -1, -1):  # from the slowest class: each faster one overwrites its part
            codes[: cuts[number]] = number
        return codes

    def own_tiers(self, held: Codes) -> Codes:
        """Return the tiers to read from, for samples in a worker's own classes (`NOWHERE`: the PFS)."""
        return self._fastest[np.where(held < 0, np.int8(self.tiers.pfs), held)]

    def shared_tiers(self, held: Codes, local: NDArray[np.bool_]) -> Codes:
        """Return the tiers to read from, for samples in one worker's class each; ``local`` if that worker reads."""
        elsewhere = np.where(local, held, held + np.int8(self.tiers.remote))
        return self._fastest[np.where(held < 0, np.int8(self.tiers.pfs), elsewhere)]

    def traffic(
        self,
        samples: Samples,
        tiers: Codes,
        *,
        workers: Owners | None = None,
        decoded: NDArray[np.bool_] | None = None,
    ) -> Traffic:
        """Count bytes by step, worker and tier.

        Args:
            samples: int32[H B N], step after step.
            tiers: tier that each sample is read from.
            workers: worker that reads each sample; None for worker q % N at position q.
            decoded: bool[H B N], whether the sample is cached decoded.
        """
        # One number for each (step, worker, tier), so that a single bincount adds up all bytes.
        count = self.tiers.count
        cells = self._cells if workers is None else self._cells_of(workers)
        nbytes = self._by_cell(cells + tiers, self.sizes[samples])
        numbers = np.bincount(tiers[samples < self.samples], minlength=count)
        return Traffic(
            nbytes, numbers, None if decoded is None else self._by_cell(cells + tiers, self.sizes[samples] * decoded)
        )

    def _by_cell(self, cells: NDArray[np.intp], weights: NDArray[np.float32]) -> Floats:
        """Sum weights by step, worker and tier: float64[H, N, tiers]."""
        shape = (self.steps, self.workers, self.tiers.count)
        sums = np.bincount(cells, weights=weights, minlength=math.prod(shape))
        return np.asarray(sums, dtype=np.float64).reshape(shape)

    def from_pfs(self, samples: Samples, *, workers: Owners | None = None) -> Traffic:
        """Count an epoch that is read from the PFS only, as before anything is cached."""
        return self.traffic(samples, np.full(len(samples), self.tiers.pfs, dtype=np.int8), workers=workers)

    @cached_property
    def _fastest(self) -> Codes:
        return self.tiers.fastest()

    @cached_property
    def _cells(self) -> NDArray[np.intp]:
        return self._cells_of(self.turn)

    def _cells_of(self, workers: Owners) -> NDArray[np.intp]:
        """Return the first cell of each position: by step, then worker, then tier."""
        steps = np.arange(self.steps, dtype=np.intp) * self.workers
        cells = np.repeat(steps, self.batch * self.workers)
        # in place, because there is one element for every sample of an epoch
        cells += workers
        cells *= self.tiers.count
        return cells
