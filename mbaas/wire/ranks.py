"""Messages about the ranks of data-parallel trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from mbaas.model.balance import assign
from mbaas.samples.order import MOST_NUMBER, Ids, Shuffle, Whole
from mbaas.samples.placement import Placement
from mbaas.wire.consumers import MOST_NAME, ConsumerName, NodeId, PollSeconds

RankGroup: TypeAlias = tuple[str, int, int, str]
"""Trial, world size, batch size and pipeline, which all ranks of one trial have in common."""


class RankPlan(Struct, frozen=True):
    """Division of an epoch's minibatches among ranks, by each rank's node.

    ``placement`` is None if only one node prepares samples. ``shuffle`` is None until a rank has a block of the epoch.
    """

    nodes: tuple[str, ...]
    placement: Placement | None = None
    shuffle: Shuffle | None = None

    def ranks(self, sample_ids: Ids, first: int = 0) -> NDArray[np.int64]:
        """Return the rank of each sample of a minibatch, or of a part of one: int64[n] -> int64[n], in [0, ranks).

        ``first`` samples of the minibatch were assigned before these; the whole minibatch is divided evenly.
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
    """One rank's report of itself, sent with every session."""

    name: ConsumerName
    # samples in a minibatch of all ranks; ranks with another size or another pipeline belong to another trial
    batch_size: Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
    session: Whole
    node: NodeId
    cursor: Whole  # the first block of its session
    floats: bool  # True if it may begin at another epoch, together with the others
    # difference between the number of its epoch and the epoch whose order it uses; 0 except in epochs outside of the
    # stream (`mbaas.samples.order.ASIDE`)
    aside: Whole = 0
    due: Whole | None = None  # the next block according to its state, if that was saved between two epochs
    # fingerprint of the trial's own pipeline, and its blocks in an epoch; "" and 0 for the feed's pipeline
    pipeline: Annotated[str, Meta(max_length=MOST_NAME)] = ""
    blocks_per_epoch: Whole = 0

    @property
    def consumer(self) -> str:
        """The name under which the feed lists it."""
        return str(self.name)

    @property
    def rank(self) -> int:
        """Its number among the ranks of its trial."""
        return self.name.rank

    @property
    def group(self) -> RankGroup:
        """Key shared by all ranks of one trial."""
        return self.name.trial, self.name.world_size, self.batch_size, self.pipeline


class RankCall(Struct, frozen=True):
    """A rank's request for the division of an epoch's minibatches; waits ``poll_s`` seconds for missing ranks."""

    report: RankReport
    epoch: Whole
    poll_s: PollSeconds
    shuffle: Shuffle | None = None


class RankOrders(Struct, frozen=True):
    """The answer to a `RankCall`."""

    plan: RankPlan | None  # the plan for the requested epoch; None while ranks are missing
    start: int  # its first block; its own cursor unless its session floats
    missing: tuple[int, ...]  # ranks that have not joined; includes the requesting rank if its session is not open
    caches: Mapping[str, Any]  # node id -> handle of its cache node, which returns rows
    # missing ranks that joined with another batch size or pipeline -> which, as a clause
    others: Mapping[int, str] = {}
    ahead: tuple[int, ...] = ()  # ranks that are past the epoch, whose plan is no longer available
