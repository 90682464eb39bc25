"""Status values of a feed: plain, frozen, created by the coordinator, displayed by `mbaas status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbaas.base import units
from mbaas.base.notebook import table
from mbaas.model.engine_choice import EngineChoice
from mbaas.model.forms import SampleCosts
from mbaas.model.gains import WorkerChange
from mbaas.model.sharing import LoadingCosts, Repeats, Sharing, words
from mbaas.model.tiers import FetchSpeeds
from mbaas.model.waits import RankSteps
from mbaas.wire.consumers import Claims, ConsumerReport
from mbaas.wire.samples import Amount, EpochLedger, FetchCounts


@dataclass(frozen=True)
class ConsumerStatus:
    """One consumer, or a reservation for one.

    Attributes:
        name: name of the consumer, also for a reservation.
        state: "reserved", "busy", "waiting", or "resting" between two epochs of its own.
        is_unassigned: True for a reservation that any new consumer may take, not only one with this name.
        trial: the trial that it is a rank of; its own name for a single consumer or a reservation.
        epoch, block: position of its cursor: feed epoch and block in it.
        blocks_per_epoch: blocks in an epoch, which depend on its pipeline.
        pipeline: the first digits of the fingerprint of its own pipeline; "" for the feed's.
        difference: what differs from the feed's pipeline, as a clause; "" for the feed's.
        held_blocks: blocks delivered and not released.
        cohort: number of its cohort; consumers of one cohort go through the same blocks.
        apart: reason why it was split off from its cohort, or "".
        waits_for: reason why it waits, or "".
        report: its last report.
        last_ledger: the ledger of the last epoch that it finished, or None.
    """

    name: str
    state: str
    is_unassigned: bool
    trial: str
    epoch: int
    block: int
    blocks_per_epoch: int
    pipeline: str
    difference: str
    held_blocks: int
    cohort: int
    apart: str
    waits_for: str
    report: ConsumerReport
    last_ledger: EpochLedger | None


@dataclass(frozen=True)
class PipelineStatus:
    """One pipeline in use.

    Attributes:
        pipeline, difference: as in `ConsumerStatus`; "" for the feed's own.
        trials: names of the trials that use it.
        samples: samples prepared with it since it was brought, repetitions included.
        prep_s: seconds that workers prepared them.
    """

    pipeline: str
    difference: str
    trials: tuple[str, ...]
    samples: int
    prep_s: float


@dataclass(frozen=True)
class WorkerStatus:
    """One prep worker: name, process id, assigned tasks, samples prepared, samples/s while preparing."""

    name: str
    pid: int
    tasks: int
    samples: int
    samples_per_s: float


@dataclass(frozen=True)
class LendingStatus:
    """Workers shared with other feeds, and the options that bound them.

    Attributes:
        borrowed, lent: workers by owner, and by borrower.
        min_workers, max_borrowed, weight: see `mbaas.Lending`.
    """

    borrowed: Mapping[str, int]
    lent: Mapping[str, int]
    min_workers: int
    max_borrowed: int | None
    weight: float


@dataclass(frozen=True)
class DiskStatus:
    """One disk of a node.

    Attributes:
        path: its folder.
        used_bytes, max_bytes: bytes of samples there, and their limit.
        bytes_per_s: bytes/s that a thread gets from it; None before it is measured.
        is_used: False while it is no faster than storage, and for good after it was dropped.
        failure: why it was dropped or, while it is used, why it stores no further samples; "" without a failure.
    """

    path: str
    used_bytes: int
    max_bytes: int
    bytes_per_s: float | None
    is_used: bool
    failure: str


@dataclass(frozen=True)
class NodeStatus:
    """One node.

    Attributes:
        node: its id.
        workers: number of prep workers there.
        cached_samples, cached_bytes: samples in its memory, encoded or decoded.
        decoded, decoded_on_disk: the decoded ones, in memory and on disk.
        storage_bytes, storage_s: bytes read from storage, and seconds spent reading.
        fetch_threads: threads that may read storage at the same time.
        readahead_bytes: current upper bound on read-ahead.
        speeds: bytes/s that a thread gets from each tier, if measured.
        disks: its disks, in the order of the feed's option.
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
    disks: tuple[DiskStatus, ...] = ()


