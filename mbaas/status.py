"""The values in which a feed tells about itself: plain and frozen, made by the coordinator, shown by `mbaas status`."""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.allocation.forms import SampleCosts
from mbaas.costs import LoadingCosts
from mbaas.messages import Amount, Claims, ConsumerReport, EpochLedger, FetchCounts, FetchSpeeds


@dataclass(frozen=True)
class ConsumerStatus:
    """One consumer, or a reservation that is held for one.

    Attributes:
        name: the consumer's, or of the one that a reservation is held for.
        state: "reserved", "busy", "waiting", or "resting" between two epochs of its own.
        for_anyone: whether it is a reservation that any newcomer may take, not one for a consumer of this name.
        trial: whose rank it is; its own name if it is a trial by itself, or a reservation.
        epoch, block: where its cursor stands: feed epoch and block in it.
        held_blocks: blocks it was given and has not let go of, in all lanes; the rest is as the first lane sees it.
        cohort: number of its cohort; equal numbers go through the same blocks.
        apart: why it was parted from others that it went through the stream with, or "".
        waits_for: why it waits, or "".
        report: what it said of itself last.
        last_ledger: the ledger of the last epoch that it finished, or None.
    """

    name: str
    state: str
    for_anyone: bool
    trial: str
    epoch: int
    block: int
    held_blocks: int
    cohort: int
    apart: str
    waits_for: str
    report: ConsumerReport
    last_ledger: EpochLedger | None


@dataclass(frozen=True)
class WorkerStatus:
    """One prep worker: its name, process id, tasks in hand, samples it made, samples/s while it prepared."""

    name: str
    pid: int
    tasks: int
    samples: int
    samples_per_s: float


@dataclass(frozen=True)
class NodeStatus:
    """One node.

    Attributes:
        node: its id.
        workers: number of prep workers there.
        cached_samples, cached_bytes: samples in its memory, in whatever form.
        decoded, decoded_on_disk: those that it keeps decoded, in memory and on disk.
        storage_bytes, storage_s: what it has read from storage, and for how many seconds it was reading.
        fetch_threads: how many threads may read storage at once.
        readahead_bytes: how much it reads ahead at most now.
        speeds: what a thread gets from each tier, in bytes/s, as far as it was measured.
    """

    node: str
    workers: int
    cached_samples: int
    cached_bytes: int
    decoded: Amount
    decoded_on_disk: Amount
    storage_bytes: int
    storage_s: float
    fetch_threads: int
    readahead_bytes: int
    speeds: FetchSpeeds


@dataclass(frozen=True)
class SkippedSample:
    """A sample that was left out.

    Attributes:
        sample_id, uri, reason: which one, where its bytes come from, and what was wrong with it last.
        times: how often it was left out: once in each epoch.
        feed_epoch: the last epoch that lacks it.
    """

    sample_id: int
    uri: str
    reason: str
    times: int
    feed_epoch: int


@dataclass(frozen=True)
class FeedStatus:
    """A snapshot of a feed.

    Attributes:
        samples, blocks_per_epoch, block_samples: size of the dataset and of its cut into blocks.
        engine: the engine that runs, "cpu" or "dali".
        dali_share: of the images, which the dali engine makes with DALI, and the others on CPUs.
        lanes: coordinators among which blocks are dealt out.
        members, workers: who takes part.
        workers_at_work: of the workers, those that are up, know where samples have their homes, and get tasks.
        waits_for: sentences that say which workers or cache nodes the feed waits for, which resources these need, and
            for how long it has waited so far; none if all are there.
        claims: what the feed keeps of its cluster: CPUs, GPUs, memory.
        skipped, skipped_total: samples left out, each once (the last thousand), and how often one was.
        notes: the last decisions, oldest first.
        ledgers, inexact_epochs: (consumer, ledger) of the last epochs that consumers finished; how many epochs were not
            exact.
        staged_blocks, staged_bytes, staging_bytes: what is staged or being made, and the budget.
        keeps_all: whether all epochs are the same, and all minibatches of one are kept: each is prepared once.
        prepared_blocks, prepared_samples: made since the start, re-makes included; on several nodes each part of a
            block counts.
        remade_blocks: parts of blocks that were made more than once (a worker died, a consumer was out of step).
        delivered_samples: handed to trials, summed over trials, those that left included.
        cached_samples, cached_bytes, cache_bytes: samples in memory, in whatever form, and the budget.
        decoded, decoded_on_disk: those that are kept decoded, in memory and on disks.
        decoded_costs: what it costs and saves to keep a sample decoded, as the feed found when it was served; None if
            none are kept.
        nodes: the nodes on which the feed has a cache.
        fetched: prepared samples since the start, by where their bytes came from: the memory of the node that
            prepared them, that of another, a disk tier, storage.
        fetch_s, prep_s: seconds that workers waited for bytes, and prepared, since the start, summed over workers.
        costs: what it took to give trials their samples: CPU time, and money if the price of a CPU is known.
        prediction_error: how far the last prediction of an epoch's time (`mbaas.analysis`) was off, once an epoch has
            shown it: 0.05 was 5 % too long; None if there is none.
        internal_errors: bugs in mbaas that coordinators met and went on.
        restarts: times that the coordinator came back after its predecessor had died, as far as it knows.
        uptime_s: seconds since the feed started.
        start_s: seconds of these until it was open; None if its coordinator came back since.
        failed: why the feed cannot go on, or None.
    """

    name: str
    samples: int
    batch_size: int
    block_samples: int
    blocks_per_epoch: int
    engine: str
    lanes: int
    members: tuple[ConsumerStatus, ...]
    workers: tuple[WorkerStatus, ...]
    workers_at_work: int
    waits_for: tuple[str, ...]
    claims: Claims
    skipped: tuple[SkippedSample, ...]
    skipped_total: int
    notes: tuple[str, ...]
    ledgers: tuple[tuple[str, EpochLedger], ...]
    inexact_epochs: int
    staged_blocks: int
    staged_bytes: int
    staging_bytes: int
    keeps_all: bool
    prepared_blocks: int
    prepared_samples: int
    remade_blocks: int
    delivered_samples: int
    nodes: tuple[NodeStatus, ...]
    cached_samples: int
    cached_bytes: int
    cache_bytes: int
    decoded: Amount
    decoded_on_disk: Amount
    fetched: FetchCounts
    fetch_s: float
    prep_s: float
    costs: LoadingCosts
    prediction_error: float | None
    internal_errors: int
    restarts: int
    uptime_s: float
    start_s: float | None
    failed: str | None
    decoded_costs: SampleCosts | None = None
    dali_share: float = 1.0

    @property
    def state(self) -> str:
        """What the feed does: "serving", "waiting" while nobody can prepare anything, or "failed"."""
        if self.failed is not None:
            return "failed"
        return "serving" if self.workers_at_work else "waiting"

    @property
    def hit_rate(self) -> float:
        """The share of prepared samples whose bytes came from a cache, 0 to 1."""
        return self.fetched.hit_rate
