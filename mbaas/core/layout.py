"""How a feed is laid out when it opens: samples in a block, bytes of staging, bounds. It stays so for the feed's life.

Large blocks make Ray's cost per delivery small (about 4 ms of CPU for coordinator, trial and daemons together); small
blocks let all workers take part and bring the first minibatch early. What a minibatch holds does not depend on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from msgspec import Struct

from mbaas.allocation.forms import SampleCosts
from mbaas.budgets import sized_cache
from mbaas.errors import ConfigError
from mbaas.messages import DecodedSamples, Lane, Probe, SampleSpec
from mbaas.order import SampleOrder
from mbaas.settings import FeedSettings, Timeouts
from mbaas.units import size

CREDIT = 2
"""Tasks a worker has in hand: one that it makes, one whose bytes are fetched meanwhile. In a feed with lanes each lane
gives it an equal part of them, and at least one: blocks are needed in turn, so that a worker has work of every lane.
"""

READY_AHEAD = 2
"""Blocks that may be ready before the slowest consumer needs them, beside those that are being made."""

TARGET_BYTES = 128 * 2**20
"""At 150 kB a sample these are 890 samples: a core prepares them in about a second, 8 trials take them in 32 ms."""

TARGET_S = 1.0
"""Storage and a worker together should not take longer than this for a block. While nothing is cached, that is how long
the first minibatch takes.
"""

QUICK_S = 0.25
"""The same for a block of more than `MANY_MINIBATCHES`."""

MANY_MINIBATCHES = 32
"""A block costs each trial 2 to 4 ms, whatever its size, and a smaller one comes sooner. Four trials that only read
images of 8x8, in minibatches of 256, get 9 % fewer from blocks of 32 minibatches than from blocks of 82.
"""

MIN_BLOCKS_IN_BUDGET = 8
"""At least this many blocks fit the staging budget, if minibatches are small enough: trials of different speeds have a
use for more than one worker needs.
"""

MOST_SLACK_BLOCKS = 64
"""Prep runs at most so much further ahead of the slowest trial than of the furthest, where the budget has room for it.

