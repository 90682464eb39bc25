"""NoPFS's performance model, for whole minibatches and all workers at once.

For sample k: ``fetch(k)`` is its size over the rate of the fastest tier that has it, ``write(k)`` prepares it and
writes it to the staging buffer, ``read(k) = fetch(k) + write(k)``. p_0 threads read, so
``avail(f) = sum_{k<=f} read(R_k) / p_0``, and training takes sample f at ``t_f = max(avail(f), t_{f-1} + s/c)``.
Everything is proportional to sizes, so a minibatch needs only its bytes by tier, and f counts minibatches here: a
step begins when a minibatch is there as a whole. With minibatches of one sample it is the paper's recurrence.

Two things are added. Workers meet at the end of each step (their gradients are summed), so a step begins when the
slowest has its minibatch. And the staging buffer is finite: reading is never further ahead than what it holds.

Where a machine's cores are given, prep, reading and training share them (`Load`). The terms are those of the row
``cores`` in `mbaas.analysis.stages`: with T trials on N workers a step needs, in CPU seconds on each machine,

    made (prep + staging) + read from shared storage x read + T / N x trained (delivery + step)

which takes that time divided by the number of its cores. Costs are proportional to sizes, as everything else in the
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.allocation.bandwidth import Locality, Tier
from mbaas.analysis.simulator.system import Cores, Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tiers:
    """The tiers that bytes come from, as small numbers.

    They are: own classes, the same classes of other workers, the PFS, pixels that another worker prepared (no samples
    are read there, only time is spent), and nowhere.

    Attributes:
        machine: of each worker.
        readers: threads of all workers that may read from the PFS at a time.
    """

    machine: Machine
    readers: int

    @property
    def remote(self) -> int:
        """Return the number of the first class of other workers."""
        return len(self.machine.classes)

    @property
    def pfs(self) -> int:
        return 2 * len(self.machine.classes)

    @property
    def pixels(self) -> int:
        return self.pfs + 1

    @property
    def staged(self) -> int:
        """Return the number that stands for no tier: the sample is there. Its seconds are those of ``write``."""
        return self.pfs + 2

    @property
    def count(self) -> int:
        return self.pfs + 3

    @property
    def names(self) -> tuple[str, ...]:
        """Return what results call each tier."""
        own = tuple(each.name for each in self.machine.classes)
        return (*own, *("remote" for _ in own), "pfs", "remote", "staging")

    def fetch_s_per_byte(self) -> Floats:
        """Return the seconds of one thread, for each tier, while the PFS is not full: float64[count]."""
        cached = [Tier(locality, level) for locality in (Locality.OWN, Locality.REMOTE) for level in range(self.remote)]
        rates = [self.machine.fetch_bytes_per_s(tier, readers=self.readers) for tier in cached]
        return np.array([*(1 / rate for rate in rates), self.machine.idle_pfs_s_per_byte(self.readers), 0.0, 0.0])

    def fastest(self) -> NDArray[np.int8]:
        """Choose the tier to fetch from when a sample is in one and, as always, on the PFS: int8[count].

        Decided by what the PFS gives when it is not full, so that caching a sample never makes reading it slower.
        """
        codes = np.arange(self.count, dtype=np.int8)
        cost = self.fetch_s_per_byte()
        return np.where(cost <= cost[self.pfs], codes, np.int8(self.pfs))


def fetch_seconds(nbytes: Floats, *, tiers: Tiers, other_s: float = 0.0) -> Floats:
    """Return the thread-seconds of fetching, by tier: [..., tiers].

    t(gamma) / gamma needs gamma, the readers that are at the PFS at a time: fewer than all threads, since these also
    read elsewhere and prepare. Here a reader gets the most that one can get, until all together ask for more than
    t(all threads); from there on they get just that. Where t has saturated this is exact: the PFS is then full.

    Args:
        nbytes: raw bytes from each tier.
        tiers: for rates; its readers are all threads that fetch.
        other_s: thread-seconds that the same threads do other work.
    """
    seconds = nbytes * tiers.fetch_s_per_byte()
    # Where the PFS is full, moving these bytes at t(all threads) takes as long as all threads are busy, here and
    # elsewhere; what they do elsewhere is hidden behind it, so it is taken off the time of a byte.
    pfs_bytes = float(nbytes[..., tiers.pfs].sum())
    if pfs_bytes:
        beside_s = other_s + float(seconds.sum() - seconds[..., tiers.pfs].sum())
        full = tiers.machine.pfs_s_per_byte(tiers.readers) - beside_s / pfs_bytes
        seconds[..., tiers.pfs] = nbytes[..., tiers.pfs] * max(full, float(tiers.fetch_s_per_byte()[tiers.pfs]))
    return seconds


def write_seconds(nbytes: Floats, *, machine: Machine) -> Floats:
    """Return the thread-seconds of preparing and writing to staging what was read: [...], of nbytes [..., tiers]."""
    # the last tier is that of samples that are there already
    seconds: Floats = nbytes[..., :-1].sum(axis=-1) * machine.write_s_per_byte
    return seconds


@dataclass(frozen=True)
class Steps:
    """What became of consecutive steps.

    Attributes:
        waits_s: float64[H], how long training waited before each.
        slowest: int64[H], the worker whose minibatch came last.
        late_fetch: bool[H], whether that worker's prep had nothing to do but to wait for its fetching; always where
            the same threads do both.
        end_s: when the last ended.
    """

    waits_s: Floats
    slowest: Ints
    late_fetch: NDArray[np.bool_]
    end_s: float


class Pace:
    """Times of training steps, as the recurrence gives them; fed with one stretch of steps after the other.

    For step h and worker i: ``avail[h, i] = max(avail[h-1, i], t[h - ahead]) + read[h, i]`` and
    ``t[h] = max(max_i avail[h, i], t[h-1] + compute[h-1])``. Where other threads prepare than fetch, that is
    ``fetched[h, i]``, and ``avail[h, i] = max(avail[h-1, i], fetched[h, i]) + prep[h, i]``. Within ``ahead`` steps
    nothing depends on their own t, so all are running maxima of differences of sums, and a stretch is computed
    ``ahead`` steps at a time.

    Args:
        workers: N.
        ahead: minibatches that the staging buffer holds; one of them leaves it when its step begins.
        start_s: when reading begins.
    """

    def __init__(self, *, workers: int, ahead: int, start_s: float = 0.0) -> None:
        self._ahead = ahead
        self._fetched = np.full(workers, start_s)  # when each worker had fetched its last minibatch
        self._avail = np.full(workers, start_s)  # when each worker had prepared its last minibatch
        self._begun = np.zeros(0)  # when the last ``ahead`` steps began, each of which made room for a minibatch
        self._start_s = start_s
        self._end_s = start_s  # when the last step ended

    def run(self, reads_s: Floats, compute_s: Floats, *, prep_s: Floats | None = None) -> Steps:
        """Run the next steps.

        Args:
            reads_s: float64[H, N], seconds that each worker's threads together read for each step.
            compute_s: float64[H], of each step.
            prep_s: float64[H, N], seconds that other threads then prepare; None where the same threads did.
        """
        steps = len(reads_s)
        waits, slowest, late = np.empty(steps), np.empty(steps, dtype=np.int64), np.empty(steps, dtype=bool)
        # reading for a step waits for room that the step ``ahead`` before it makes: in a part none waits for another
        for low in range(0, steps, self._ahead):
            part = slice(low, low + self._ahead)
            avail, late_fetch = self._ready(reads_s[part], prep_s[part] if prep_s is not None else None)
            slowest[part] = avail.argmax(axis=1)
            late[part] = late_fetch[np.arange(len(avail)), slowest[part]]
            waits[part] = self._train(avail.max(axis=1), compute_s[part])
        return Steps(waits, slowest, late, self._end_s)

    def _ready(self, reads_s: Floats, prep_s: Floats | None) -> tuple[Floats, NDArray[np.bool_]]:
        """Find when each worker has each minibatch, and whether fetching made it wait: [steps, N]."""
        gates = np.broadcast_to(self._gates(len(reads_s))[:, None], reads_s.shape)
        fetched = _one_by_one(gates, reads_s, self._fetched)
        self._fetched = fetched[-1]
        if prep_s is None:
            return fetched, np.ones(fetched.shape, dtype=bool)
        avail = _one_by_one(fetched, prep_s, self._avail)
        # prep of a minibatch begins when it is fetched and the one before is prepared: the later of both made it wait
        late = fetched >= np.concatenate([self._avail[None], avail[:-1]])
        self._avail = avail[-1]
        return avail, late

    def _train(self, ready_s: Floats, compute_s: Floats) -> Floats:
        """Find the waiting before each of the steps, whose minibatches are ready at these times."""
        # begin[h] = max(ready[h], end[h-1]): less the training before it, that is a running maximum of ready times
        before = np.cumsum(compute_s) - compute_s
        lead = ready_s - before
        lead[0] = max(lead[0], self._end_s)
        lead = np.maximum.accumulate(lead)
        waits = np.diff(lead, prepend=self._end_s)
        self._end_s = float(lead[-1] + before[-1] + compute_s[-1])
        self._begun = np.concatenate([self._begun, lead + before])[-self._ahead :]
        return waits

    def _gates(self, steps: int) -> Floats:
        """Find when there is room for each of the next steps: float64[steps]."""
        # the first ``ahead`` of all steps find an empty buffer
        missing = self._ahead - len(self._begun)
        early = np.full(min(missing, steps), self._start_s)
        return np.concatenate([early, self._begun[: steps - len(early)]])


def _one_by_one(gates: Floats, lengths_s: Floats, last_s: Floats) -> Floats:
    """Find the ends of works of which each begins at its gate, or when the one before ends: float64[H, N].

    end[h] = max(end[h-1], gate[h]) + length[h] is S[h] + max over k <= h of (gate[k] - S[k-1]), with S the running sum.
    """
    sums = np.cumsum(lengths_s, axis=0)
    lead = gates - (sums - lengths_s)
    lead[0] = np.maximum(lead[0], last_s)
    return sums + np.maximum.accumulate(lead, axis=0)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What steps need of a machine's cores: seconds of all of them, for raw bytes [H, N, tiers].

    Attributes:
        cores: how many each machine has, and what a sample costs them.
        sample_bytes: mean size of a sample, the one whose costs are known.
        workers: N.
        trials: T, spread evenly over the machines.
    """

    cores: Cores
    sample_bytes: float
    workers: int
    trials: int

    def making_s(self, nbytes: Floats, *, tiers: Tiers) -> Floats:
        """Return the seconds of reading, preparing and staging once what was read: [H, N]."""
        # what comes from other workers as pixels was prepared, and counted, there; only the PFS costs CPU time to read
        prepared = self._per_core(nbytes[..., : tiers.staged].sum(axis=-1))
        read = self._per_core(nbytes[..., tiers.pfs])
        return prepared * (self.cores.prep_cpu_s + self.cores.staging_cpu_s) + read * self.cores.read_cpu_s

    def saved_s(self, nbytes: Floats, *, speedup: float) -> Floats:
        """Return the seconds less that preparing takes where samples of these raw bytes are kept decoded: [H, N]."""
        cores = self.cores
        decoded_cpu_s = cores.prep_cpu_s / speedup if cores.decoded_cpu_s is None else cores.decoded_cpu_s
        return self._per_core(nbytes) * (cores.prep_cpu_s - decoded_cpu_s)

    def delivering_s(self, nbytes: Floats) -> Floats:
        """Return the seconds of handing minibatches to trials: [H]."""
        return self._taken_per_core(nbytes) * self.cores.delivery_cpu_s

    def training_s(self, nbytes: Floats) -> Floats:
        """Return the seconds of the trials' steps: [H]."""
        return self._taken_per_core(nbytes) * self.cores.step_cpu_s

    def _taken_per_core(self, nbytes: Floats) -> Floats:
        """Return how many samples a machine's trials take, for each of its cores: [H]."""
        return self._per_core(nbytes.sum(axis=(1, 2))) * (self.trials / self.workers)

    def _per_core(self, nbytes: Floats) -> Floats:
        """Return how many samples of mean size these bytes are, for each core."""
        return nbytes / (self.sample_bytes * (self.cores.count - self.cores.background))
