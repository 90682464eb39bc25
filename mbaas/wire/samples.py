"""Raw, prepared and received samples: counts by source, fields, bad samples, measured costs, ledgers of epochs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from mbaas.base.notebook import table
from mbaas.base.units import count, seconds
from mbaas.model.engine_choice import EngineName as EngineName
from mbaas.model.engine_choice import WorkerRates
from mbaas.model.forms import SampleCosts
from mbaas.samples.fields import SAMPLE_ID, Field
from mbaas.samples.order import MOST_NUMBER, Whole

Seconds = Annotated[float, Meta(ge=0, le=MOST_NUMBER)]
"""A time; not NaN, because a single NaN would make sums over consumers NaN."""


# ---- sources of raw samples: local memory, another node's memory, a disk tier, storage ----


SumT = TypeVar("SumT", bound="Sum")


class Sum:
    """Values that are added and subtracted field by field: a dataclass or a Struct."""

    __slots__ = ()

    def __add__(self: SumT, other: SumT) -> SumT:
        fields: Any = type(self).__match_args__  # type: ignore[attr-defined]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in fields))

    def __sub__(self: SumT, other: SumT) -> SumT:
        fields: Any = type(self).__match_args__  # type: ignore[attr-defined]
        return type(self)(*(getattr(self, name) - getattr(other, name) for name in fields))


@dataclass(frozen=True)
class Amount(Sum):
    """A number of samples, and their bytes."""

    samples: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class FetchCounts(Sum):
    """Raw samples by source: memory of the node that needed them, of another node, a disk tier, or storage.

    ``storage`` includes unreadable samples, which have no bytes. ``decoded`` is the subset that was already decoded,
    whose pipeline starts after its prefix. The counts of several blocks, nodes or epochs can be added.
    """

    local: Amount = Amount()
    remote: Amount = Amount()
    disk: Amount = Amount()
    storage: Amount = Amount()
    decoded: Amount = Amount()

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


class SampleSpec(Struct, frozen=True):
    """Fields of every prepared sample of a feed.

    ``made`` is the field that prep makes from a sample's bytes: for images uint8 (height, width, 3), unless a Map
    changes that. If samples differ in lengths, `Field.longest` bounds all of them. ``known`` are the fields of the
    dataset.
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


class DecodedCosts(Struct, frozen=True):
    """Costs of samples in a decoded form, averaged over the samples that were tried.

    ``form`` is the form's number (`mbaas.transforms.Pipeline.prefix_forms`). ``sample_s`` and ``rest_s`` are the times
    of one thread to prepare a sample from its stored and from its decoded form. ``dataset_bytes`` estimates all samples
    decoded: the upper end of a 95 % confidence interval.
    """

    sample_bytes: float
    sample_s: float
    rest_s: float
    dataset_bytes: float
    form: int


class Probe(Struct, frozen=True):
    """Measurements of a feed's samples, made before the feed is laid out.

    ``sample_s`` is the time of a worker to prepare one sample, ``read_s`` that of a node to read one, many at once.
    ``decoded`` has the decoded forms of samples, with ever more transforms applied; empty if none could be made.
    """

    spec: SampleSpec
    sample_s: float
    read_s: float
    decoded: tuple[DecodedCosts, ...] = ()


class EngineProbe(Struct, frozen=True):
    """Rates of both engines on some of a feed's samples.

    ``rates`` is None if no sample could be prepared, or DALI failed, for the reason ``failure``; "" otherwise.
    """

    rates: WorkerRates | None
    failure: str = ""


class PipelineReport(Struct, frozen=True):
    """Findings of a worker about a pipeline that a consumer brought.

    ``normalize`` is its `Normalize`, or None. ``difference`` is a clause on what differs from the feed's pipeline; ""
    if nothing does.
    """

    probe: Probe
    fingerprint: str
    normalize: Any
    has_images: bool
    difference: str


class DecodedSamples(Struct, frozen=True):
    """Form and costs of a feed's decoded samples; ``threads`` prepare on a node, in total.

    ``form`` is their form, as in `mbaas.samples.placement`. ``identity`` is equal for feeds with the same decoded
    samples: transforms and engine. ``undecoded_share`` is the fraction that DALI prepares next to the cpu engine, never
    cached decoded (`mbaas.samples.order.in_share`).
    """

    identity: str
    form: int
    costs: SampleCosts
    threads: int
    undecoded_share: float = 0.0


# ---- ledgers: the samples that a consumer received in an epoch ----

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
        id_hash: order-independent hash of their ids (`mbaas.samples.order.id_hash`).
        expected_samples, expected_id_hash: the same for the whole epoch, without samples left out as bad.
        seconds: from the beginning of the consumer's loop until its last minibatch was returned; 0 if the loop held
            only the rest of the epoch.
        begin: the position in the feed's epoch at which the epoch began; above 0 if the consumer joined mid-epoch.
        shuffled: shuffle of the feed's epoch that contains the end of the last minibatch
            (`mbaas.samples.order.Shuffle.text`). With the seed and ``begin``, it determines the contents of every
            minibatch. At most `MOST_SHUFFLED` characters.
        pipeline: fingerprint of the consumer's own pipeline; "" for the feed's.
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
    pipeline: Annotated[str, Meta(max_length=MOST_SHUFFLED)] = field(default="", compare=False)

    @property
    def exact(self) -> bool:
        """True if each sample of the epoch was received exactly once."""
        return (self.samples, self.id_hash) == (self.expected_samples, self.expected_id_hash)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = {
            "samples": f"{count(self.samples)} of {count(self.expected_samples)}",
            "each exactly once": "yes" if self.exact else "NO",
            "ids": f"{self.id_hash:016x}, expected {self.expected_id_hash:016x}",
            "order": f"epoch {self.feed_epoch} of the feed, from position {count(self.begin)}",
            "pipeline": self.pipeline or "the feed's",
            "time": seconds(self.seconds) if self.seconds else "-",
        }
        return table(f"Ledger of epoch {self.epoch}", rows)


class LedgerEntry(Struct, frozen=True):
    """The ledger of one epoch of one consumer, which arrived ``at`` Unix time in seconds.

    ``loader`` distinguishes loaders of the same name. ``number`` counts the epochs that the loader had finished before;
    it differs from ``ledger.epoch`` if a trial loads an older state and repeats an epoch.
    """

    consumer: str
    loader: str
    number: int
    at: float
    ledger: EpochLedger
