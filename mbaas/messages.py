"""The values exchanged between processes: coordinators, prep workers, cache nodes and consumers. All are frozen.

They are separate from the actors, so that a trial that joins a feed imports no actor. Classes that users see, for
example as parts of a `FeedStatus`, are dataclasses. Internal messages and events are msgspec Structs: every process of
a feed creates these classes when it starts, which takes 0.6 ms for a dataclass and 0.05 ms for a Struct.

A sample has three forms between storage and a trial:

- ``encoded``: the stored bytes of one sample, such as a JPEG file: ``uint8[nbytes]``. A slab holds many of these end to
  end.
- ``arrays``: the prepared samples of a part of a block, field by field, as `mbaas.fields.Arrays`. A block consists of
  the arrays of its parts.
- ``minibatch``: the samples that a trial gets at once, cut from the arrays of one or more blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from zlib import crc32

import numpy as np
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from mbaas.errors import ConfigError, MbaasError, shown
from mbaas.fields import SAMPLE_ID, Field
from mbaas.memory.budgets import MemoryClaim
from mbaas.memory.part_memory import PartAddress
from mbaas.memory.slots import Slot, SlotColumn
from mbaas.model.balance import assign
from mbaas.model.forms import SampleCosts
from mbaas.order import MOST_NUMBER, Ids, OwnEpoch, SampleOrder, Shuffle, Whole
from mbaas.placement import BlockPart, Placement

if TYPE_CHECKING:  # a cache node needs neither, and starts faster without them
    from mbaas.settings import FeedSettings
    from mbaas.transforms import Pipeline

POLL_S = 10.0
"""Longest time until the coordinator answers a waiting call, if only with the reason for the wait."""

START_TIMEOUT_S = 90.0
"""Time limit for opening a feed; a lack of CPUs is reported after 30 s."""

TICK_S = 0.25
"""Period of the checks of leases, patience and task deadlines."""

EngineName = Literal["cpu", "dali"]
"""The engines that prepare samples."""

Seconds = Annotated[float, Meta(ge=0, le=MOST_NUMBER)]
"""A time; not NaN, because a single NaN would make sums over consumers NaN."""


# ---- sources of raw samples: local memory, another node's memory, a disk tier, storage ----


@dataclass(frozen=True)
class Amount:
    """A number of samples, and their bytes."""

    samples: int = 0
    nbytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.samples + other.samples, self.nbytes + other.nbytes)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.samples - other.samples, self.nbytes - other.nbytes)


@dataclass(frozen=True)
class FetchCounts:
    """Raw samples by source; the counts of several blocks, nodes or epochs can be added.

    Attributes:
        local: samples from the memory of the node that needed them.
        remote: samples from the memory of another node.
        disk: samples from a disk tier.
        storage: samples read from storage, including unreadable ones, which have no bytes.
        decoded: the subset of all samples that was already decoded, whose pipeline starts after its prefix.
    """

    local: Amount = Amount()
    remote: Amount = Amount()
    disk: Amount = Amount()
    storage: Amount = Amount()
    decoded: Amount = Amount()

    def __add__(self, other: FetchCounts) -> FetchCounts:
        return FetchCounts(
            self.local + other.local,
            self.remote + other.remote,
            self.disk + other.disk,
            self.storage + other.storage,
            self.decoded + other.decoded,
        )

    def __sub__(self, other: FetchCounts) -> FetchCounts:
        return FetchCounts(
            self.local - other.local,
            self.remote - other.remote,
            self.disk - other.disk,
            self.storage - other.storage,
            self.decoded - other.decoded,
        )

    @property
    def all(self) -> Amount:
        """All samples, from every source."""
        return self.local + self.remote + self.disk + self.storage

    @property
    def hit_rate(self) -> float:
        """Fraction of the samples that were not read from storage, 0 to 1; 0 before the first."""
        samples = self.all.samples
        return 1 - self.storage.samples / samples if samples else 0.0

    def from_afar(self) -> FetchCounts:
        """Return the same counts as seen by another node that requested them: local becomes remote."""
        return FetchCounts(Amount(), self.remote + self.local, self.disk, self.storage, self.decoded)


# ---- samples and blocks, as prep workers make them ----

ROW = "row"
"""Name of the array with a partial block's row numbers in the block: int64[n], ascending."""


