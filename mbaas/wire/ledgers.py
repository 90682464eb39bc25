"""Ledgers: the samples that a consumer received in an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from mbaas.samples.order import Whole
from mbaas.wire.samples import Seconds

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
