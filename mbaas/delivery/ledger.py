"""A consumer's ledger: proof, kept as it goes, that an epoch held each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mbaas.order import Sweep, id_hash, id_hash_of_range
from mbaas.staging.status import EpochLedger

_WORD = 2**64


@dataclass
class Tally:
    """Samples counted so far: how many, and the order-independent hash of their ids."""

    samples: int = 0
    id_hash: int = 0

    def add(self, sample_ids: Iterable[int]) -> None:
        ids = np.asarray(sample_ids, np.int64)
        self.samples += len(ids)
        self.id_hash = (self.id_hash + id_hash(ids)) % _WORD


def expected(sweep: Sweep, epoch: int, left_out: Iterable[int], whole_batches_of: int = 1) -> Tally:
    """What an epoch must hold.

    Args:
        sweep: the feed's order.
        epoch: the feed's epoch.
        left_out: ids of bad samples.
        whole_batches_of: the good samples at the end that do not fill a minibatch of this size are dropped.
    """
    missing = Tally()
    bad = np.array(sorted(left_out), np.int64)
    missing.add(bad)
    rest = (sweep.num_samples - len(bad)) % whole_batches_of
    if rest:
        tail = sweep.samples_at(epoch, max(0, sweep.num_samples - rest - len(bad)), sweep.num_samples)
        missing.add(tail[~np.isin(tail, bad)][-rest:])
    whole = id_hash_of_range(sweep.num_samples)
    return Tally(sweep.num_samples - missing.samples, (whole - missing.id_hash) % _WORD)


def close(own_epoch: int, feed_epoch: int, received: Tally, due: Tally) -> EpochLedger:
    """The ledger of a finished epoch."""
    return EpochLedger(own_epoch, feed_epoch, received.samples, received.id_hash, due.samples, due.id_hash)
