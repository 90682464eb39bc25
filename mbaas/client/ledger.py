"""A consumer's ledger: an incremental proof that an epoch contained each sample exactly once.

It counts samples and adds up hashes of their ids (`mbaas.samples.order.id_hash`), so two tallies are equal exactly if
they cover the same samples, in any order. It takes a few bytes for any dataset size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct

from mbaas.client.saved_state import SavedState, levels_of, shuffle_of
from mbaas.samples.order import Ids, Shuffle, id_hash, id_hash_of_range
from mbaas.wire.samples import MOST_SHUFFLED, EpochLedger

_WORD = 2**64
"""Modulus of the hashes, as in `id_hash`, so that they can be added and subtracted."""


class Tally(Struct, frozen=True):
    """A number of samples, and the order-independent hash of their ids."""

    samples: int = 0
    id_hash: int = 0

    def plus(self, sample_ids: Ids) -> Tally:
        """Return this tally plus the given samples."""
        return Tally(self.samples + len(sample_ids), (self.id_hash + id_hash(sample_ids)) % _WORD)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.samples + other.samples, (self.id_hash + other.id_hash) % _WORD)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.samples - other.samples, (self.id_hash - other.id_hash) % _WORD)


NOTHING = Tally()
"""No samples."""

HASHED_TOGETHER = 4096
"""Ids collected before they are hashed: hashing this many takes only twice as long as one minibatch's ids."""


class RunningTally:
    """A tally that grows by minibatches."""

    def __init__(self, total: Tally = NOTHING) -> None:
        self._total, self._ids, self._samples = total, list[Ids](), 0

    def add(self, sample_ids: Ids) -> None:
        """Count samples."""
        self._ids.append(sample_ids.copy())  # a view would hold the block
        self._samples += len(sample_ids)
        if self._samples >= HASHED_TOGETHER:
            self._hash()

    def _hash(self) -> None:
        self._total = self._total.plus(np.concatenate(self._ids))
        self._ids, self._samples = [], 0

    @property
    def total(self) -> Tally:
        """The tally of all samples so far."""
        if self._ids:
            self._hash()
        return self._total


def expected(num_samples: int, left_out: Iterable[int], dropped: Tally = NOTHING) -> Tally:
    """Return the tally that an epoch must reach over all ranks, without bad and dropped samples."""
    bad = np.array(sorted(left_out), np.int64)
    return Tally(num_samples, id_hash_of_range(num_samples)) - NOTHING.plus(bad) - dropped


@dataclass
class EpochProgress:
    """One epoch of one loader, up to the last minibatch given to the trial."""

    rank: int
    world_size: int
    feed_epoch: int | None = None  # the feed's epoch number at its start; None until its first block arrives
    begin: int = 0  # position in that epoch's order at which it began
    position: int = 0  # position of the next sample in the loader's own epoch
    # shuffle of the feed's epoch at the end of the last minibatch; None before the first
    shuffle: Shuffle | None = None
    tally: RunningTally = field(default_factory=RunningTally)  # samples of this rank
    # other ranks' samples of the same minibatches, and samples before the start position of this loader
    elsewhere: Tally = NOTHING
    dropped: Tally = NOTHING  # samples at the epoch's end that are in no minibatch
    left_out: set[int] = field(default_factory=set)

    def count(self, sample_ids: Ids, *, position: int, shuffle: Shuffle | None, elsewhere: Tally) -> None:
        """Count a minibatch given to the trial; ``position`` and ``shuffle`` are those at its end."""
        self.tally.add(sample_ids)
        if self.left_out:  # a sample that a loaded state lists as bad may be readable by now
            self.left_out.difference_update(sample_ids.tolist())
        if elsewhere is not NOTHING:
            self.elsewhere += elsewhere
        self.position, self.shuffle = position, shuffle

    @property
    def received(self) -> Tally:
        """This rank's samples."""
        return self.tally.total

    def close(self, num_samples: int, own_epoch: int) -> EpochLedger:
        """Return the ledger of the finished epoch. This loader was due all samples that are not in ``elsewhere``."""
        assert self.feed_epoch is not None
        due = expected(num_samples, self.left_out, self.dropped) - self.elsewhere
        got, shuffled = self.received, self.shuffle.text if self.shuffle is not None else ""
        if len(shuffled) > MOST_SHUFFLED:  # too long if many consumers began mid-epoch; saved states contain it in full
            shuffled = shuffled[: MOST_SHUFFLED - 3] + "..."
        return EpochLedger(
            own_epoch, self.feed_epoch, got.samples, got.id_hash, due.samples, due.id_hash,
            begin=self.begin, shuffled=shuffled,
        )  # fmt: skip

    # ---- saved states ----

    def state(self) -> dict[str, Any]:
        """Return the progress as plain JSON types, for the fields of `SavedState`."""
        received = self.received
        seen = received + self.elsewhere
        return {
            "begin": self.begin,
            "position": self.position,
            "shuffle": levels_of(self.shuffle) if self.position else [],
            "samples": seen.samples,
            "id_hash": seen.id_hash,
            "left_out": sorted(self.left_out),
            "share": {
                "rank": self.rank,
                "world_size": self.world_size,
                "samples": received.samples,
                "id_hash": received.id_hash,
            },
        }

    @classmethod
    def restored(cls, state: SavedState, *, rank: int, world_size: int) -> EpochProgress:
        """Return the progress at which ``state`` was taken, by this rank or by another one.

        A rank that loads another rank's state has received none of the epoch's samples, so its ledger begins at the
        state's position. A single consumer continues as if it had received the samples of all ranks.
        """
        seen = received = Tally(state.samples, state.id_hash)
        share = state.share
        if world_size > 1:
            is_own = (share.rank, share.world_size) == (rank, world_size)
            received = Tally(share.samples, share.id_hash) if is_own else NOTHING
        return cls(
            rank,
            world_size,
            feed_epoch=state.feed_epoch if state.position else None,
            begin=state.begin,
            position=state.position,
            shuffle=shuffle_of(state) if state.position else None,
            tally=RunningTally(received),
            elsewhere=seen - received,
            left_out=set(state.left_out),
        )
