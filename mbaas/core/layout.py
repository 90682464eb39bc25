"""Layout of a feed, fixed when it opens: samples per block, staging bytes and bounds.

Large blocks amortise Ray's cost per delivery (about 4 ms of CPU for coordinator, trial and daemons together). Small
blocks occupy all workers and bring the first minibatch sooner. The contents of minibatches do not depend on the layout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from msgspec import Struct

from mbaas.base.units import size
from mbaas.errors import ConfigError
from mbaas.memory.budgets import sized_cache
from mbaas.model.forms import SampleCosts
from mbaas.samples.order import SampleOrder
from mbaas.settings import FeedSettings, Timeouts
from mbaas.wire.samples import DecodedCosts, DecodedSamples, Probe, SampleSpec

CREDIT = 2
"""Tasks assigned to a worker at a time: one in progress, and one whose bytes are fetched meanwhile."""

READY_AHEAD = 2
"""Blocks that may be ready ahead of the slowest consumer, in addition to those in preparation."""

TARGET_BYTES = 128 * 2**20
"""Target size of a block. At 150 kB per sample it has 890 samples: one core prepares them in about a second, and 8
trials read them in 32 ms.
"""

TARGET_S = 1.0
"""Longest time in seconds for storage and one worker to produce a block. With a cold cache, it is also the time to the
first minibatch.
"""

QUICK_S = 0.25
"""The same for a block of more than `MANY_MINIBATCHES`."""

MANY_MINIBATCHES = 32
"""A block costs each trial 2 to 4 ms whatever its size, and a smaller one arrives sooner. Four trials that only read
8x8 images in minibatches of 256 get 9 % less from blocks of 32 minibatches than from blocks of 82.
"""

SMALL_EPOCH = 1.1
"""A block may be larger by this factor if each worker then prepares an epoch in one block. The bounds depend on
measured times, so without tolerance small epochs would have two or three blocks by chance.
"""

MIN_BLOCKS_IN_BUDGET = 8
"""Blocks that the staging budget should hold at least, if minibatches are small enough. Trials of different speeds
benefit from more blocks than one worker needs.
"""

MOST_SLACK_BLOCKS = 64
"""Largest additional lead of prep over the slowest trial, where the budget has room. Without it, a trial that pauses,
for example to save its model, stops all others. A larger value costs time: all blocks in between are checked after each
event.
"""

MIN_BLOCKS_STAGED = 3
"""One block that consumers read, one that is ready, and one in preparation."""


class StagingLimits(Struct, frozen=True):
    """Bounds of the staging core.

    Attributes:
        budget_bytes: largest total size of staged blocks and blocks in preparation.
        ahead_blocks: largest lead of prep over the furthest consumer of a cohort.
        max_deaths: number of worker deaths, or of failed tries, after which a block fails.
        slack_blocks: blocks by which the lead may be larger over the slowest consumer, so that others rarely wait.
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
    """Layout computed from the settings, the dataset, a prepared sample and the initial workers.

    Attributes:
        spec: shapes and dtypes of a prepared sample.
        ahead_blocks: largest lead of prep over the furthest consumer.
        readahead_bytes: raw bytes that each node reads ahead of prep.
        keeps_all: whether all epochs are identical and one epoch fits the staging budget.
        decoded: form and costs of decoded samples; None if none are cached.
        forms: the decoded forms of the feed's own pipeline, and their costs; see `Probe`.
        node_workers: largest number of prep workers per node.
        slack_blocks: blocks by which the lead may be larger over the slowest consumer.
        cache_bytes: capacity of a node's cache.
    """

    order: SampleOrder
    spec: SampleSpec
    ahead_blocks: int
    readahead_bytes: int
    keeps_all: bool = False
    decoded: DecodedSamples | None = None
    forms: tuple[DecodedCosts, ...] = ()
    node_workers: int = 1
    slack_blocks: int = 0
    cache_bytes: int = 0

    def block_bytes(self, block: int) -> int:
        """Return the staged size of a block in bytes."""
        return self.order.size_of(block) * self.spec.nbytes

    def shortage(self, settings: FeedSettings) -> str:
        """Return a warning if the staging memory cannot keep all workers busy; "" if it can."""
        block_bytes, workers = self.block_bytes(0), self.node_workers
        fitting, wanted = settings.staging_bytes // block_bytes, blocks_in_flight(workers)
        # One block is read, one is ready. Prep goes no further than the end of the next epoch.
        if self.keeps_all or fitting >= min(workers + 2, 2 * self.order.blocks_per_epoch):
            return ""
        return (
            f"some of {workers} prep workers of a node will wait: the staging memory, {size(settings.staging_bytes)}, "
            f"has room for {fitting} blocks of {self.order.block_samples} samples, and they need {wanted}; raise "
            f"staging_bytes to {size(wanted * block_bytes)}, or take smaller minibatches"
        )

    def sized(self, settings: FeedSettings) -> FeedSettings:
        """Return the settings with the measured cache size."""
        return replace(settings, cache_bytes=self.cache_bytes)

    def limits(self, settings: FeedSettings) -> StagingLimits:
        """Return the bounds of the staging core."""
        return StagingLimits(
            budget_bytes=settings.staging_bytes,
            ahead_blocks=self.ahead_blocks,
            timeouts=settings.timeouts,
            slack_blocks=self.slack_blocks,
        )