Without it every trial that stops for a moment, to save its model say, stops all others. More would cost time: blocks
between the slowest and the furthest are looked at after each event.
"""

MIN_BLOCKS_PER_LANE = 4
"""A lane's share of the budget holds at least this many blocks: two for a consumer that stands still, two for the
others.
"""

MIN_BLOCKS_STAGED = 3
"""One block that consumers read, one that is ready, and one that is being made."""


class StagingLimits(Struct, frozen=True):
    """Bounds that the staging core keeps.

    Attributes:
        budget_bytes: the most that staged blocks, and blocks being made, may take together.
        ahead_blocks: how far prep may run ahead of the furthest consumer of a cohort.
        timeouts: how long it waits for consumers and workers.
        max_deaths: workers that may die over one block, or tries that may end in an error, before it counts as bad.
        slack_blocks: how much further prep may run ahead of the slowest one, so that nobody waits for it so soon.
    """

    budget_bytes: int
    ahead_blocks: int
    timeouts: Timeouts = Timeouts()
    max_deaths: int = 3
    slack_blocks: int = 0

    def __post_init__(self) -> None:
        if self.ahead_blocks < 1:
            raise ConfigError(f"ahead_blocks must be at least 1, got {self.ahead_blocks}")
        if self.slack_blocks < 0:
            raise ConfigError(f"slack_blocks must be at least 0, got {self.slack_blocks}")


class Layout(Struct, frozen=True):
    """What follows from the settings, the dataset, a prepared sample and the workers at the start.

    Attributes:
        order: the order of samples, and the size of blocks.
        spec: what a prepared sample looks like.
        ahead_blocks: how far prep may run ahead of the furthest consumer, over all lanes.
        readahead_bytes: raw bytes that each node reads ahead of prep.
        keeps_all: whether all epochs are the same, and all blocks of one fit the staging budget: each is made once.
        decoded: what decoded samples are; None: none are kept.
        node_workers: prep workers that a node may have.
        slack_blocks: how much further prep may run ahead of the slowest consumer, over all lanes.
        cache_bytes: the most that the cache of a node may keep.
    """

    order: SampleOrder
    spec: SampleSpec
    ahead_blocks: int
    readahead_bytes: int
    keeps_all: bool = False
    decoded: DecodedSamples | None = None
    node_workers: int = 1
    slack_blocks: int = 0
    cache_bytes: int = 0

    @property
    def sample_bytes(self) -> int:
        """What a prepared sample takes in staging."""
        return self.spec.nbytes

    def block_bytes(self, block: int) -> int:
        """What a block takes in staging."""
        first, end = self.order.span(block)
        return (end - first) * self.sample_bytes

    def shortage(self, settings: FeedSettings) -> str:
        """Say that the staging memory has no room for what all workers make, and how much that is; "" if it has."""
        block_bytes, lanes, workers = self.block_bytes(0), settings.staging.lanes, self.node_workers
        fitting, wanted = settings.staging_bytes // block_bytes, blocks_in_flight(workers, lanes)
        # One block is read, one is ready. And prep goes no further than to the end of the next epoch.
        if self.keeps_all or fitting >= min(workers + 2, 2 * self.order.blocks_per_epoch):
            return ""
        return (
            f"some of {workers} prep workers of a node will wait: the staging memory, {size(settings.staging_bytes)}, "
            f"has room for {fitting} blocks of {self.order.block_samples} samples, and they need {wanted}; raise "
            f"staging_bytes to {size(wanted * block_bytes)}, or take smaller minibatches"
        )

    def sized(self, settings: FeedSettings) -> FeedSettings:
        """Return the settings with the cache's measured size."""
        return replace(settings, cache_bytes=self.cache_bytes)

    def lane(self, number: int, settings: FeedSettings) -> Lane:
        """The blocks of one lane."""
        return Lane(self.order.blocks_per_epoch, number, settings.staging.lanes)

    def limits(self, settings: FeedSettings) -> StagingLimits:
        """The bounds of each lane's staging core."""
        lanes, timeouts = settings.staging.lanes, settings.timeouts
        # Each lane keeps its part of the bounds by itself, so that no lane must ask another before it acts.
        return StagingLimits(
            budget_bytes=settings.staging_bytes // lanes,
            ahead_blocks=max(MIN_BLOCKS_STAGED - 1, -(-self.ahead_blocks // lanes)),
            # A lane sees its own part of a worker's queue only: the block that it waits for may be behind others'.
            timeouts=replace(timeouts, prep_s=timeouts.prep_s * lanes),
            slack_blocks=self.slack_blocks // lanes,
        )


def credit(lanes: int) -> int:
    """Tasks that each of the lanes gives to a worker."""
    return max(1, CREDIT // lanes)


def blocks_in_flight(workers: int, lanes: int = 1) -> int:
    """Count the blocks that need room, or workers wait: those in hand, those that are ready, and one that is read.

    Args:
        workers: prep workers on a node; each node makes a part of every block.
        lanes: of the feed, over which the blocks are counted.
    """
    return credit(lanes) * lanes * workers + READY_AHEAD + 1


def blocks_in_budget(workers: int, lanes: int = 1) -> int:
    """Count the blocks that the staging budget should hold; see `blocks_in_flight`."""
    return max(MIN_BLOCKS_IN_BUDGET, MIN_BLOCKS_PER_LANE * lanes, blocks_in_flight(workers, lanes))


def slack_blocks(fitting: int, ahead: int) -> int:
    """Return how much further prep may run ahead of the slowest consumer than of the furthest, in blocks.

    Args:
        fitting: blocks that the staging budget holds.
        ahead: how far it runs ahead of the furthest.
    """
    return min(MOST_SLACK_BLOCKS, max(0, fitting - ahead))


def wanted_staging(workers: int) -> int:
    """Return the staging bytes with which all of a feed's workers make blocks of `TARGET_BYTES`."""
    return blocks_in_budget(workers) * TARGET_BYTES


def lay_out(
    settings: FeedSettings,
    probe: Probe,
    worker_nodes: Iterable[str],
    *,
    num_samples: int,
    stored_samples: int,
    stored_bytes: int,
    is_random: bool,
    redrawn: bool = False,
    prefix: str = "",
    earlier: Layout | None = None,
) -> Layout:
    """Choose the layout of a feed.

    Args:
        settings: the feed's options.
        probe: what is known of its samples.
        worker_nodes: the node of each prep worker.
        num_samples: samples in the dataset.
        stored_samples, stored_bytes: samples in storage, which may be drawn repeatedly, and their bytes.
        is_random: whether the pipeline may make something else of a sample in each epoch.
        redrawn: whether each epoch draws its samples anew.
        prefix: see `DecodedSamples`.
        earlier: of a feed of this name whose program was killed. Its blocks are kept if they will do: consumers that
            wait for the feed go on among them, and what was measured is never quite the same again.

    Raises:
        ConfigError: the staging budget is too small, or there are more lanes than blocks.
    """
    per_node, lanes = Counter(worker_nodes), settings.staging.lanes
    mean_raw_bytes = stored_bytes / stored_samples
    # Nodes may have different numbers of workers; a block must be large enough for the node that has most.
    workers, sample_bytes = max(per_node.values()), probe.spec.nbytes
    # A feed that may start more is laid out for these: it keeps its blocks.
    most_workers = max(workers, math.ceil((settings.scaling.max_prep_workers or 0) / len(per_node)))
    block_size = block_samples(
        num_samples=num_samples,
        batch_size=settings.batch_size,
        sample_bytes=sample_bytes,
        staging_bytes=settings.staging_bytes,
        workers=workers,
        most_workers=most_workers,
        sample_s=probe.sample_s + probe.read_s,
        nodes=len(per_node),
        lanes=lanes,
    )
    if earlier is not None and earlier.spec == probe.spec and earlier.order.num_samples == num_samples:
        kept = earlier.order.block_samples
        fits = MIN_BLOCKS_STAGED * lanes * kept * sample_bytes <= settings.staging_bytes
        block_size = kept if fits and kept % settings.batch_size == 0 else block_size
    order = SampleOrder(num_samples, settings.seed, block_size, settings.shuffle, redrawn)
    if lanes > order.blocks_per_epoch:
        raise ConfigError(
            f"staging.lanes must be at most the blocks of an epoch, {order.blocks_per_epoch} of {block_size} samples, "
            f"got {lanes}"
        )
    in_hand = credit(lanes) * lanes  # of one worker, over all lanes
    ahead = settings.staging.ahead_blocks or blocks_in_flight(most_workers, lanes) - 1
    fitting = settings.staging_bytes // (block_size * sample_bytes)  # further ahead there would be no bytes for it
    readahead = int(mean_raw_bytes * block_size * in_hand * workers / len(per_node))  # what the workers have in hand
    of_a_lane = min(num_samples, -(-order.blocks_per_epoch // lanes) * block_size)  # samples of the first, at most
    decoded = (
        None
        if probe.decoded is None or not settings.decoded
        else DecodedSamples(
            prefix,
            SampleCosts(
                encoded_bytes=max(1.0, mean_raw_bytes),
                decoded_bytes=probe.decoded.sample_bytes,
                encoded_s=probe.decoded.sample_s,
                decoded_s=probe.decoded.rest_s,
                storage_s=probe.read_s,
                decodable=1 - settings.undecoded_share,
            ),
            threads=workers * settings.threads.prep,
            undecoded_share=settings.undecoded_share,
        )
    )
    cache_bytes = settings.cache_bytes
    if settings.sizes_cache:
        keeps_decoded = decoded is not None and decoded.costs.is_worthwhile
        decoded_bytes = 0.0
        if probe.decoded is not None and keeps_decoded:
            # Samples of the blocks that workers have are in both forms for a while; without that room the last ones
            # would stay encoded.
            both = block_size * in_hand * workers / len(per_node) * (mean_raw_bytes + probe.decoded.sample_bytes)
            decoded_bytes = probe.decoded.dataset_bytes + both
        cache_bytes = sized_cache(cache_bytes, stored_bytes, decoded_bytes)
    return Layout(
        order=order,
        spec=probe.spec,
        # However little fits: one block is read while the next one is made.
        ahead_blocks=max(MIN_BLOCKS_STAGED - 1, min(ahead, fitting)),
        slack_blocks=slack_blocks(fitting, ahead),
        readahead_bytes=readahead if settings.staging.readahead_bytes is None else settings.staging.readahead_bytes,
        keeps_all=not (settings.shuffle or is_random or redrawn)
        and of_a_lane * sample_bytes <= settings.staging_bytes // lanes,
        decoded=decoded,
        node_workers=most_workers,
        cache_bytes=cache_bytes,
    )


def block_samples(
    *,
    num_samples: int,
    batch_size: int,
    sample_bytes: int,
    staging_bytes: int,
    workers: int,
    most_workers: int,
    sample_s: float,
    nodes: int = 1,
    lanes: int = 1,
) -> int:
    """Count the samples of a block: whole minibatches, as many as all bounds allow, at least one.

    Args:
        num_samples: samples in an epoch.
        batch_size: samples in the feed's minibatch.
        sample_bytes: bytes of one prepared sample.
        staging_bytes: the staging budget.
        workers: prep workers on a node; each should have its part of a block of a small epoch.
        most_workers: as many as there may be on a node, each of which should find room for what it makes.
        sample_s: seconds that one sample takes to be read on a node, and prepared by a worker.
        nodes: each makes a part of the block.
        lanes: each has its part of the budget, and must hold `MIN_BLOCKS_STAGED` blocks in it.

    Raises:
        ConfigError: the budget does not hold `MIN_BLOCKS_STAGED` minibatches.

    Example:
        64 samples of 150,528 bytes are 9.6 MB; 128 MiB hold 13 such minibatches, so a block has 832 samples.
    """
    # A minibatch larger than the dataset never has more than all of its samples.
    batch_bytes = min(batch_size, num_samples) * sample_bytes
    least = MIN_BLOCKS_STAGED * lanes
    if staging_bytes < least * batch_bytes:
        in_lanes = f" in {lanes} lanes" if lanes > 1 else ""
        raise ConfigError(
            f"staging_bytes must hold at least {least} minibatches of {batch_size} samples{in_lanes} "
            f"({size(least * batch_bytes)}), got {size(staging_bytes)}"
        )
    per_s = nodes / max(sample_s, 1e-9)
    most = min(
        nodes * TARGET_BYTES / sample_bytes,
        staging_bytes / blocks_in_budget(most_workers, lanes) / sample_bytes,
        per_s * TARGET_S,
        max(per_s * QUICK_S, MANY_MINIBATCHES * batch_size),
    )
    # Whole minibatches: loaders with the feed's own size then never need two blocks for one minibatch. A worker's part
    # of a small epoch is rounded up: what it lacked of a whole minibatch would be one more block for every trial.
    part_of_worker = math.ceil(math.ceil(num_samples / batch_size) / workers)
    return batch_size * max(1, min(int(most // batch_size), part_of_worker))
