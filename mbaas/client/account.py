"""What a loader had of an epoch, against what it was to have: its place in it, and the ledger at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mbaas.client.ledger import NOTHING, Tally, expected
from mbaas.client.sharding import BatchEnd
from mbaas.messages import EpochLedger
from mbaas.order import Ids, SampleOrder


@dataclass
class EpochProgress:
    """One epoch of one loader, as far as minibatches were handed out.

    Attributes:
        rank, world_size: the loader's.
        feed_epoch: which epoch of the feed it is; None before the first block is here.
        position: in the epoch's order, of the sample after the last minibatch.
        received: this rank's samples.
        elsewhere: samples of the same minibatches that are other ranks', or that this loader need not have for
            another reason.
        dropped: how many samples at the epoch's end make no minibatch.
        left_out: ids of bad samples.
    """

    rank: int
    world_size: int
    feed_epoch: int | None = None
    position: int = 0
    received: Tally = NOTHING
    elsewhere: Tally = NOTHING
    dropped: int = 0
    left_out: set[int] = field(default_factory=set)

    def count(self, sample_ids: Ids, mark: BatchEnd) -> None:
        """A minibatch is handed out."""
        self.received = self.received.plus(sample_ids)
        if mark.elsewhere.samples:
            self.elsewhere += mark.elsewhere
        self.position = mark.position

    def close(self, order: SampleOrder, own_epoch: int) -> EpochLedger:
        """The ledger of the epoch, which is over: due is all of it that is not elsewhere."""
        assert self.feed_epoch is not None
        due = expected(order, self.feed_epoch, self.left_out, self.dropped) - self.elsewhere
        got = self.received
        return EpochLedger(own_epoch, self.feed_epoch, got.samples, got.id_hash, due.samples, due.id_hash)

    # ---- as part of a saved state ----

    def state(self) -> dict[str, Any]:
        """Plain JSON types; ``samples`` and ``id_hash`` are over all ranks, ``share`` is this rank's."""
        seen = self.received + self.elsewhere
        return {
            "position": self.position,
            "samples": seen.samples,
            "id_hash": seen.id_hash,
            "left_out": sorted(self.left_out),
            "share": {
                "rank": self.rank,
                "world_size": self.world_size,
                "samples": self.received.samples,
                "id_hash": self.received.id_hash,
            },
        }

    @classmethod
    def restored(cls, state: dict[str, Any], *, rank: int, world_size: int) -> EpochProgress:
        """As it was when ``state`` was taken, by this rank or another one: then its ledger begins there.

        A single consumer goes on as if it had seen what all ranks had.
        """
        seen = received = Tally(state["samples"], state["id_hash"])
        share = state.get("share", {"rank": 0, "world_size": 1})
        if world_size > 1:
            is_own = (share["rank"], share["world_size"]) == (rank, world_size)
            received = Tally(share["samples"], share["id_hash"]) if is_own else NOTHING
        return cls(
            rank,
            world_size,
            position=state["position"],
            received=received,
            elsewhere=seen - received,
            left_out=set(state["left_out"]),
        )
