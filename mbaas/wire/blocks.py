"""Blocks: the work of prep workers, and the blocks delivered to consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from mbaas.errors import MbaasError
from mbaas.memory.part_memory import PartAddress
from mbaas.memory.slots import Slot
from mbaas.samples.order import MOST_NUMBER, SampleOrder, Shuffle, Whole
from mbaas.samples.placement import BlockPart

if TYPE_CHECKING:  # a cache node needs neither, and starts faster without them
    from mbaas.transforms import Pipeline

from mbaas.wire.samples import BadSample, EngineName, FetchCounts, PipelineReport, SampleSpec, Seconds

# ---- samples and blocks, as prep workers make them ----

ROW = "row"
"""Name of the array with a partial block's row numbers in the block: int64[n], ascending."""


class BlockMeta(Struct, frozen=True):
    """Metadata of a finished part of a block: counts, timings, bad samples."""

    block: int
    epoch: int  # epoch that determined the part's random numbers
    samples: int = 0  # rows in the part
    # samples that were left out (``on_bad_sample="skip"``), or the first bad one ("raise"; ``samples`` is 0 then)
    bad: tuple[BadSample, ...] = ()
    # fetch_s, prep_s: seconds of waiting for raw bytes, and of decoding and transforming
    fetch_s: float = 0.0
    prep_s: float = 0.0
    fetched: FetchCounts = FetchCounts()  # the raw samples by source, as seen from the worker's node
    nbytes: int = 0
    away: BadSample | None = None  # a sample that storage may deliver later; the part was not made
    cpu_s: float = 0.0  # CPU-seconds of all threads of the worker process for the feed so far
    kept: int = 0  # samples that were handed in decoded to the cache
    slot: Slot | None = None  # position of the arrays, if they are not in Ray's object store

    @property
    def rows(self) -> int:
        """Number of rows of the block that the part covers, including bad samples."""
        return self.samples + len(self.bad)


class PrepConfig(Struct, frozen=True):
    """Settings with which a worker prepares a feed's samples."""

    feed: str
    pipeline: Pipeline
    engine: EngineName
    seed: int
    threads: int  # threads of the engine
    on_bad_sample: str
    prep_s: float  # the feed's ``timeouts.prep_s``, after which a worker without progress is considered stuck
    shares_gpu: bool = False  # True if it works on a GPU that it has not reserved
    dali_share: float = 1.0  # fraction of the samples that the dali engine prepares with DALI


class WorkerBrief(Struct, frozen=True):
    """Everything that a prep worker needs to work for a feed, except the dataset.

    The dataset is always a separate argument: Ray resolves a reference only at the top level of a call's arguments.
    """

    config: PrepConfig
    order: SampleOrder
    spec: SampleSpec


class OwnPipeline(Struct, frozen=True):
    """A pipeline that consumers brought, as it is kept in the cluster's key-value store.

    Attributes:
        number: its stream in the feed (`mbaas.core.staging.streams`).
        payload: the pipeline, pickled.
        block_samples: samples in its blocks.
        report: a worker's findings about it.
    """

    number: int
    payload: bytes
    block_samples: int
    report: PipelineReport

    @property
    def fingerprint(self) -> str:
        """The pipeline's fingerprint."""
        return self.report.fingerprint


def own_pipeline_key(fingerprint: str) -> str:
    """Return the name under which an `OwnPipeline` is kept."""
    return f"pipeline-{fingerprint}"


class WorkerLocation(Struct, frozen=True):
    """A worker's process id, its node, and the feed that it works for (idle: the feed that started it)."""

    pid: int
    node: str
    feed: str


class PartMeta(Struct, frozen=True, array_like=True):
    """The metadata of a part that consumers need; fields as in `BlockMeta`."""

    samples: Whole
    bad: tuple[BadSample, ...]
    fetch_s: Seconds
    prep_s: Seconds
    nbytes: Whole


class DeliveredPart(Struct, frozen=True, array_like=True):
    """One part of a block, in the memory of ``node``, which made it."""

    meta: PartMeta
    address: PartAddress  # of its arrays; the coordinator keeps them until the consumer releases the block
    number: Whole
    task: Whole  # the task that made it; a part that is made again has another task
    node: str
    block_part: BlockPart  # the home node of its samples, and the placement version by which it was cut


class DeliveredBlock(Struct, frozen=True, array_like=True):
    """A block that was made, or could not be made because of ``error``; then it has no parts.

    ``is_new``: no consumer had it before; it was prepared for this one.
    """

    number: Whole
    shuffle: Shuffle
    parts: tuple[DeliveredPart, ...]
    error: MbaasError | None = None
    is_new: bool = False


class UnreadablePart(Struct, frozen=True):
    """A part of a block that can no longer be read, and the task that made it; -1: no task yet."""

    block: Whole
    part: Whole
    task: Annotated[int, Meta(ge=-1, le=MOST_NUMBER)]
