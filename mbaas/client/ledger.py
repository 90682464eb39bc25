"""A consumer's ledger: proof, kept as it goes, that an epoch held each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mbaas.order import Ids, SampleOrder, id_hash, id_hash_of_range

_WORD = 2**64


@dataclass(frozen=True)
class Tally:
    """Samples: how many, and the order-independent hash of their ids."""

    samples: int = 0
    id_hash: int = 0

    def plus(self, sample_ids: Ids) -> Tally:
        """With these, too."""
        return Tally(self.samples + len(sample_ids), (self.id_hash + id_hash(sample_ids)) % _WORD)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.samples + other.samples, (self.id_hash + other.id_hash) % _WORD)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.samples - other.samples, (self.id_hash - other.id_hash) % _WORD)


NOTHING = Tally()
"""No samples."""


def expected(order: SampleOrder, epoch: int, left_out: Iterable[int], dropped: int = 0) -> Tally:
    """What an epoch must hold, over all ranks.

    Args:
        sweep: the feed's order.
        epoch: the feed's epoch.
        left_out: ids of bad samples.
        dropped: so many of the good samples at the end make no minibatch.
    """
    bad = np.array(sorted(left_out), np.int64)
    due = Tally(order.num_samples, id_hash_of_range(order.num_samples)) - NOTHING.plus(bad)
    if dropped:
        tail = order.samples_at(epoch, max(0, order.num_samples - dropped - len(bad)), order.num_samples)
        due -= NOTHING.plus(tail[~np.isin(tail, bad)][-dropped:])
    return due
