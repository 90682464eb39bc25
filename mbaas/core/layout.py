"""How a feed is laid out when it opens: blocks, bytes and bounds. It stays the same for the feed's life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mbaas.core.sizing import MIN_BLOCKS_STAGED, block_samples
from mbaas.core.state import StagingLimits
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError
from mbaas.messages import ID_BYTES, Lane, Probe, SampleSpec
from mbaas.order import SampleOrder
from mbaas.settings import FeedSettings

CREDIT = 2
"""Tasks a worker has in hand: one that it makes, one whose bytes are fetched meanwhile. In a feed with lanes each lane
gives it an equal part of them, and at least one: blocks are needed in turn, so that a worker has work of every lane.
"""

READY_AHEAD = 2
"""Blocks that may be ready before the slowest consumer needs them, beside those that are being made."""

LOOKED_AT = 1000
"""The mean length of raw samples is estimated from so many."""


def credit(lanes: int) -> int:
    """Tasks that each of the lanes gives to a worker."""
    return max(1, CREDIT // lanes)


@dataclass(frozen=True)
class Layout:
    """What follows from the settings, the dataset, a prepared sample and the workers at the start.

    Attributes:
        sweep: the order, and the size of blocks.
        spec: of a prepared sample.
        ahead_blocks: how far prep may run ahead of the slowest consumer, over all lanes.
        readahead_bytes: of raw samples, read ahead of prep on each node.
    """

    order: SampleOrder
    spec: SampleSpec
    ahead_blocks: int
    readahead_bytes: int

    @property
    def sample_bytes(self) -> int:
        """What a prepared sample takes in staging."""
        return self.spec.nbytes + ID_BYTES

    def block_bytes(self, block: int) -> int:
        """What a block takes in staging."""
        first, end = self.order.span(block)
        return (end - first) * self.sample_bytes

    def lane(self, number: int, settings: FeedSettings) -> Lane:
        """The blocks of one lane."""
        return Lane(self.order.blocks_per_epoch, number, settings.lanes)

    def limits(self, settings: FeedSettings) -> StagingLimits:
        """The bounds of each lane's staging core."""
        lanes = settings.lanes
        return StagingLimits(
            budget_bytes=settings.staging_bytes // lanes,
            ahead_blocks=max(MIN_BLOCKS_STAGED - 1, -(-self.ahead_blocks // lanes)),
            lease_s=settings.lease_s,
            reservation_s=settings.reservation_s,
            patience_s=settings.patience_s,
            prep_timeout_s=settings.prep_timeout_s * lanes,
        )


def lay_out(settings: FeedSettings, dataset: Dataset, probe: Probe, worker_nodes: Iterable[str]) -> Layout:
    """The layout of a feed whose workers are on ``worker_nodes``, one entry each.

    Raises:
        ConfigError: the staging budget is too small, or there are more lanes than blocks.
    """
    per_node = Counter(worker_nodes)
    workers, sample_bytes = max(per_node.values()), probe.spec.nbytes + ID_BYTES
    size = block_samples(
        num_samples=len(dataset),
        batch_size=settings.batch_size,
        sample_bytes=sample_bytes,
        staging_bytes=settings.staging_bytes,
        workers=workers,
        sample_s=probe.sample_s,
        nodes=len(per_node),
        lanes=settings.lanes,
    )
    order = SampleOrder(len(dataset), settings.seed, size)
    if settings.lanes > order.blocks_per_epoch:
        raise ConfigError(
            f"lanes must be at most the blocks of an epoch, {order.blocks_per_epoch} of {size} samples, "
            f"got {settings.lanes}"
        )
    in_hand = credit(settings.lanes) * settings.lanes
    ahead = settings.ahead_blocks or in_hand * workers + READY_AHEAD
    fitting = settings.staging_bytes // (size * sample_bytes)
    mean = float(np.mean(dataset.lengths(np.arange(min(LOOKED_AT, len(dataset))))))
    readahead = int(mean * size * in_hand * workers / len(per_node))
    return Layout(
        order=order,
        spec=probe.spec,
        ahead_blocks=max(MIN_BLOCKS_STAGED - 1, min(ahead, fitting)),
        readahead_bytes=readahead if settings.readahead_bytes is None else settings.readahead_bytes,
    )
