"""Calls of consumers to coordinators, and their answers.

Each call is described once, by a Struct: the consumer sends it encoded, and the coordinator decodes it
(`mbaas.calls.encoding`), which checks all types and bounds. So an invalid value raises an error in its call only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from mbaas.errors import ConfigError, MbaasError, shown
from mbaas.memory.budgets import MemoryClaim
from mbaas.model.waits import NO_WAITS, WaitCounts
from mbaas.samples.order import OwnEpoch, SampleOrder, Shuffle, Whole

if TYPE_CHECKING:  # a cache node needs neither, and starts faster without them
    from mbaas.settings import FeedSettings

from mbaas.wire.blocks import DeliveredBlock, UnreadablePart
from mbaas.wire.samples import EngineName, EpochLedger, SampleSpec, Seconds, Sum

POLL_S = 10.0
"""Longest time until the coordinator answers a waiting call, if only with the reason for the wait."""

START_TIMEOUT_S = 90.0
"""Time limit for opening a feed; a lack of CPUs is reported after 30 s."""

TICK_S = 0.25
"""Period of the checks of leases, patience and task deadlines."""


# ---- messages between consumers and coordinators ----

# Each call of a consumer is described once, by a Struct: the consumer sends it encoded, and the coordinator decodes it
# (`mbaas.calls.encoding`), which checks all types and bounds. So an invalid value raises an error in its call only.

MOST_NAME = 500
"""Longest consumer name, in characters."""

MOST_WANTED = 10_000
"""Longest list in a call: requested blocks, unreadable parts, ledgers, steps, announced trials."""

MOST_POLL_S = 60
"""Longest time in seconds that a call may wait for blocks."""

MOST_RANKS = 65_536
"""Largest number of ranks of one trial."""

NodeId = Annotated[str, Meta(max_length=MOST_NAME)]
PollSeconds = Annotated[float, Meta(ge=0, le=MOST_POLL_S)]


def checked_name(name: str) -> str:
    """Return a valid name, which appears in logs, in the status and in errors of others, or raise `ConfigError`."""
    # Line breaks would forge log lines, and lone surrogates cannot be written to a log; both are not printable.
    if not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise ConfigError(f"a consumer's name must be 1 to {MOST_NAME} printable characters, got {shown(name)}")
    return name


class ConsumerName(Struct, frozen=True):
    """Identity of a consumer: a trial (rank 0 of 1), or one rank of a data-parallel trial."""

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
    """Resources that a feed reserves: at most this memory on each node, and the CPUs and GPUs of its own workers.

    Its own workers include those that it has lent to other feeds.
    """

    memory: MemoryClaim
    cpus: float
    gpus: float


class FeedInfo(Struct, frozen=True):
    """Everything that a consumer needs to know about a feed."""

    settings: FeedSettings
    order: SampleOrder
    spec: SampleSpec
    fingerprint: str  # hash of dataset, pipeline, seed and order; a saved state belongs to one fingerprint
    normalize: Any  # the pipeline's `Normalize`, which runs in the consumer, or None
    has_images: bool  # True if samples are images, which become channels-first in torch; other fields keep their axes
    class_names: tuple[str, ...]
    engine: EngineName  # that prepares the samples; another engine would produce different pixels
    # field -> the strings that its numbers stand for, of categorical fields
    categories: Mapping[str, tuple[str, ...]] = {}
    pipeline: str = ""  # the pipeline's fingerprint, which is a part of ``fingerprint``
    difference: str = ""  # what differs from the feed's pipeline, as a clause; "" for the feed's own
    engine_reason: str = ""  # the reason for the engine, as a clause


def fingerprint_of(dataset: str, pipeline: str, *, seed: int, shuffle: bool) -> str:
    """Return the fingerprint of a feed from those of its dataset and its pipeline."""
    return f"{dataset}-{pipeline}-{seed}{'' if shuffle else '-in-order'}"


class Resumption(Struct, frozen=True):
    """Position of a consumer in the middle of its own epoch, and that epoch's shuffle."""

    start: Whole  # the first block that it needs
    own_epoch: OwnEpoch
    # number of the stream's epoch with the shuffle: that of ``start``; or the one before, if the consumer needs the
    # next epoch from its beginning
    epoch: Whole
    shuffle: Shuffle
    taken: bool = True  # True if it has received part of its own epoch; otherwise it may begin elsewhere

    def moved(self, epochs: int, blocks_per_epoch: int) -> Resumption:
        """Return the same position in a stream whose epoch numbers are higher by ``epochs``."""
        by = epochs * blocks_per_epoch
        return replace(self, start=self.start + by, own_epoch=self.own_epoch.moved(by), epoch=self.epoch + epochs)


class Start(Struct, frozen=True):
    """Position where a consumer begins."""

    block: Whole | None = None  # the first block; None for the next shared beginning of an epoch
    flexible: bool = False  # True if it may begin a later epoch than the one at ``block``, to share it with others
    # True if it begins immediately at the position of the others, even in mid-epoch; with a ``block``, from there on
    now: bool = False
    resumed: Resumption | None = None  # span and shuffle of its own epoch, if ``block`` is in the middle of it

    @property
    def is_exact(self) -> bool:
        """True if it must be exactly this block."""
        return self.block is not None and not self.flexible and not self.now


class JoinRequest(Struct, frozen=True):
    """A consumer's request to open a session.

    ``node`` is the consumer's node: if it dies, so does the consumer. ``born`` is the creation of its loader, Unix time
    in nanoseconds, which distinguishes a trial restarted with another number of ranks from the remains of its earlier
    run.
    """

    name: ConsumerName
    start: Start
    node: NodeId = ""
    born: Whole = 0
    # fingerprint of the consumer's own pipeline, which is known to the feed by then; "" for the feed's pipeline
    pipeline: Annotated[str, Meta(max_length=MOST_NAME)] = ""


