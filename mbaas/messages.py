"""The values that cross from one process to another: what coordinators, prep workers, cache nodes and consumers say.

They live apart from the actors that say them, so that a trial which joins a feed imports no actor. All are frozen.
Those that users see, as parts of a `FeedStatus` for example, are dataclasses. What only mbaas itself says is a Struct
of msgspec, and so are the events of its cores: each process of a feed makes these classes anew when it starts, and a
dataclass takes 0.6 ms of that, a Struct 0.05.

What becomes of a sample has three names on the way from storage to a trial, and each means one thing everywhere:

- ``encoded``: the bytes of one sample as they lie in storage, such as those of a JPEG file: ``uint8[nbytes]``. A slab
  holds many of them end to end.
- ``arrays``: the prepared samples of a part of a block, field by field, as `mbaas.fields.Arrays`. A block is the
  arrays of its parts.
- ``minibatch``: the samples that a trial gets at once, cut from the arrays of one block or several.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from mbaas.allocation.balance import assign
from mbaas.allocation.forms import SampleCosts
from mbaas.budgets import MemoryClaim
from mbaas.errors import MbaasError
from mbaas.fields import SAMPLE_ID, Field
from mbaas.order import Ids, OwnEpoch, SampleOrder, Shuffle
from mbaas.placement import BlockPart, Placement

if TYPE_CHECKING:  # a cache node needs neither, and is up sooner without them
    from mbaas.settings import FeedSettings
    from mbaas.transforms import Pipeline

POLL_S = 10.0
"""The coordinator answers a waiting call after this long at the latest, if only to say why there is nothing yet."""

START_TIMEOUT_S = 90.0
"""A feed that has not opened after this long is given up; a lack of CPUs is noticed after 30 s."""

TICK_S = 0.25
"""The period at which leases, patience and task deadlines are looked at, and at which lanes compare notes."""

EngineName = Literal["cpu", "dali"]
"""The engines that prepare samples."""


# ---- where the bytes of raw samples come from: own memory, another node's memory, a disk tier, storage ----


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
    """Raw samples by where their bytes came from; the counts of several blocks, nodes or epochs add up.

    Attributes:
        local: samples that lay in the memory of the node that needed them.
        remote: samples that came from the memory of another node.
        disk: samples that came from a disk tier.
        storage: samples that were read from storage, those included that could not be read; these have no bytes.
        decoded: those of all these that came decoded, so that their pipeline begins after its prefix.
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
        """All samples, wherever they came from."""
        return self.local + self.remote + self.disk + self.storage

    @property
    def hit_rate(self) -> float:
        """The share of the samples for which storage was not asked, 0 to 1; 0 before the first."""
        samples = self.all.samples
        return 1 - self.storage.samples / samples if samples else 0.0

    def from_afar(self) -> FetchCounts:
        """Count the same samples for another node that asked for them: what was local here is remote there."""
        return FetchCounts(Amount(), self.remote + self.local, self.disk, self.storage, self.decoded)


@dataclass(frozen=True)
class FetchSpeeds:
    """What one thread of a node gets from each tier, in bytes/s, beside all others that read there.

    None means that it is not known yet. The names are those of `FetchCounts`.
    """

    local: float | None = None
    remote: float | None = None
    disk: float | None = None
    storage: float | None = None


# ---- samples and blocks, as prep workers make them ----

ROW = "row"
"""Name of an array beside the fields of a part of a block that is not all of it: which rows of the block these are,
int64[n], ascending."""