class SampleSpec(Struct, frozen=True):
    """Fields of every prepared sample of a feed.

    Attributes:
        made: the field that prep makes from a sample's bytes: for images uint8 (height, width, 3), unless a Map changes
            that. If samples differ in one or more lengths, `Field.longest` bounds all of the samples.
        known: the fields of the dataset.
    """

    made: Field
    known: tuple[Field, ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields of a minibatch, in this order."""
        return (self.made, *self.known, SAMPLE_ID)

    @property
    def nbytes(self) -> int:
        """Size of one prepared sample in bytes."""
        return sum(field.nbytes for field in self.fields)


MUCH_LEFT_OUT = 0.1
"""Fraction of an epoch's samples above which skipped bad samples (``on_bad_sample="skip"``) cause a warning."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be prepared: id, source of its bytes, and a clause with the reason."""

    sample_id: Whole
    uri: str
    reason: str


class BlockMeta(Struct, frozen=True):
    """Metadata of a finished part of a block: counts, timings, bad samples.

    Attributes:
        block: global block number.
        epoch: epoch that determined the part's random numbers.
        samples: rows in the part.
        bad: samples that were left out (``on_bad_sample="skip"``), or the first bad one ("raise"; ``samples`` is 0
            then).
        fetch_s: seconds that prep waited for raw bytes.
        prep_s: seconds of decoding and transforming.
        fetched: the raw samples by source, as seen from the worker's node.
        nbytes: bytes of the staged arrays.
        away: a sample that storage may deliver later; the part was not made.
        cpu_s: CPU-seconds of all threads of the worker process for the feed so far.
        slot: position of the arrays, if they are not in Ray's object store.
    """

    block: int
    epoch: int
    samples: int
    bad: tuple[BadSample, ...]
    fetch_s: float
    prep_s: float
    fetched: FetchCounts
    nbytes: int
    away: BadSample | None = None
    cpu_s: float = 0.0
    slot: Slot | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the block that the part covers, including bad samples."""
        return self.samples + len(self.bad)


class DecodedCosts(Struct, frozen=True):
    """Costs and savings of decoded samples, averaged over the samples that were tried.

    Attributes:
        sample_s: time of one thread to prepare a sample from its stored form, in seconds.
        rest_s: the same from its decoded form.
        dataset_bytes: estimated bytes of all samples decoded: the upper end of a 95 % confidence interval.
    """

    sample_bytes: float
    sample_s: float
    rest_s: float
    dataset_bytes: float


class Probe(Struct, frozen=True):
    """Measurements of a feed's samples, made before the feed is laid out.

    Attributes:
        sample_s: time of a worker to prepare one sample, in seconds.
        read_s: seconds per sample that a node reads from storage, many at once.
        decoded: None if no decoded sample could be made.
    """

    spec: SampleSpec
    sample_s: float
    read_s: float
    decoded: DecodedCosts | None = None


class DecodedSamples(Struct, frozen=True):
    """Identity, costs and savings of a feed's decoded samples.

    Attributes:
        prefix: the transforms that made them, and the engine: equal for feeds with the same decoded samples.
        costs: of one sample.
        threads: that prepare on a node, in total.
        undecoded_share: fraction of the samples that DALI prepares next to the cpu engine, and which are never cached
            decoded; see `mbaas.order.in_share`.
    """

    prefix: str
    costs: SampleCosts
    threads: int
    undecoded_share: float = 0.0


class PrepConfig(Struct, frozen=True):
    """Settings with which a worker prepares a feed's samples.

    Attributes:
        threads: threads of the engine.
        on_bad_sample: "raise" ends a block at its first bad sample, "skip" leaves bad samples out.
        prep_s: the feed's ``timeouts.prep_s``, after which a worker without progress is considered stuck.
        shares_gpu: True if it works on a GPU that it has not reserved.
        dali_share: fraction of the samples that the dali engine prepares with DALI.
    """

    feed: str
    pipeline: Pipeline
    engine: EngineName
    seed: int
    threads: int
    on_bad_sample: str
    prep_s: float
    shares_gpu: bool = False
    dali_share: float = 1.0


class WorkerBrief(Struct, frozen=True):
    """Everything that a prep worker needs to work for a feed, except the dataset.

    The dataset is always a separate argument: Ray resolves a reference only at the top level of a call's arguments.
    """

    config: PrepConfig
    order: SampleOrder
    spec: SampleSpec


class WorkerLocation(Struct, frozen=True):
    """A worker's process id, its node, and the feed that it works for (idle: the feed that started it)."""

    pid: int
    node: str
    feed: str


# ---- messages between consumers and coordinators ----

# Each call of a consumer is described once, by a Struct: the consumer sends it encoded, and the coordinator decodes it
# (`mbaas.calls.wire`), which checks all types and bounds. So an invalid value raises an error in its call only.

MOST_NAME = 500
"""Longest consumer name, in characters."""

MOST_WANTED = 10_000
"""Longest list in a call: requested blocks, unreadable parts, ledgers, announced trials."""

MOST_POLL_S = 60
"""Longest time in seconds that a call may wait for blocks."""

MOST_RANKS = 65_536
"""Largest number of ranks of one trial."""

NodeId = Annotated[str, Meta(max_length=MOST_NAME)]
PollSeconds = Annotated[float, Meta(ge=0, le=MOST_POLL_S)]


def checked_name(name: str) -> str:
    """Return a valid name of a consumer. It appears in logs, in the status and in errors of other consumers.

    Raises:
        ConfigError: it is empty, too long or not printable.
    """
    # Line breaks would forge log lines, and lone surrogates cannot be written to a log; both are not printable.
    if not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise ConfigError(f"a consumer's name must be 1 to {MOST_NAME} printable characters, got {shown(name)}")
    return name


class ConsumerName(Struct, frozen=True):
    """Identity of a consumer: a trial, or one rank of a data-parallel trial.

    Attributes:
        trial: the name shared by all ranks of the trial.
        rank, world_size: 0 and 1 for a trial that is one consumer.
    """

    trial: Annotated[str, Meta(min_length=1)]
    rank: Whole = 0
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1

    def __str__(self) -> str:
        """Return the name under which the feed lists the consumer."""
        return self.trial if self.world_size == 1 else f"{self.trial}[{self.rank}]"


JoinStart = Literal["epoch", "now"]
"""Start of a consumer without a state: at the next epoch of the feed, or immediately."""


@dataclass(frozen=True)
class Claims:
    """Cluster resources that a feed reserves.

    Attributes:
        memory: upper bound for cache and staging in each node's object store.
        cpus, gpus: reserved by prep workers that the feed started, including lent ones.
    """

    memory: MemoryClaim
    cpus: float
    gpus: float


class FeedInfo(Struct, frozen=True):
    """Everything that a consumer needs to know about a feed.

    Attributes:
        fingerprint: hash of dataset, pipeline, seed and order; a saved state belongs to one fingerprint.
        normalize: the pipeline's `Normalize`, which runs in the consumer, or None.
        has_images: True if samples are images, which become channels-first in torch; other fields keep their axes.
        class_names: names of the labels.
        engine: that prepares the samples; another engine would produce different pixels.
        categories: field -> the strings that its numbers stand for, of categorical fields.
    """

    settings: FeedSettings
    order: SampleOrder
    spec: SampleSpec
    fingerprint: str
    normalize: Any
    has_images: bool
    class_names: tuple[str, ...]
    engine: EngineName
    categories: Mapping[str, tuple[str, ...]] = {}


class Resumption(Struct, frozen=True):
    """Position of a consumer in the middle of its own epoch, and that epoch's shuffle.

    Attributes:
        start: the first block that it needs.
        own_epoch: span of its own epoch.
        epoch: number of the stream's epoch with a known shuffle: the epoch of ``start``; or the one before, if the
            consumer needs the next epoch from its beginning.
        shuffle: of ``epoch``.
        taken: True if it has received part of its own epoch; otherwise it may begin elsewhere.
    """

    start: Whole
    own_epoch: OwnEpoch
    epoch: Whole
    shuffle: Shuffle
    taken: bool = True

    def moved(self, epochs: int, blocks_per_epoch: int) -> Resumption:
        """Return the same position in a stream whose epoch numbers are higher by ``epochs``."""
        by = epochs * blocks_per_epoch
        return replace(self, start=self.start + by, own_epoch=self.own_epoch.moved(by), epoch=self.epoch + epochs)


class Start(Struct, frozen=True):
    """Position where a consumer begins.

    Attributes:
        block: the first block; None for the next shared beginning of an epoch.
        flexible: True if it may begin a later epoch than the one at ``block``, to share it with others.
        now: True if it begins immediately at the position of the others, even in the middle of their epoch; with a
            ``block``, at their position from there on.
        resumed: span and shuffle of its own epoch, if ``block`` is in the middle of it.
    """

    block: Whole | None = None
    flexible: bool = False
    now: bool = False
    resumed: Resumption | None = None

    @property
    def is_exact(self) -> bool:
        """True if it must be exactly this block."""
        return self.block is not None and not self.flexible and not self.now


class JoinRequest(Struct, frozen=True):
    """A consumer's request to open a session.

    Attributes:
        node: id of the consumer's node: if the node dies, so does the consumer.
        born: creation of its loader, Unix time in nanoseconds. It distinguishes a trial that was restarted with another
            number of ranks from the remains of its earlier run.
    """

    name: ConsumerName
    start: Start
    node: NodeId = ""
    born: Whole = 0


class Admission(Struct, frozen=True):
    """The answer to a join.

    Attributes:
        session: the session's number; calls of an older session of the same consumer are refused.
        cursor: its first block.
        own_epoch: the consumer's own epoch.
    """

    session: int
    cursor: int
    own_epoch: OwnEpoch
    info: FeedInfo


class PartMeta(Struct, frozen=True, array_like=True):
    """The metadata of a part that consumers need; fields as in `BlockMeta`."""

    samples: Whole
    bad: tuple[BadSample, ...]
    fetch_s: Seconds
    prep_s: Seconds
    nbytes: Whole


class DeliveredPart(Struct, frozen=True, array_like=True):
    """One part of a block, in the memory of the node that made it.

    Attributes:
        meta: counts and timings.
        address: of its arrays; the coordinator keeps them until the consumer releases the block.
        number: its number in the block.
        task: the task that made it; a part that is made again has another task.
        node: id of the node that stores it.
        block_part: the home node of its samples, and the placement version by which it was cut.
    """

    meta: PartMeta
    address: PartAddress
    number: Whole
    task: Whole
    node: str
    block_part: BlockPart


class DeliveredBlock(Struct, frozen=True, array_like=True):
    """A block that was made, or could not be made.

    Attributes:
        number: the block's.
        shuffle: of the block's epoch.
        parts: all parts; empty if the block could not be made.
        error: reason why it could not be made, such as a bad sample.
        is_new: True if no consumer had it before: it was prepared for this one.
    """

    number: Whole
    shuffle: Shuffle
    parts: tuple[DeliveredPart, ...]
    error: MbaasError | None = None
    is_new: bool = False


class UnreadablePart(Struct, frozen=True):
    """A part of a block that can no longer be read, and the task that made it; -1: no task yet."""

    block: Whole
    part: Whole
    task: Annotated[int, Meta(ge=-1, le=MOST_NUMBER)]


class _SessionCall(Struct, frozen=True):
    consumer: str
    session: Whole

    def __post_init__(self) -> None:
        checked_name(self.consumer)


class Ask(_SessionCall, frozen=True):
    """A consumer requests up to ``want`` blocks from ``cursor`` on.

    Attributes:
        released: the memory of all blocks below is released.
        done: all blocks below are finished.
        number: counts a session's calls about its cursor, so that a call overtaken by a later one has no effect; 0 for
            no number.
        began: first block of the consumer's epoch at ``cursor``; None if the consumer does not track epochs.
        unheld: (first, end) of blocks between ``released`` and ``cursor`` that it has read and does not hold.
    """

    cursor: Whole
    released: Whole
    done: Whole
    want: Annotated[int, Meta(ge=1, le=MOST_WANTED)] = 1
    number: Whole = 0
    began: Whole | None = None
    unheld: tuple[Whole, Whole] | None = None


class HandBack(_SessionCall, frozen=True):
    """A consumer returns its unused blocks from ``cursor`` on; it will request them again when needed.

    ``number`` as in `Ask`.
    """

    cursor: Whole
    released: Whole
    number: Whole = 0


class Heartbeat(_SessionCall, frozen=True):
    """A consumer is alive, perhaps busy with a long step; ``released`` and ``done`` as in `Ask`."""

    released: Whole
    done: Whole


class Leave(Struct, frozen=True):
    """A consumer is done. ``session`` None ends its current session and, for a trial, the sessions of its ranks.

    ``successors`` is the number of trials still to come; one gets a reservation, unless there are enough already. The
    reservation is at the start of the next epoch, or at this consumer's end if trials start immediately.
    """

    consumer: str
    session: Whole | None = None
    successors: Whole = 0

    def __post_init__(self) -> None:
        checked_name(self.consumer)


class BlockCall(Struct, frozen=True):
    """A consumer's call for blocks.

    Attributes:
        poll_s: seconds until an answer is due, even an empty one.
        unreadable: delivered parts that it could not read.
    """

    ask: Ask
    poll_s: PollSeconds
    unreadable: Annotated[tuple[UnreadablePart, ...], Meta(max_length=MOST_WANTED)] = ()


class Delivery(Struct, frozen=True, array_like=True):
    """The answer to a call for blocks.

    Attributes:
        blocks: in the order of the feed; empty if none is ready, or on an error.
        peer_idle_s: idle time of prep because of other consumers since the last answer with blocks, in seconds.
        as_copy: True if blocks must be copied when read, so that their memory is not pinned.
        waits_for: the reason for an empty answer, as a clause.
        progress: a number that changes whenever the feed makes progress; a wait without progress has a deadline.
        error: the reason why this session gets no more blocks.
        expelled: True if the error ends this session only: the consumer may join again at its cursor.
        socket: in an answer through Ray: path of the socket on the consumer's machine for further calls, which bypass
            Ray; see `mbaas.calls.socket`. None without a socket.
    """

    blocks: tuple[DeliveredBlock, ...] = ()
    peer_idle_s: Seconds = 0.0
    as_copy: bool = False
    waits_for: str = ""
    progress: Whole = 0
    error: MbaasError | None = None
    expelled: bool = False
    socket: str | None = None


class SocketCall(Struct, frozen=True, array_like=True):
    """A message to a coordinator over a socket.

    Attributes:
        number: the consumer's number of the call.
        call: an encoded `BlockCall`, checked later, so that its sender gets an error that names the invalid value.
    """

    number: Whole
    call: Raw


class SocketAnswer(Struct, frozen=True, array_like=True):
    """A coordinator's answer to a `SocketCall`.

    Attributes:
        number: of the call.
        delivery: None if the call must be made through Ray.
        error: raised by the call.
    """

    number: Whole
    delivery: Delivery | None = None
    error: MbaasError | None = None


class SentError(Struct, frozen=True, array_like=True):
    """An `MbaasError` in a message.

    Attributes:
        kind: name of its class.
        fields: its attributes.
    """

    kind: str
    message: str
    fields: dict[str, str | int | float | bool] = {}


MOST_SHUFFLED = 200
"""Upper bound on the characters of `EpochLedger.shuffled`, to keep ledgers small."""

Hash = Annotated[int, Meta(ge=0)]
"""64 bits without a sign; msgpack has no larger numbers."""


@dataclass(frozen=True)
class EpochLedger:
    """Samples that one consumer received in one epoch, and the expected ones.

    Attributes:
        epoch: the consumer's own count of epochs, from 0.
        feed_epoch: the feed's epoch, which determines order and transforms.
        samples: samples received.
        id_hash: order-independent hash of their ids (`mbaas.order.id_hash`).
        expected_samples, expected_id_hash: the same for the whole epoch, without samples left out as bad.
        seconds: from the beginning of the consumer's loop until its last minibatch was returned; 0 if the loop held
            only the rest of the epoch.
        begin: the position in the feed's epoch at which the epoch began; above 0 if the consumer joined mid-epoch.
        shuffled: shuffle of the feed's epoch that contains the end of the last minibatch (`mbaas.order.Shuffle.text`).
            With the seed and ``begin``, it determines the contents of every minibatch. At most `MOST_SHUFFLED`
            characters.
    """

    epoch: Whole
    feed_epoch: Whole
    samples: Whole
    id_hash: Hash
    expected_samples: Whole
    expected_id_hash: Hash
    # Not compared: two ledgers are equal if their epochs had the same samples.
    seconds: Seconds = field(default=0.0, compare=False)
    begin: Whole = field(default=0, compare=False)
    shuffled: Annotated[str, Meta(max_length=MOST_SHUFFLED)] = field(default="", compare=False)

    @property
    def exact(self) -> bool:
        """True if each sample of the epoch was received exactly once."""
        return (self.samples, self.id_hash) == (self.expected_samples, self.expected_id_hash)


class LedgerEntry(Struct, frozen=True):
    """The ledger of one epoch of one consumer.

    Attributes:
        loader: id that distinguishes loaders of the same name.
        number: epochs that the loader had finished before. This differs from ``ledger.epoch`` if a trial loads an older
            state and repeats an epoch.
        at: arrival of the ledger, Unix time in seconds.
    """

    consumer: str
    loader: str
    number: int
    at: float
    ledger: EpochLedger


@dataclass(frozen=True)
class ReadBytes:
    """Bytes of prepared samples that a consumer read, from its own node and from others."""

    local: Whole = 0
    remote: Whole = 0

    def __add__(self, other: ReadBytes) -> ReadBytes:
        return ReadBytes(self.local + other.local, self.remote + other.remote)

    def __sub__(self, other: ReadBytes) -> ReadBytes:
        return ReadBytes(self.local - other.local, self.remote - other.remote)


@dataclass(frozen=True)
class ConsumerReport:
    """A consumer's totals, sent with each heartbeat.

    Attributes:
        loader: id that distinguishes loaders of the same name; all numbers are totals over one loader's life.
        samples: delivered to the trial since it joined.
        prepared: samples prepared for this consumer, without samples that another trial had received before; samples
            shared by ranks count for one rank only.
        wait_s: seconds that the trial waited for data (its data stall).
        fetch_stall_s: the part of ``wait_s`` with prep waiting for bytes.
        peer_stall_s: the part of ``wait_s`` with prep idle because of other trials; the rest is prep stall.
        step_s: seconds that the trial worked between minibatches.
        read_bytes: of prepared samples that were read for it.
        ledgers: of finished epochs that have not been acknowledged.
        first_ledger: number of epochs that the loader had finished before the first ledger.
        time_to_first_batch_s: seconds from `mbaas.join` to the first minibatch; 0 before that.
    """

    loader: Annotated[str, Meta(max_length=MOST_NAME)] = ""
    samples: Whole = 0
    prepared: Whole = 0
    wait_s: Seconds = 0.0
    fetch_stall_s: Seconds = 0.0
    peer_stall_s: Seconds = 0.0
    step_s: Seconds = 0.0
    read_bytes: ReadBytes = ReadBytes()
    ledgers: Annotated[tuple[EpochLedger, ...], Meta(max_length=MOST_WANTED)] = ()
    first_ledger: Whole = 0
    time_to_first_batch_s: Seconds = 0.0

    def plus(self, other: ConsumerReport) -> ConsumerReport:
        """Return the sums of both reports; other fields get their defaults."""
        return ConsumerReport(**{name: getattr(self, name) + getattr(other, name) for name in _SUMS})

    def since(self, before: ConsumerReport) -> ConsumerReport:
        """Return the difference to an earlier report of the same loader; other fields get their defaults."""
        return ConsumerReport(self.loader, **{name: getattr(self, name) - getattr(before, name) for name in _SUMS})

    def is_older_than(self, other: ConsumerReport) -> bool:
        """Return whether this is an earlier report of the same loader."""
        done = (self.samples, self.wait_s + self.step_s)
        return self.loader == other.loader and done < (other.samples, other.wait_s + other.step_s)

    @property
    def prep_stall_s(self) -> float:
        """The part of ``wait_s`` with prep computing."""
        return max(0.0, self.wait_s - self.fetch_stall_s - self.peer_stall_s)

    @property
    def stall_share(self) -> float:
        """Fraction of the trial's time spent waiting for data, 0 to 1."""
        total = self.wait_s + self.step_s
        return self.wait_s / total if total > 0 else 0.0


_NO_SUMS = ("loader", "ledgers", "first_ledger", "time_to_first_batch_s")
_SUMS = tuple(field.name for field in fields(ConsumerReport) if field.name not in _NO_SUMS)
"""The fields of a report that are totals over the loader's life."""

# ---- ranks of data-parallel trials ----


class RankPlan(Struct, frozen=True):
    """Division of an epoch's minibatches among ranks.

    Attributes:
        nodes: the id of each rank's node.
        placement: None if only one node prepares samples.
        shuffle: of the epoch, as found by the first rank that had a block of this epoch; None before that.
    """

    nodes: tuple[str, ...]
    placement: Placement | None = None
    shuffle: Shuffle | None = None

    def ranks(self, sample_ids: Ids, first: int = 0) -> NDArray[np.int64]:
        """Return the rank that gets each sample: int64[n] -> int64[n], in [0, ranks).

        Args:
            sample_ids: the samples of a minibatch, or of a part of one.
            first: samples of the minibatch that were assigned before these, so that the whole minibatch is divided
                evenly.
        """
        p = len(self.nodes)
        # `assign` gives the remainder to the first ranks, so each run begins with another rank.
        turn = np.roll(np.arange(p), -(first % p))
        node_weights = () if self.placement is None else self.placement.nodes
        known = sorted({*self.nodes, *node_weights})
        rank_nodes = np.array([known.index(node) for node in self.nodes])[turn]
        if self.placement is None:
            placement = np.full(len(sample_ids), rank_nodes[0])
        else:
            placement = np.array([known.index(node) for node in node_weights])[self.placement.of(sample_ids)]
        return turn[assign(placement, rank_nodes=rank_nodes)]


class RankReport(Struct, frozen=True):
    """One rank's report of itself, sent with every session.

    Attributes:
        name: trial and rank.
        batch_size: samples in a minibatch of all ranks; ranks with another size belong to another trial.
        session: number of its session.
        node: id of its node.
        cursor: the first block of its session.
        floats: True if it may begin at another epoch, together with the others.
        aside: difference between the number of its epoch and the epoch whose order it uses; 0 except in epochs outside
            of the stream (`mbaas.order.ASIDE`).
        due: the next block according to its state, if that was saved between two epochs.
    """

    name: ConsumerName
    batch_size: Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
    session: Whole
    node: NodeId
    cursor: Whole
    floats: bool
    aside: Whole = 0
    due: Whole | None = None

    @property
    def consumer(self) -> str:
        """The name under which the feed lists it."""
        return str(self.name)

    @property
    def rank(self) -> int:
        """Its number among the ranks of its trial."""
        return self.name.rank

    @property
    def group(self) -> tuple[str, int, int]:
        """Key shared by all ranks of one trial: (trial, world size, batch size)."""
        return self.name.trial, self.name.world_size, self.batch_size


class RankCall(Struct, frozen=True):
    """A rank's request for the division of an epoch's minibatches.

    Attributes:
        poll_s: seconds to wait for missing ranks.
        shuffle: of the epoch, if the rank has a block of it.
    """

    report: RankReport
    epoch: Whole
    poll_s: PollSeconds
    shuffle: Shuffle | None = None


class RankOrders(Struct, frozen=True):
    """The answer to a `RankCall`.

    Attributes:
        plan: the plan for the requested epoch; None while ranks are missing.
        start: its first block; its own cursor unless its session floats.
        missing: ranks that have not joined; includes the requesting rank if its session is not open.
        caches: node id -> handle of its cache node, which returns rows.
        others: missing ranks that joined with another batch size -> that size.
        ahead: ranks that are past the epoch, whose plan is no longer available.
    """

    plan: RankPlan | None
    start: int
    missing: tuple[int, ...]
    caches: Mapping[str, Any]
    others: Mapping[int, int] = {}
    ahead: tuple[int, ...] = ()


def _protocol() -> str:
    # Changes with the messages of this module, their fields and the fields' types.
    here = [each for each in globals().values() if isinstance(each, type) and each.__module__ == __name__]
    kinds = [*here, *get_args(PartAddress), SlotColumn]
    said = sorted((kind.__name__, [*inspect.get_annotations(kind).items()]) for kind in kinds)
    return f"{crc32(repr(said).encode()):08x}"


PROTOCOL = _protocol()
"""Hash of the message types, 8 hex digits. Programs can communicate only if their values are equal; it differs between
versions of mbaas."""
