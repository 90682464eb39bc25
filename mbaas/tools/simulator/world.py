"""NoPFS's performance model, for whole minibatches and all workers at once, and the data that policies share.

For sample k, ``fetch(k)`` is its size over the rate of the fastest tier that has it. ``write(k)`` prepares it and
writes it to the staging buffer, and ``read(k) = fetch(k) + write(k)``. With p_0 reading threads, data is ready and
training takes it at

    avail(f) = sum_{k<=f} read(R_k) / p_0 and t_f = max(avail(f), t_{f-1} + s/c).

All terms are proportional to sizes, so a minibatch needs only its bytes by tier. Here f counts minibatches: a step
begins when a whole minibatch is ready. With minibatches of one sample, this is the paper's recurrence.

There are two additions. Workers synchronize at the end of each step to sum gradients, so a step begins when the slowest
worker has its minibatch. The staging buffer is finite, which limits read-ahead.

If a machine's cores are given, prep, reading and training share them, as in the row ``cores`` of
`mbaas.model.pace`. With T trials on N workers, a step needs, in CPU seconds on each machine,

    made (prep + staging) + read from shared storage x read + T / N x trained (delivery + step)

and takes that time divided by the number of cores.

`World` has the sizes and orders of samples, assigns them to workers, and counts bytes by tier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.samples.order import SampleOrder, Shuffle
from mbaas.tools.simulator.system import Machine, Sizes, StorageClass, System

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tiers:
    """Numbering of the tiers that bytes come from.

    The local classes come first, then the same classes of other workers and the PFS. The last two are pixels prepared
    by another worker, which take time but read no samples, and samples that are already staged. ``readers`` are the
    threads of all workers that may read from the PFS concurrently. With ``fixed_share``, each of them always gets
    t(readers) / readers.
    """

    machine: Machine
    readers: int
    fixed_share: bool = False

    @property
    def remote(self) -> int:
        return len(self.machine.classes)

    @property
    def pfs(self) -> int:
        return 2 * len(self.machine.classes)

    @property
    def pixels(self) -> int:
        return self.pfs + 1

    @property
    def staged(self) -> int:
        """Number for samples that are already staged, without a fetch; its column of seconds is ``write``."""
        return self.pfs + 2

    @property
    def count(self) -> int:
        return self.pfs + 3

    @property
    def names(self) -> tuple[str, ...]:
        own = tuple(each.name for each in self.machine.classes)
        return (*own, *("remote" for _ in own), "pfs", "remote", "staging")

    def fetch_s_per_byte(self) -> Floats:
        """Return the seconds of one thread per byte from each tier: float64[count].

        The PFS counts as unsaturated, unless its shares are fixed.
        """
        # Another worker's class: min(b_c, r_j(p_j) / p_j).
        own = [each.thread_bytes_per_s for each in self.machine.classes]
        rates = [*own, *(min(self.machine.network_bytes_per_s, rate) for rate in own)]
        pfs_s = self.machine.pfs_s_per_byte if self.fixed_share else self.machine.idle_pfs_s_per_byte
        return np.array([*(1 / rate for rate in rates), pfs_s(self.readers), 0.0, 0.0])

    def fastest(self) -> NDArray[np.int8]:
        """Return the tier to fetch from for a sample in each tier and, as always, on the PFS: int8[count].

        The choice uses the rate of an unsaturated PFS, so that caching a sample never makes reading it slower.
        """
        codes = np.arange(self.count, dtype=np.int8)
        cost = self.fetch_s_per_byte()
        return np.where(cost <= cost[self.pfs], codes, np.int8(self.pfs))


def fetch_seconds(nbytes: Floats, *, tiers: Tiers, other_s: float = 0.0) -> Floats:
    """Return the thread-seconds of fetching, by tier: [..., tiers].

    t(gamma) / gamma needs gamma, the concurrent readers of the PFS. These are fewer than all threads, which also read
    elsewhere and prepare, for ``other_s``. Here each reader gets the highest rate that a reader can get, until the
    total demand exceeds t(all threads). Beyond that, all readers together get exactly that rate. If t has saturated,
    this is exact, because the PFS is then busy all the time. With fixed shares, gamma is the number of all threads.
    """
    seconds = nbytes * tiers.fetch_s_per_byte()
    # If the PFS is saturated, moving these bytes at t(all threads) takes as long as the threads are busy, there and
    # elsewhere. Work elsewhere overlaps with it, so it is subtracted from the time per byte.
    pfs_bytes = float(nbytes[..., tiers.pfs].sum())
    if pfs_bytes:
        beside_s = other_s + float(seconds.sum() - seconds[..., tiers.pfs].sum())
        full = tiers.machine.pfs_s_per_byte(tiers.readers) - beside_s / pfs_bytes
        seconds[..., tiers.pfs] = nbytes[..., tiers.pfs] * max(full, float(tiers.fetch_s_per_byte()[tiers.pfs]))
    return seconds


def write_seconds(nbytes: Floats, *, machine: Machine) -> Floats:
    """Return the thread-seconds to prepare bytes and write them to staging: [...], from nbytes [..., tiers]."""
    # the last tier holds samples that are already staged
    seconds: Floats = nbytes[..., :-1].sum(axis=-1) * machine.write_s_per_byte()
    return seconds


@dataclass(frozen=True)
class Steps:
    """Results of H consecutive steps, and the end of the last.

    ``waits_s`` are the waits of training before each step, ``slowest`` the worker whose minibatch came last, and
    ``late_fetch`` whether that worker's prep only waited for its fetching; always True if the same threads do both.
    """

    waits_s: Floats
    slowest: Ints
    late_fetch: NDArray[np.bool_]
    end_s: float


class StepTimeline:
    """Times of training steps by the recurrence, computed for one stretch of steps after the other.

    For step h and worker i,

        avail[h, i] = max(avail[h-1, i], t[h - ahead]) + read[h, i]
        t[h] = max(max_i avail[h, i], t[h-1] + compute[h-1]).

    If separate threads prepare, the first line is ``fetched[h, i]``, and
    ``avail[h, i] = max(avail[h-1, i], fetched[h, i]) + prep[h, i]``. Within ``ahead`` steps, which the staging buffer
    holds, no term depends on the steps' own t, so all are running maxima of differences of sums.
    """

    def __init__(self, *, workers: int, ahead: int, start_s: float = 0.0) -> None:
        self._ahead = ahead
        self._fetched = np.full(workers, start_s)  # end of fetching of each worker's last minibatch
        self._avail = np.full(workers, start_s)  # end of prep of each worker's last minibatch
        self._begun = np.zeros(0)  # starts of the last ``ahead`` steps, each of which freed room for a minibatch
        self._start_s = start_s
        self._end_s = start_s  # end of the last step

    def run(self, reads_s: Floats, compute_s: Floats, *, prep_s: Floats | None = None) -> Steps:
        """Run the next steps.

        ``reads_s`` are float64[H, N], seconds of reading by all threads of a worker together, ``compute_s`` float64[H],
        and ``prep_s`` float64[H, N], seconds of separate threads.
        """
        steps = len(reads_s)
        waits, slowest, late = np.empty(steps), np.empty(steps, dtype=np.int64), np.empty(steps, dtype=bool)
        # Reading for a step waits for the room freed ``ahead`` steps before, so the steps of a part are independent.
        for low in range(0, steps, self._ahead):
            part = slice(low, low + self._ahead)
            avail, late_fetch = self._ready(reads_s[part], prep_s[part] if prep_s is not None else None)
            slowest[part] = avail.argmax(axis=1)
            late[part] = late_fetch[np.arange(len(avail)), slowest[part]]
            waits[part] = self._train(avail.max(axis=1), compute_s[part])
        return Steps(waits, slowest, late, self._end_s)

    def _ready(self, reads_s: Floats, prep_s: Floats | None) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the time at which each worker has each minibatch, and whether it waited for fetching: [steps, N]."""
        gates = np.broadcast_to(self._gates(len(reads_s))[:, None], reads_s.shape)
        fetched = _one_by_one(gates, reads_s, self._fetched)
        self._fetched = fetched[-1]
        if prep_s is None:
            return fetched, np.ones(fetched.shape, dtype=bool)
        avail = _one_by_one(fetched, prep_s, self._avail)
        # Prep of a minibatch starts when it is fetched and the one before is prepared; the later event caused the wait.
        late = fetched >= np.concatenate([self._avail[None], avail[:-1]])
        self._avail = avail[-1]
        return avail, late

    def _train(self, ready_s: Floats, compute_s: Floats) -> Floats:
        """Return the wait before each step, given the times at which minibatches are ready."""
        # begin[h] = max(ready[h], end[h-1]). Minus the training before it, that is a running maximum of ready times.
        before = np.cumsum(compute_s) - compute_s
        lead = ready_s - before
        lead[0] = max(lead[0], self._end_s)
        lead = np.maximum.accumulate(lead)
        waits = np.diff(lead, prepend=self._end_s)
        self._end_s = float(lead[-1] + before[-1] + compute_s[-1])
        self._begun = np.concatenate([self._begun, lead + before])[-self._ahead :]
        return waits

    def _gates(self, steps: int) -> Floats:
        """Return the time at which there is room for each of the next steps: float64[steps]."""
        # The first ``ahead`` steps find an empty buffer.
        missing = self._ahead - len(self._begun)
        early = np.full(min(missing, steps), self._start_s)
        return np.concatenate([early, self._begun[: steps - len(early)]])