class SampleSpec(Struct, frozen=True):
    """What every prepared sample of a feed looks like.

    Attributes:
        made: the field that prep makes of a sample's bytes: of images uint8 (height, width, 3), unless a Map makes
            something else. If samples differ in their first length, or in several, `Field.longest` bounds all of them.
        known: the fields that the dataset knows.
    """

    made: Field
    known: tuple[Field, ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        """All that a minibatch has, in this order."""
        return (self.made, *self.known, SAMPLE_ID)

    @property
    def nbytes(self) -> int:
        """Size of one prepared sample in bytes."""
        return sum(field.nbytes for field in self.fields)


MUCH_LEFT_OUT = 0.1
"""Above this share of an epoch's samples, to leave out bad ones (``on_bad_sample="skip"``) is more than a blemish, and
is said in words."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be prepared: its id, where its bytes come from, and one clause that says why."""

    sample_id: int
    uri: str
    reason: str


class SlotColumn(Struct, frozen=True):
    """Where an array lies in a slot.

    Attributes:
        name: of the field; a `Packed` one has several arrays.
        at: the first byte, from the slot's beginning.
        dtype: NumPy's text for it.
        shape: of the array.
    """

    name: str
    at: int
    dtype: str
    shape: tuple[int, ...]


class Slot(Struct, frozen=True):
    """A block's arrays in the memory of the worker that made them; see `mbaas.slots`.

    Attributes:
        path: under which processes of its node open that memory.
        token: 16 random bytes at the beginning of that memory: what has this path may be another process's, or another
            machine's.
        number: of the slot.
        begin, nbytes: where it lies in that memory.
        written: how often the slot had been written when the arrays were in it.
        columns: the arrays.
        packed: names of the fields that are `Packed`.
    """

    path: str
    token: bytes
    number: int
    begin: int
    nbytes: int
    written: int
    columns: tuple[SlotColumn, ...]
    packed: tuple[str, ...] = ()


class BlockMeta(Struct, frozen=True):
    """What the coordinator learns of a finished part of a block, without its pixels.

    Attributes:
        block: global block number.
        epoch: number of the epoch from which chance in it followed.
        samples: rows in the part.
        bad: samples that were left out (``on_bad_sample="skip"``), or the first bad one ("raise"; ``samples`` is 0
            then).
        fetch_s: seconds that prep waited for raw bytes.
        prep_s: seconds of decoding and transforming.
        fetched: the raw samples, by where their bytes came from, as the worker's node sees it.
        nbytes: bytes of the staged arrays.
        away: a sample that storage does not give, and may give later: nothing was made.
        cpu_s: CPU-seconds that the worker's process took for the feed until then, of all of its threads.
        slot: where the arrays lie, if that is not Ray's object store.
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
        """Number of rows of the block that the part stands for, those that were left out included."""
        return self.samples + len(self.bad)


class DecodedCosts(Struct, frozen=True):
    """What decoded samples cost and save, on average over the samples that were tried.

    Attributes:
        sample_bytes: bytes of one.
        sample_s: seconds that one thread takes to prepare a sample from what storage has.
        rest_s: the same from its decoded form.
        dataset_bytes: estimated bytes of all samples decoded: the upper end of a 95 % confidence interval.
    """

    sample_bytes: float
    sample_s: float
    rest_s: float
    dataset_bytes: float


class Probe(Struct, frozen=True):
    """What is learned of a feed's samples before it is laid out.

    Attributes:
        spec: shape and dtype of a prepared sample.
        sample_s: seconds that a worker takes to prepare one.
        read_s: seconds that a node takes for each sample that it reads from storage, many at once.
        decoded: what decoded samples cost; None if none could be made.
    """

    spec: SampleSpec
    sample_s: float
    read_s: float
    decoded: DecodedCosts | None = None


class DecodedSamples(Struct, frozen=True):
    """What the decoded samples of a feed are, and what it costs and saves to keep them.

    Attributes:
        prefix: the transforms that made them, and the engine: equal for feeds whose decoded samples are the same.
        costs: of a sample.
        threads: that prepare on a node, all together.
        undecoded_share: of the samples, which DALI makes beside the cpu engine, and of which none is kept decoded; see
            `mbaas.order.in_share`.
    """

    prefix: str
    costs: SampleCosts
    threads: int
    undecoded_share: float = 0.0


class PrepConfig(Struct, frozen=True):
    """How a feed's samples are prepared: what a worker must know before it can try one.

    Attributes:
        feed: its name.
        pipeline: what is done to each sample.
        engine: the engine that does it.
        seed: the seed of the feed; random transforms depend on it.
        threads: how many the engine has.
        on_bad_sample: "raise" ends a block at its first bad sample, "skip" leaves bad samples out.
        prep_s: the feed's ``timeouts.prep_s``, after which a worker that makes no progress is taken for stuck.
        shares_gpu: whether it works on a GPU of which it reserves nothing.
        dali_share: of the samples, which the dali engine makes with DALI.
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
    """All that a prep worker must know to work for a feed, except the dataset.

    The dataset is an argument of its own wherever a brief goes: Ray turns a reference into its object only there.

    Attributes:
        config: how samples are prepared.
        order: the order of the feed's samples, cut into blocks.
        spec: what a prepared sample looks like.
    """

    config: PrepConfig
    order: SampleOrder
    spec: SampleSpec


class WorkerLocation(Struct, frozen=True):
    """A worker's process id, the node where it runs, and the feed for which it works (idle: that started it)."""

    pid: int
    node: str
    feed: str


# ---- lanes ----


class Lane(Struct, frozen=True):
    """One lane, and its blocks: its own block 0, 1, 2, ... against their numbers in the feed.

    Attributes:
        feed_blocks: blocks in an epoch of the feed; at least ``lanes``.
        number: which lane it is, in [0, lanes).
        lanes: how many the feed has.
    """

    feed_blocks: int
    number: int = 0
    lanes: int = 1

    @property
    def blocks_per_epoch(self) -> int:
        """Number of the lane's own blocks in an epoch."""
        return -(-(self.feed_blocks - self.number) // self.lanes)

    def feed_block(self, own: int) -> int:
        """Return the feed's number of the lane's own block."""
        # Lanes are dealt out anew in every epoch, so each lane has the same number of blocks in all of them.
        epoch, index = divmod(own, self.blocks_per_epoch)
        return epoch * self.feed_blocks + index * self.lanes + self.number

    def first_from(self, block: int) -> int:
        """Return the lane's own number of its first block that is, or comes after, the feed's ``block``."""
        epoch, index = divmod(block, self.feed_blocks)
        # minus the floor of the opposite is the ceiling: the lane's blocks of this epoch that come before
        return epoch * self.blocks_per_epoch - (self.number - index) // self.lanes

    def has(self, block: int) -> bool:
        """Return whether the feed's ``block`` is one of the lane's."""
        return block % self.feed_blocks % self.lanes == self.number


# ---- what consumers and coordinators say to each other ----

MOST_NAME = 500
"""Characters of a consumer's name."""


class ConsumerName(Struct, frozen=True):
    """Who a consumer is: a trial, or one rank of a data-parallel trial.

    Attributes:
        trial: the name that all ranks of the trial have in common.
        rank, world_size: 0 and 1 for a trial that is one consumer.
    """

    trial: str
    rank: int = 0
    world_size: int = 1

    def __str__(self) -> str:
        """Return the name under which the feed knows the consumer, and shows it."""
        return self.trial if self.world_size == 1 else f"{self.trial}[{self.rank}]"


JoinStart = Literal["epoch", "now"]
"""Where a consumer begins that brings no state: with an epoch of the feed, or at once."""


@dataclass(frozen=True)
class Claims:
    """What a feed keeps of its cluster for itself.

    Attributes:
        memory: what cache and staging may take of each node's object store.
        cpus, gpus: reserved by prep workers that the feed started, lent ones included.
    """

    memory: MemoryClaim
    cpus: float
    gpus: float


class FeedInfo(Struct, frozen=True):
    """What a consumer must know of a feed.

    Attributes:
        settings: the feed's options.
        order: the order of its samples, cut into blocks.
        spec: what a prepared sample looks like.
        fingerprint: hash of dataset, pipeline, seed and order; a saved state belongs to one fingerprint.
        normalize: the pipeline's `Normalize`, which runs on the consumer's side, or None.
        has_images: whether samples are images, which become channels-first as torch; everything else stays as it is.
        class_names: names of the labels.
        categories: field -> what its numbers stand for, of the fields of categories.
        engine: that prepares the samples; another one would make other pixels of them.
        lanes: coordinators of the lanes after the first; none in a feed of one lane.
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
    lanes: tuple[Any, ...] = ()


class Resumption(Struct, frozen=True):
    """Where a consumer goes on in the middle of its own epoch, and how that epoch is shuffled.

    Attributes:
        start: the first block that it needs.
        own_epoch: where its own epoch lies.
        epoch: number of the stream's epoch whose shuffle it knows: that of ``start``; or the one before, if it needs
            the next epoch from its beginning on.
        shuffle: of that epoch.
        taken: whether it has taken anything of its own epoch; one that has not may begin elsewhere.
    """

    start: int
    own_epoch: OwnEpoch
    epoch: int
    shuffle: Shuffle
    taken: bool = True

    def moved(self, epochs: int, blocks_per_epoch: int) -> Resumption:
        """Return the same where the stream's epochs have numbers that are higher by ``epochs``."""
        by = epochs * blocks_per_epoch
        return replace(self, start=self.start + by, own_epoch=self.own_epoch.moved(by), epoch=self.epoch + epochs)


class Start(Struct, frozen=True):
    """Where a consumer begins.

    Attributes:
        block: the first block; None for an epoch's beginning, whichever is shared.
        flexible: whether it may also begin a later epoch than that which begins at ``block``, to share it with others.
        now: whether it begins at once wherever others are, in the middle of their epoch if need be; with a ``block``,
            where they are from there on.
        resumed: where ``block`` is in the middle of its own epoch, where that lies and how it is shuffled.
    """

    block: int | None = None
    flexible: bool = False
    now: bool = False
    resumed: Resumption | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it must be this very block."""
        return self.block is not None and not self.flexible and not self.now

    def of_lane(self, lane: Lane) -> Start:
        """Return the same in the own blocks of one of several lanes, where consumers begin when epochs do."""
        if lane.lanes == 1:
            return self
        return Start(None if self.block is None else lane.first_from(self.block), self.flexible)


class JoinRequest(Struct, frozen=True):
    """What a consumer says when it opens a session in a lane.

    Attributes:
        name: who it is.
        start: where it begins, in the lane's own blocks.
        node: id of the node where it runs: if that dies, so does the consumer.
        born: when its loader was made, Unix time in nanoseconds. It tells a trial that was started again with another
            number of ranks from what is left of its earlier run.
    """

    name: ConsumerName
    start: Start
    node: str = ""
    born: int = 0


class Admission(Struct, frozen=True):
    """The answer to a join.

    Attributes:
        session: the session's number; calls of an older one of the same consumer are refused.
        cursor: its first block, in the lane's own count.
        own_epoch: where the consumer's own epoch lies, in the lane's own count.
        info: what the consumer must know of the feed.
        lane: the lane that it joined.
    """

    session: int
    cursor: int
    own_epoch: OwnEpoch
    info: FeedInfo
    lane: Lane


class DeliveredPart(Struct, frozen=True):
    """One part of a block, in the memory of the node that made it.

    Attributes:
        meta: what it holds.
        refs: the reference to its `Arrays`, or none if it ended in an error; on the way to consumers it is
            `mbaas.uncounted.Uncounted`. In a list, because Ray replaces a bare reference in a call's arguments by the
            object, which nobody needs on the way. Where the arrays lie in a slot of the worker's memory: the
            `mbaas.slots.HeldSlot`, and on the way its `Slot`.
        number: its number in the block.
        task: the task that made it; a part that is made again has another one.
        node: id of the node where it lies.
        block_part: the home of its samples, and the version of the placement by which it was cut.
    """

    meta: BlockMeta
    refs: list[Any]
    number: int
    task: int
    node: str
    block_part: BlockPart


class DeliveredBlock(Struct, frozen=True):
    """A block that is made, or could not be made.

    Attributes:
        number: the block's, in the lane's own count.
        shuffle: of the block's epoch.
        parts: all of them; or, if there are bad samples, those without arrays, which say which.
        error: why it could not be made, if that is not a bad sample.
        is_new: whether nobody was given it before: it was prepared for this consumer.
    """

    number: int
    shuffle: Shuffle
    parts: tuple[DeliveredPart, ...]
    error: MbaasError | None = None
    is_new: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether it holds no samples, because one of them is bad or because it could not be made."""
        return self.error is not None or not all(part.refs for part in self.parts)


class UnreadablePart(Struct, frozen=True):
    """A part of a block that cannot be read any more, and the task that made it."""

    block: int
    part: int
    task: int


class BlockCall(Struct, frozen=True):
    """A consumer's call for blocks.

    Attributes:
        consumer, session: who calls.
        cursor, released, done, want, number, began, unheld: see `mbaas.core.events.Ask`.
        poll_s: seconds after which it wants an answer, even if that brings nothing.
        unreadable: parts of blocks that it was given and could not read.
    """

    consumer: str
    session: int
    cursor: int
    released: int
    done: int
    want: int
    poll_s: float
    unreadable: tuple[UnreadablePart, ...]
    number: int
    began: int | None
    unheld: tuple[int, int] | None

    def plain(self) -> list[Any]:
        """Return one list of plain values, as `mbaas.core.calls.block_call` takes it.

        Ray packs each argument of a call by itself, and all but plain values by pickle. That costs a trial and the
        coordinator 0.2 ms each, for every block.
        """
        unreadable = [[part.block, part.part, part.task] for part in self.unreadable]
        unheld = None if self.unheld is None else list(self.unheld)
        # fmt: off
        return [
            self.consumer, self.session, self.cursor, self.released, self.done, self.want, self.poll_s,
            unreadable, self.number, self.began, unheld,
        ]
        # fmt: on


class Delivery(Struct, frozen=True):
    """The answer to a call that asked for blocks.

    Attributes:
        blocks: in the order of the feed; empty if there is nothing yet, or on an error.
        peer_idle_s: seconds since the last answer with blocks in which prep was idle because of other consumers.
        as_copy: whether the blocks must be copied when they are read, so that nothing of them is held.
        waits_for: if there is nothing yet, a clause that says why.
        progress: a number that changes whenever the feed does something; a wait without change has a deadline.
        error: why there will be nothing more in this session.
        expelled: whether the error ends this session only: the consumer may join again at its cursor.
        socket: of an answer through Ray, where on the consumer's machine it may call from now on, instead of through
            Ray; see `mbaas.local_socket`. None if there is no such place.
    """

    blocks: tuple[DeliveredBlock, ...] = ()
    peer_idle_s: float = 0.0
    as_copy: bool = False
    waits_for: str = ""
    progress: int = 0
    error: MbaasError | None = None
    expelled: bool = False
    socket: str | None = None


class SocketAnswer(Struct, frozen=True):
    """What a coordinator answers to a call for blocks that came over a socket.

    Attributes:
        number: what the consumer numbered the call with.
        delivery: the answer; None if the call must be made through Ray.
        error: what the call raised instead.
    """

    number: object
    delivery: Delivery | None = None
    error: MbaasError | None = None


MOST_SHUFFLED = 200
"""Characters that say how an epoch was shuffled; a ledger is small."""


@dataclass(frozen=True)
class EpochLedger:
    """What one consumer received in one epoch, against what the epoch holds.

    Attributes:
        epoch: the consumer's own count of epochs, from 0.
        feed_epoch: the feed's epoch, which fixes order and transforms.
        samples: samples received.
        id_hash: order-independent hash of their ids (`mbaas.order.id_hash`).
        expected_samples, expected_id_hash: the same of what the epoch must hold, without samples left out as bad.
        seconds: from the beginning of the consumer's loop until its last minibatch was handed out; 0 if the loop held
            only the rest of the epoch.
        begin: the position in the feed's epoch at which the epoch began; above 0 if the consumer began in the middle.
        shuffled: how the feed's epoch was shuffled in which the last minibatch ends (`mbaas.order.Shuffle.text`); with
            the seed and ``begin`` it says what every minibatch of the epoch held. At most `MOST_SHUFFLED` characters.
    """

    epoch: int
    feed_epoch: int
    samples: int
    id_hash: int
    expected_samples: int
    expected_id_hash: int
    # These say nothing of what the epoch held: two epochs are equal if they held the same.
    seconds: float = field(default=0.0, compare=False)
    begin: int = field(default=0, compare=False)
    shuffled: str = field(default="", compare=False)

    @property
    def exact(self) -> bool:
        """Whether each sample of the epoch was received exactly once."""
        return (self.samples, self.id_hash) == (self.expected_samples, self.expected_id_hash)


class LedgerEntry(Struct, frozen=True):
    """The ledger of one epoch of one consumer.

    Attributes:
        consumer: its name.
        loader: tells loaders of one name apart.
        number: how many epochs the loader had finished before. Not ``ledger.epoch``: a trial that loads an older state
            has an epoch twice.
        at: when the ledger arrived, Unix time in seconds.
        ledger: what it says.
    """

    consumer: str
    loader: str
    number: int
    at: float
    ledger: EpochLedger


@dataclass(frozen=True)
class ReadBytes:
    """Bytes of prepared samples that a consumer read, by where they lay.

    Attributes:
        local: in the memory of the consumer's own node.
        remote: on other nodes.
    """

    local: int = 0
    remote: int = 0

    def __add__(self, other: ReadBytes) -> ReadBytes:
        return ReadBytes(self.local + other.local, self.remote + other.remote)

    def __sub__(self, other: ReadBytes) -> ReadBytes:
        return ReadBytes(self.local - other.local, self.remote - other.remote)


@dataclass(frozen=True)
class ConsumerReport:
    """What a consumer says of itself with each heartbeat.

    Attributes:
        loader: tells loaders of the same name apart; all numbers are sums over one loader's life.
        samples: delivered to the trial since it joined.
        prepared: samples that were prepared for it, and not for another trial that was given them before; of what ranks
            share, all samples count for one of them.
        wait_s: seconds that the trial waited for data (its data stall).
        fetch_stall_s: the part of ``wait_s`` in which prep waited for bytes.
        peer_stall_s: the part of ``wait_s`` in which prep was idle because of other trials; the rest is prep stall.
        step_s: seconds that the trial worked between minibatches.
        read_bytes: of prepared samples that were read for it.
        ledgers: of finished epochs, all those of which the loader does not know that they arrived.
        first_ledger: how many epochs the loader had finished before the first of them.
        time_to_first_batch_s: seconds from `mbaas.join` to the first minibatch; 0 until it came.
    """

    loader: str = ""
    samples: int = 0
    prepared: int = 0
    wait_s: float = 0.0
    fetch_stall_s: float = 0.0
    peer_stall_s: float = 0.0
    step_s: float = 0.0
    read_bytes: ReadBytes = ReadBytes()
    ledgers: tuple[EpochLedger, ...] = ()
    first_ledger: int = 0
    time_to_first_batch_s: float = 0.0

    def plus(self, other: ConsumerReport) -> ConsumerReport:
        """Return the sums of both, and nothing else."""
        return ConsumerReport(**{name: getattr(self, name) + getattr(other, name) for name in _SUMS})

    def since(self, before: ConsumerReport) -> ConsumerReport:
        """Return what was done since an earlier report of the same loader, and nothing else."""
        return ConsumerReport(self.loader, **{name: getattr(self, name) - getattr(before, name) for name in _SUMS})

    def is_older_than(self, other: ConsumerReport) -> bool:
        """Whether the same loader had done less when it said this."""
        done = (self.samples, self.wait_s + self.step_s)
        return self.loader == other.loader and done < (other.samples, other.wait_s + other.step_s)

    @property
    def prep_stall_s(self) -> float:
        """The part of ``wait_s`` in which prep was computing."""
        return max(0.0, self.wait_s - self.fetch_stall_s - self.peer_stall_s)

    @property
    def stall_share(self) -> float:
        """The share of the trial's time that it waited for data, 0 to 1."""
        total = self.wait_s + self.step_s
        return self.wait_s / total if total > 0 else 0.0


_NO_SUMS = ("loader", "ledgers", "first_ledger", "time_to_first_batch_s")
_SUMS = tuple(field.name for field in fields(ConsumerReport) if field.name not in _NO_SUMS)
"""The fields of a report that are sums over the loader's life."""

# ---- ranks of data-parallel trials ----


class RankPlan(Struct, frozen=True):
    """What decides how the minibatches of an epoch are shared out between ranks.

    Attributes:
        nodes: for each rank the id of its node.
        placement: on which nodes samples are prepared; None if that is one node.
        shuffle: how the epoch is shuffled, as the first rank that had a block of it found; None before that.
    """

    nodes: tuple[str, ...]
    placement: Placement | None = None
    shuffle: Shuffle | None = None

    def ranks(self, sample_ids: Ids, first: int = 0) -> NDArray[np.int64]:
        """Return the rank that gets each sample: int64[n] -> int64[n], in [0, ranks).

        Args:
            sample_ids: the samples of a minibatch, or of a run of it.
            first: samples of the minibatch that were shared out before these: all runs together are even, too.
        """
        p = len(self.nodes)
        # `assign` gives what does not divide to the first ranks: so each run begins with another one.
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
    """What one rank tells of itself with every session.

    Attributes:
        name: which rank it is, of which trial.
        batch_size: samples in a minibatch of all ranks; ranks with another one are not of its trial.
        session: number of its session.
        node: id of the node where it runs.
        cursor: the block at which its session begins; here and below, blocks are the first lane's own.
        floats: whether it may begin at another epoch, to begin with the others.
        aside: by how much the number of its epoch is above that of the epoch whose order it has; 0 but in epochs aside.
        due: the block that is next by its state, if that was saved between two epochs.
    """

    name: ConsumerName
    batch_size: int
    session: int
    node: str
    cursor: int
    floats: bool
    aside: int = 0
    due: int | None = None

    @property
    def consumer(self) -> str:
        """The name under which the feed knows it."""
        return str(self.name)

    @property
    def rank(self) -> int:
        """Its number among the ranks of its trial."""
        return self.name.rank

    @property
    def group(self) -> tuple[str, int, int]:
        """What those have in common that share minibatches."""
        return self.name.trial, self.name.world_size, self.batch_size


class RankOrders(Struct, frozen=True):
    """The answer to a rank that asks how minibatches are shared out.

    Attributes:
        plan: the plan for the epoch it asked about; None while ranks are missing.
        start: the block at which it begins; its own cursor unless its session floats.
        missing: ranks that are not on the feed; with the one that asked, if its session is not open.
        caches: node id -> handle of its cache node, which hands out rows.
        others: missing ranks that are on the feed with another size of minibatches -> that size.
        ahead: ranks that are beyond the epoch, where it is not known any more how it was shared out.
    """

    plan: RankPlan | None
    start: int
    missing: tuple[int, ...]
    caches: Mapping[str, Any]
    others: Mapping[int, int] = {}
    ahead: tuple[int, ...] = ()


def _protocol() -> str:
    """Return 8 hex digits that change with the messages of this module, their fields and the types of these."""
    kinds = [each for each in globals().values() if isinstance(each, type) and each.__module__ == __name__]
    said = sorted((kind.__name__, [*inspect.get_annotations(kind).items()]) for kind in kinds)
    return f"{crc32(repr(said).encode()):08x}"


PROTOCOL = _protocol()
"""Programs understand each other's messages if this is the same in both: it differs between versions of mbaas."""