class Admission(Struct, frozen=True):
    """The answer to a join; ``cursor`` is the first block. Calls of older sessions of the consumer are refused."""

    session: int
    cursor: int
    own_epoch: OwnEpoch
    info: FeedInfo


class _SessionCall(Struct, frozen=True):
    consumer: str
    session: Whole

    def __post_init__(self) -> None:
        checked_name(self.consumer)


class Ask(_SessionCall, frozen=True):
    """A consumer requests up to ``want`` blocks from ``cursor`` on."""

    cursor: Whole
    # released, done: the memory of all blocks below is released; all blocks below are finished
    released: Whole
    done: Whole
    want: Annotated[int, Meta(ge=1, le=MOST_WANTED)] = 1
    # counts a session's calls about its cursor, so that a call overtaken by a later one has no effect; 0: none
    number: Whole = 0
    # first block of the consumer's epoch at ``cursor``; None if the consumer does not track epochs
    began: Whole | None = None
    # (first, end) of blocks between ``released`` and ``cursor`` that it has read and does not hold
    unheld: tuple[Whole, Whole] | None = None


class HandBack(_SessionCall, frozen=True):
    """A consumer returns its unused blocks from ``cursor`` on, and will request them again; ``number`` as in `Ask`."""

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


class PartsCall(_SessionCall, frozen=True):
    """A consumer asks whether any of these delivered parts has been replaced in its block."""

    parts: Annotated[tuple[UnreadablePart, ...], Meta(max_length=MOST_WANTED)]


class BlockCall(Struct, frozen=True):
    """A consumer's call for blocks."""

    ask: Ask
    poll_s: PollSeconds  # seconds until an answer is due, even an empty one
    # delivered parts that it could not read
    unreadable: Annotated[tuple[UnreadablePart, ...], Meta(max_length=MOST_WANTED)] = ()


class Delivery(Struct, frozen=True, array_like=True):
    """The answer to a call for blocks."""

    blocks: tuple[DeliveredBlock, ...] = ()  # in the order of the feed; empty if none is ready, or on an error
    # idle time of prep because of other consumers since the last answer with blocks, in seconds
    peer_idle_s: Seconds = 0.0
    as_copy: bool = False  # True if blocks must be copied when read, so that their memory is not pinned
    waits_for: str = ""  # the reason for an empty answer, as a clause
    # a number that changes whenever the feed makes progress; a wait without progress has a deadline
    progress: Whole = 0
    # error, expelled: why this session gets no more blocks; if expelled, the consumer may join again at its cursor
    error: MbaasError | None = None
    expelled: bool = False
    # in an answer through Ray: address on the consumer's machine for further calls (`mbaas.calls.socket`)
    socket: str | None = None


class SocketCall(Struct, frozen=True, array_like=True):
    """A numbered message to a coordinator over a socket.

    ``call`` is an encoded `BlockCall`, checked later, so that its sender gets an error that names the invalid value.
    """

    number: Whole
    call: Raw


class SocketAnswer(Struct, frozen=True, array_like=True):
    """The answer to the `SocketCall` of this number. Without delivery and error, the call must be made through Ray."""

    number: Whole
    delivery: Delivery | None = None
    error: MbaasError | None = None


class SentError(Struct, frozen=True, array_like=True):
    """An `MbaasError` in a message: its class's name, and its attributes."""

    kind: str
    message: str
    fields: dict[str, str | int | float | bool] = {}


@dataclass(frozen=True)
class ReadBytes(Sum):
    """Bytes of prepared samples that a consumer read, from its own node and from others."""

    local: Whole = 0
    remote: Whole = 0


StepWait = tuple[Whole, Annotated[int, Meta(ge=0, le=100)]]
"""A rank's step: its number in the trial, and the wait for its minibatch in percent of the step."""


@dataclass(frozen=True)
class ConsumerReport:
    """A consumer's totals over one loader's life, sent with each heartbeat.

    Attributes:
        loader: id that distinguishes loaders of the same name.
        samples: delivered to the trial.
        prepared: samples prepared for this consumer, without samples that another trial had received before; samples
            shared by ranks count for one rank only.
        wait_s: seconds that the trial waited for data (its data stall).
        fetch_stall_s, peer_stall_s: the parts of ``wait_s`` with prep waiting for bytes, and idle because of other
            trials; the rest is prep stall.
        step_s: seconds that the trial worked between minibatches.
        waits: minibatches by the time that the trial waited for each.
        ledgers: of finished epochs that have not been acknowledged.
        first_ledger: number of epochs that the loader had finished before the first ledger.
        time_to_first_batch_s: seconds from `mbaas.join` to the first minibatch; 0 before that.
        steps: of a rank, the steps that have not been acknowledged: the number of each in the trial, and the wait for
            its minibatch in percent of the step.
        first_step: number of steps that the loader had made before the first of ``steps``.
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
    waits: WaitCounts = NO_WAITS
    steps: Annotated[tuple[StepWait, ...], Meta(max_length=MOST_WANTED)] = ()
    first_step: Whole = 0

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


_NO_SUMS = ("loader", "ledgers", "first_ledger", "time_to_first_batch_s", "steps", "first_step")
_SUMS = tuple(field.name for field in fields(ConsumerReport) if field.name not in _NO_SUMS)
"""The fields of a report that are totals over the loader's life."""