OWN_BLOCKS = 4
"""Blocks of each own pipeline for which the staging budget should have room: `MIN_BLOCKS_STAGED`, and one for the
feed's own.
"""

MANY_PIPELINES, BLOCKS_OF_MANY = 4, 2.5
"""From this number of pipelines on, workers find work for others, and this many blocks of each are enough: one in use
and one that follows it. With larger blocks, 8 pipelines get 12 % more samples on 2 cores.
"""


def own_block_samples(settings: FeedSettings, layout: Layout, probe: Probe, pipelines: int, nodes: int) -> int:
    """Return the samples in a block of a pipeline that a consumer brings.

    Blocks are no larger than the feed's. If more pipelines come than expected, prep runs less ahead
    (`mbaas.core.staging.rooms`).

    Args:
        pipelines: own pipelines to expect, including this one: as many as there are trials.
        nodes: number of nodes with workers.

    Raises:
        ConfigError: the staging budget does not hold `MIN_BLOCKS_STAGED` of its minibatches.
    """
    sample_bytes, batch_size = probe.spec.nbytes, settings.batch_size
    batch_bytes = min(batch_size, layout.order.num_samples) * sample_bytes
    if settings.staging_bytes < MIN_BLOCKS_STAGED * batch_bytes:
        raise ConfigError(
            f"staging_bytes must hold at least {MIN_BLOCKS_STAGED} minibatches of {batch_size} samples of each "
            f"pipeline, here {size(MIN_BLOCKS_STAGED * batch_bytes)}, and feed {settings.name!r} has "
            f"{size(settings.staging_bytes)}"
        )
    blocks = BLOCKS_OF_MANY if pipelines >= MANY_PIPELINES else OWN_BLOCKS
    most = min(
        settings.staging_bytes / (pipelines * blocks) / sample_bytes,
        TARGET_S * nodes / max(probe.sample_s + probe.read_s, 1e-9),
        layout.order.block_samples,
    )
    return batch_size * max(1, int(most // batch_size))


def blocks_in_flight(workers: int) -> int:
    """Return the number of blocks that keep all workers busy: blocks in preparation, ready blocks, and one being read.

    ``workers`` is per node, because each node prepares a part of every block.
    """
    return CREDIT * workers + READY_AHEAD + 1


def blocks_in_budget(workers: int) -> int:
    """Return the number of blocks that the staging budget should hold; see `blocks_in_flight`."""
    return max(MIN_BLOCKS_IN_BUDGET, blocks_in_flight(workers))


def slack_blocks(fitting: int, ahead: int) -> int:
    """Return the number of blocks by which prep may lead the slowest consumer more than the furthest one.

    ``fitting`` is the number of blocks in the staging budget, ``ahead`` the lead over the furthest consumer.
    """
    return min(MOST_SLACK_BLOCKS, max(0, fitting - ahead))


def wanted_staging(workers: int) -> int:
    """Return the staging bytes that keep all workers of a feed busy with blocks of `TARGET_BYTES`."""
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
    identity: str = "",
    earlier: Layout | None = None,
) -> Layout:
    """Choose the layout of a feed.

    Args:
        settings: the feed's options.
        probe: measurements of its samples.
        worker_nodes: node of each prep worker.
        num_samples: samples in the dataset.
        stored_samples, stored_bytes: number of samples in storage, which may be drawn repeatedly, and their total size.
        is_random: whether the pipeline may vary the result for a sample between epochs.
        redrawn: whether each epoch draws new samples.
        identity: how decoded samples are made, as in `DecodedSamples`.
        earlier: layout of a feed of the same name whose program was killed. Its blocks are reused if they fit: waiting
            consumers continue with them, and measurements never repeat exactly.

    Raises:
        ConfigError: the staging budget is too small.
    """
    per_node = Counter(worker_nodes)
    mean_raw_bytes = stored_bytes / stored_samples
    # Nodes may have different numbers of workers; a block must be large enough for the largest.
    workers, sample_bytes = max(per_node.values()), probe.spec.nbytes
    # A feed keeps its blocks for life, so plan for the workers that it may start later.
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
    )
    if earlier is not None and earlier.spec == probe.spec and earlier.order.num_samples == num_samples:
        kept = earlier.order.block_samples
        fits = MIN_BLOCKS_STAGED * kept * sample_bytes <= settings.staging_bytes
        block_size = kept if fits and kept % settings.batch_size == 0 else block_size
    order = SampleOrder(num_samples, settings.seed, block_size, settings.shuffle, redrawn)
    ahead = settings.staging.ahead_blocks or blocks_in_flight(most_workers) - 1
    fitting = settings.staging_bytes // (block_size * sample_bytes)  # a larger lead would not fit
    readahead = int(mean_raw_bytes * block_size * CREDIT * workers / len(per_node))  # the workers' current tasks
    forms = probe.decoded if settings.cache_decoded else ()
    decoded = (
        None
        if not forms
        else DecodedSamples(
            f"{identity}, form {forms[-1].form}",
            forms[-1].form,
            SampleCosts(
                encoded_bytes=max(1.0, mean_raw_bytes),
                decoded_bytes=forms[-1].sample_bytes,
                encoded_s=forms[-1].sample_s,
                decoded_s=forms[-1].rest_s,
                storage_s=probe.read_s,
                decodable=1 - settings.undecoded_share,
            ),
            threads=workers * settings.threads.prep,
            undecoded_share=settings.undecoded_share,
        )
    )
    cache_bytes = settings.cache_bytes
    if settings.sizes_cache:
        # Slabs are released as a whole. So samples of blocks in preparation take room twice for a while, and many are
        # cached in both forms until all are decoded. Without that room the last ones are cached an epoch later.
        encoded_bytes = stored_bytes + readahead
        decoded_bytes = 0.0
        if decoded is not None and decoded.costs.is_worthwhile:
            decoded_bytes = encoded_bytes + forms[-1].dataset_bytes
        cache_bytes = sized_cache(cache_bytes, encoded_bytes, decoded_bytes)
    return Layout(
        order=order,
        spec=probe.spec,
        # Even if little fits: one block is read while the next one is prepared.
        ahead_blocks=max(MIN_BLOCKS_STAGED - 1, min(ahead, fitting)),
        slack_blocks=slack_blocks(fitting, ahead),
        readahead_bytes=readahead if settings.staging.readahead_bytes is None else settings.staging.readahead_bytes,
        keeps_all=not (settings.shuffle or is_random or redrawn)
        and num_samples * sample_bytes <= settings.staging_bytes,
        decoded=decoded,
        forms=forms,
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
) -> int:
    """Return the samples of a block: as many whole minibatches as the bounds allow, at least one.

    Args:
        num_samples: samples in an epoch.
        batch_size: samples in the feed's minibatch.
        sample_bytes: size of one prepared sample in bytes.
        staging_bytes: the staging budget.
        workers: prep workers per node; each should get a part of a block even if the epoch is small.
        most_workers: largest number of workers per node; the budget should have room for the work of each.
        sample_s: seconds to read a sample on a node and prepare it in a worker.
        nodes: number of nodes; each prepares a part of the block.

    Raises:
        ConfigError: the budget does not hold `MIN_BLOCKS_STAGED` minibatches.

    Example:
        64 samples of 150,528 bytes are 9.6 MB; 128 MiB hold 13 such minibatches, so a block has 832 samples.
    """
    # A minibatch has at most all samples of the dataset.
    batch_bytes = min(batch_size, num_samples) * sample_bytes
    if staging_bytes < MIN_BLOCKS_STAGED * batch_bytes:
        raise ConfigError(
            f"staging_bytes must hold at least {MIN_BLOCKS_STAGED} minibatches of {batch_size} samples "
            f"({size(MIN_BLOCKS_STAGED * batch_bytes)}), got {size(staging_bytes)}"
        )
    per_s = nodes / max(sample_s, 1e-9)
    most = min(
        nodes * TARGET_BYTES / sample_bytes,
        staging_bytes / blocks_in_budget(most_workers) / sample_bytes,
        per_s * TARGET_S,
        max(per_s * QUICK_S, MANY_MINIBATCHES * batch_size),
    )
    # With whole minibatches, loaders with the feed's batch size never need two blocks for one minibatch. A worker's
    # part of a small epoch is rounded up: a remainder would be one more block for every trial.
    part_of_worker = math.ceil(math.ceil(num_samples / batch_size) / workers)
    if part_of_worker * batch_size <= SMALL_EPOCH * most:
        return batch_size * part_of_worker
    return batch_size * max(1, int(most // batch_size))