@dataclass(frozen=True)
class SkippedSample:
    """A sample that was left out.

    Attributes:
        sample_id, uri, reason: its id, the source of its bytes, and its last error.
        times: number of epochs without it.
        feed_epoch: the last epoch without it.
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
        samples, blocks_per_epoch, block_samples: size of the dataset and of its blocks.
        engine: the engine in use, "cpu" or "dali".
        engine_choice: why it is in use, and the measured rates of both engines, if ``engine="auto"`` could choose.
        dali_share: fraction of the images that the dali engine prepares with DALI; it prepares the others on CPUs.
        consumers, workers: consumers and prep workers.
        pipelines: the pipelines in use, that of the feed first.
        lending: workers shared with other feeds; None if the feed does not lend.
        worker_changes: the last changes of the number of workers, each with its predicted and its measured gain.
        moves_s: for the last workers that came from other feeds, seconds from the decision to move one to the first
            part that it prepared here. The clocks of both machines count.
        workers_at_work: number of workers that are running, have the placement, and get tasks.
        waits_for: sentences that list the workers or cache nodes that the feed waits for, the resources they need, and
            the time waited so far; empty if all are running.
        rank_steps: for each data-parallel trial, the steps that all ranks reported, and how many were uneven: the
            ranks' waits differed by more than 10 % of the step (`mbaas.model.waits`).
        claims: cluster resources that the feed reserves: CPUs, GPUs, memory.
        skipped, skipped_total: samples left out, each once (the last thousand), and the number of omissions.
        notes: the last decisions, oldest first.
        ledgers, inexact_epochs: (consumer, ledger) of recently finished epochs; number of epochs that were not exact.
        staged_blocks, staged_bytes, staging_bytes: blocks and bytes staged or in preparation, and the budget.
        keeps_all: True if all epochs are the same and stay staged, so that each minibatch is prepared once.
        prepared_blocks, prepared_samples: prepared since the start, repetitions included; with several nodes each part
            of a block counts.
        remade_blocks: parts of blocks that were prepared more than once (a worker died, or a consumer was out of step).
        repeats: the samples of those parts, by cause.
        samples_ahead: prepared samples that no trial has received yet.
        delivered_samples: samples delivered, summed over present and former trials.
        cached_samples, cached_bytes, cache_bytes: samples in memory, encoded or decoded, and the budget.
        decoded, decoded_on_disk: the decoded ones, in memory and on disks.
        decoded_costs: costs and savings of caching a sample decoded, measured when the feed started; None if none are.
        nodes: the nodes with a cache of the feed.
        fetched: prepared samples since the start, by source: local memory, another node's memory, a disk tier, storage.
        fetch_s, prep_s: seconds that workers waited for bytes, and prepared, since the start, summed over workers.
        costs: CPU time of loading, and money if ``cpu_price_per_h`` is set.
        prediction_error: relative error of the last predicted epoch time (`mbaas.analysis`), measured on a later epoch:
            0.05 was 5 % too long; None without a prediction.
        internal_errors: bugs in mbaas that coordinators hit and survived.
        restarts: known restarts of the coordinator after it died.
        uptime_s: seconds since the feed started.
        start_s: seconds from start to open; None after a restart of the coordinator.
        failed: reason why the feed failed, or None.
    """

    name: str
    samples: int
    batch_size: int
    block_samples: int
    blocks_per_epoch: int
    engine: str
    consumers: tuple[ConsumerStatus, ...]
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
    pipelines: tuple[PipelineStatus, ...] = ()
    dali_share: float = 1.0
    worker_changes: tuple[WorkerChange, ...] = ()
    moves_s: tuple[float, ...] = ()
    lending: LendingStatus | None = None
    engine_choice: EngineChoice | None = None
    repeats: Repeats = field(default_factory=Repeats)
    samples_ahead: int = 0
    rank_steps: tuple[RankSteps, ...] = ()

    @property
    def state(self) -> str:
        """ "serving", "waiting" while no worker can prepare anything, or "failed"."""
        if self.failed is not None:
            return "failed"
        return "serving" if self.workers_at_work else "waiting"

    def __str__(self) -> str:
        """Return the main figures, a line each. `repr` has all values."""
        rows = self._facts()
        width = max(map(len, rows))
        return "\n".join([f"feed {self.name}", *(f"  {what:<{width}}  {text}" for what, text in rows.items())])

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        return table(f"Feed {self.name}", self._facts())

    def _facts(self) -> dict[str, str]:
        trials = {consumer.trial for consumer in self.consumers if consumer.state != "reserved"}
        costs = {}
        if ratio := self.costs.ratio:
            costs["cost"] = f"{units.percent(1 / ratio)} of the CPU time of a DataLoader in each trial"
        return {
            "state": self.failed or "; ".join([self.state, *self.waits_for]),
            "samples": f"{units.count(self.samples)}, in minibatches of {units.count(self.batch_size)}",
            "trials": units.some(sorted(trials)) or "none",
            "prepared": (
                f"{units.count(self.prepared_samples)} by {units.counted(len(self.workers), 'worker')}, {self.engine} "
                "engine"
            ),
            "delivered": f"{units.count(self.delivered_samples)}, {words(self.sharing)}",
            "staged": f"{units.size(self.staged_bytes)} of {units.size(self.staging_bytes)}",
            "cached": (
                f"{units.size(self.cached_bytes)} of {units.size(self.cache_bytes)}, {units.percent(self.hit_rate)} "
                "hits"
            ),
            **costs,
            "inexact epochs": units.count(self.inexact_epochs),
            "up": units.duration(self.uptime_s),
        }

    @property
    def sharing(self) -> Sharing:
        """Deliveries of prepared samples to trials; ranks count as one trial, and each receives a part of an epoch."""
        received: dict[str, int] = {}
        for consumer in self.consumers:
            if consumer.state != "reserved":
                received[consumer.trial] = received.get(consumer.trial, 0) + consumer.report.samples
        return Sharing(
            received,
            self.prepared_samples,
            self.delivered_samples,
            self.samples_ahead,
            self.repeats,
            max(1, len(self.pipelines)),
        )

    @property
    def hit_rate(self) -> float:
        """Fraction of prepared samples whose bytes came from a cache, 0 to 1."""
        return self.fetched.hit_rate
