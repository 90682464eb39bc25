"""NoPFS's performance model, for whole minibatches and all workers at once.

For sample k, ``fetch(k)`` is its size over the rate of the fastest tier that has it. ``write(k)`` prepares it and
writes it to the staging buffer, and ``read(k) = fetch(k) + write(k)``. With p_0 reading threads, data is ready and
training takes it at

    avail(f) = sum_{k<=f} read(R_k) / p_0 and t_f = max(avail(f), t_{f-1} + s/c).

All terms are proportional to sizes, so a minibatch needs only its bytes by tier. Here f counts minibatches: a step
begins when a whole minibatch is ready. With minibatches of one sample, this is the paper's recurrence.

There are two additions. Workers synchronize at the end of each step to sum gradients, so a step begins when the slowest
worker has its minibatch. The staging buffer is finite, which limits read-ahead.

If a machine's cores are given, prep, reading and training share them (`Load`), as in the row ``cores`` of
`mbaas.model.pace`. With T trials on N workers, a step needs, in CPU seconds on each machine,

    made (prep + staging) + read from shared storage x read + T / N x trained (delivery + step)

and takes that time divided by the number of cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.simulator.system import Cores, Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tiers:
    """Numbering of the tiers that bytes come from.

    The local classes come first, then the same classes of other workers and the PFS. The last two are pixels prepared
    by another worker, which take time but read no samples, and samples that are already staged. ``readers`` are the
    threads of all workers that may read from the PFS concurrently.
    """

    machine: Machine
    readers: int

    @property
    def remote(self) -> int:
        """Number of the first class of other workers."""
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
        """Name of each tier in results."""
        own = tuple(each.name for each in self.machine.classes)
        return (*own, *("remote" for _ in own), "pfs", "remote", "staging")

    def fetch_s_per_byte(self) -> Floats:
        """Return the seconds of one thread per byte from each tier, with an unsaturated PFS: float64[count]."""
        # Another worker's class: min(b_c, r_j(p_j) / p_j).
        own = [each.thread_bytes_per_s for each in self.machine.classes]
        rates = [*own, *(min(self.machine.network_bytes_per_s, rate) for rate in own)]
        return np.array([*(1 / rate for rate in rates), self.machine.idle_pfs_s_per_byte(self.readers), 0.0, 0.0])

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
    elsewhere and prepare. Here each reader gets the highest rate that a reader can get, until the total demand exceeds
    t(all threads). Beyond that, all readers together get exactly that rate. If t has saturated, this is exact, because
    the PFS is then busy all the time.

    Args:
        nbytes: raw bytes from each tier.
        tiers: rates; its readers are all threads that fetch.
        other_s: thread-seconds that the same threads spend on other work.
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
    seconds: Floats = nbytes[..., :-1].sum(axis=-1) * machine.write_s_per_byte
    return seconds


@dataclass(frozen=True)
class Steps:
    """Results of consecutive steps.

    Attributes:
        waits_s: float64[H], wait of training before each step.
        slowest: int64[H], the worker whose minibatch came last.
        late_fetch: bool[H], whether that worker's prep only waited for its fetching; always True if the same threads do
            both.
        end_s: end of the last step.
    """

    waits_s: Floats
    slowest: Ints
    late_fetch: NDArray[np.bool_]
    end_s: float


class Pace:
    """Times of training steps by the recurrence, computed for one stretch of steps after the other.

    For step h and worker i,

        avail[h, i] = max(avail[h-1, i], t[h - ahead]) + read[h, i]
        t[h] = max(max_i avail[h, i], t[h-1] + compute[h-1]).

    If separate threads prepare, the first line is ``fetched[h, i]``, and
    ``avail[h, i] = max(avail[h-1, i], fetched[h, i]) + prep[h, i]``. Within ``ahead`` steps no term depends on the
    steps' own t, so all are running maxima of differences of sums. A stretch is computed ``ahead`` steps at a time.

    Args:
        workers: N.
        ahead: minibatches that the staging buffer holds; each leaves it when its step begins.
        start_s: start of reading.
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

        Args:
            reads_s: float64[H, N], seconds of reading for each step, by all threads of a worker together.
            compute_s: float64[H], seconds of training.
            prep_s: float64[H, N], seconds of prep by separate threads; None if the same threads prepare.
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


@dataclass(frozen=True, kw_only=True)
class Load:
    """CPU demand of steps: seconds of all cores of a machine, for raw bytes [H, N, tiers].

    ``sample_bytes`` is the mean size of a sample. The N workers' machines share T trials evenly.
    """

    cores: Cores
    sample_bytes: float
    workers: int
    trials: int

    def making_s(self, nbytes: Floats, *, tiers: Tiers) -> Floats:
        """Return the seconds to read, prepare and stage these bytes once: [H, N]."""
        # Pixels from other workers were prepared, and counted, there. Only reading from the PFS costs CPU time.
        prepared = self._per_core(nbytes[..., : tiers.staged].sum(axis=-1))
        read = self._per_core(nbytes[..., tiers.pfs])
        return prepared * (self.cores.prep_cpu_s + self.cores.staging_cpu_s) + read * self.cores.read_cpu_s

    def saved_s(self, nbytes: Floats, *, speedup: float) -> Floats:
        """Return the seconds of prep saved if samples with these raw bytes are cached decoded: [H, N]."""
        cores = self.cores
        decoded_cpu_s = cores.prep_cpu_s / speedup if cores.decoded_cpu_s is None else cores.decoded_cpu_s
        return self._per_core(nbytes) * (cores.prep_cpu_s - decoded_cpu_s)

    def delivering_s(self, nbytes: Floats) -> Floats:
        """Return the seconds of delivering minibatches to trials: [H]."""
        return self._taken_per_core(nbytes) * self.cores.delivery_cpu_s

    def training_s(self, nbytes: Floats) -> Floats:
        """Return the seconds of the trials' steps: [H]."""
        return self._taken_per_core(nbytes) * self.cores.step_cpu_s

    def _taken_per_core(self, nbytes: Floats) -> Floats:
        """Return the samples that a machine's trials take, per core: [H]."""
        return self._per_core(nbytes.sum(axis=(1, 2))) * (self.trials / self.workers)

    def _per_core(self, nbytes: Floats) -> Floats:
        """Return the number of mean-sized samples in these bytes, per core."""
        return nbytes / (self.sample_bytes * (self.cores.count - self.cores.background))