def _one_by_one(gates: Floats, lengths_s: Floats, last_s: Floats) -> Floats:
    """Return the ends of consecutive tasks, each starting at its gate or at the end of the one before: float64[H, N].

    end[h] = max(end[h-1], gate[h]) + length[h] is S[h] + max over k <= h of (gate[k] - S[k-1]), with S the running sum.
    """
    sums = np.cumsum(lengths_s, axis=0)
    lead = gates - (sums - lengths_s)
    lead[0] = np.maximum(lead[0], last_s)
    return sums + np.maximum.accumulate(lead, axis=0)


Samples = NDArray[np.int32]

KEPT_BYTES = 1 << 30
"""Memory for cached orders: 209 of ImageNet-1k, 18 of ImageNet-22k."""

_PIECE = 1 << 20
"""Positions of an order that are computed together, to keep temporary 64-bit arrays small."""


Orders = Callable[[int], Samples]
"""Sample ids in the order of an epoch: int32[F], read-only."""


def orders_of(samples: int, *, seed: int, kept_bytes: int = KEPT_BYTES) -> Orders:
    """Return the orders of mbaas's own keyed permutation; the last ones are cached."""
    order = SampleOrder(num_samples=samples, seed=seed, block_samples=1)

    @lru_cache(max(kept_bytes // (4 * samples), 1))
    def made(epoch: int) -> Samples:
        found = np.empty(samples, dtype=np.int32)
        for start in range(0, samples, _PIECE):
            stop = min(start + _PIECE, samples)
            found[start:stop] = order.samples_at(Shuffle(epoch), start, stop)
        found.flags.writeable = False
        return found

    return made


Codes = NDArray[np.int8]
"""Numbers of storage classes (`NOWHERE` for none), or of tiers."""

Owners = NDArray[np.uint16]

Flags = NDArray[np.bool_]

NOWHERE = np.int8(-1)


@dataclass(frozen=True)
class Traffic:
    """Bytes that the workers read for the steps of one epoch, by step, reading worker and tier: float64[H, N, tiers].

    ``samples`` are by tier, int64[tiers]; their sum is F. ``decoded`` is the part of ``nbytes`` whose samples are
    cached decoded; None for none.
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
        self.orders = orders if orders is not None else orders_of(dataset.samples, seed=training.seed)
        self.tiers = Tiers(
            system.machine,
            readers=training.workers * system.machine.staging.threads,
            fixed_share=system.model == "published",
        )
        self._last_order: tuple[int, Samples] | None = None

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of each sample, and 0 for the padding sample: float32[F + 1]."""
        return np.append(self.system.dataset.sizes(self.system.training.seed), np.float32(0))

    @property
    def classes(self) -> tuple[StorageClass, ...]:
        return self.system.machine.classes

    def per_core(self, nbytes: Floats) -> Floats:
        """Return the number of mean-sized samples in these bytes, per free core of a machine that shares its cores."""
        cores = self.system.machine.cores
        assert cores is not None
        return nbytes / (self.system.dataset.sample_bytes * (cores.count - cores.background))

    def taken_per_core(self, traffic: Traffic) -> Floats:
        """Return the samples that a machine's part of the trials takes in each step, per core: [H]."""
        return self.per_core(traffic.nbytes.sum(axis=(1, 2))) * (self.system.training.trials / self.workers)

    def sampler_order(self, epoch: int) -> Samples:
        """Return the samples of an epoch in the order of a distributed sampler: int32[H B N]."""
        # Policies run epoch by epoch, so only the last one is requested again.
        if self._last_order is None or self._last_order[0] != epoch:
            # Sample F has no bytes, so the last step needs no special case.
            full = np.full(self.steps * self.batch * self.workers, self.samples, dtype=np.int32)
            full[: self.samples] = self.orders(epoch)
            self._last_order = (epoch, full)
        return self._last_order[1]

    def readers(self, epoch: int) -> Owners:
        """Return the worker to which a distributed sampler assigns each sample: uint16[F + 1]."""
        readers = np.zeros(self.samples + 1, dtype=np.uint16)
        readers[self.sampler_order(epoch)] = self.turn
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

    def admit(self, sizes: NDArray[Any], classes: Sequence[StorageClass], *, used_bytes: float = 0.0) -> Codes:
        """Return the class of each sample if they are admitted in order, filling the fastest class first: int8[n]."""
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
        self, samples: Samples, tiers: Codes, *, workers: Owners | None = None, decoded: NDArray[np.bool_] | None = None
    ) -> Traffic:
        """Count bytes by step, worker and tier.

        Samples, [H B N], come step after step, each with its tier, its reader (worker q % N at position q if None), and
        whether it is cached decoded.
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
        shape = (self.steps, self.workers, self.tiers.count)
        sums = np.bincount(cells, weights=weights, minlength=math.prod(shape))
        return np.asarray(sums, dtype=np.float64).reshape(shape)

    def from_pfs(self, samples: Samples, *, workers: Owners | None = None) -> Traffic:
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
