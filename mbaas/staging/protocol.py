"""What the coordinator and its consumers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbaas.cache.atlas import Share
from mbaas.errors import MbaasError
from mbaas.order import Sweep
from mbaas.prep.engine import SampleSpec
from mbaas.prep.worker import BlockMeta
from mbaas.staging.lanes import Lane
from mbaas.staging.settings import FeedSettings

POLL_S = 10.0
"""The coordinator answers a waiting call at the latest after so long, if only to say why there is nothing
yet.
"""


START_TIMEOUT_S = 90.0
"""A feed opens within so long or not at all; a lack of CPUs is noticed after 30 s."""

TICK_S = 0.25
"""Period at which leases, patience and task deadlines are looked at, and at which lanes compare notes."""


@dataclass(frozen=True)
class FeedInfo:
    """What a consumer must know of a feed.

    Attributes:
        fingerprint: of dataset, pipeline and seed; a saved state belongs to one fingerprint.
        normalize: the pipeline's `Normalize`, which runs on the consumer's side, or None.
        class_names: names of the labels.
        lanes: coordinators of the lanes after the first; none in a feed of one lane.
    """

    settings: FeedSettings
    sweep: Sweep
    spec: SampleSpec
    fingerprint: str
    normalize: Any
    class_names: tuple[str, ...]
    lanes: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Admission:
    """Answer to a join: the session's number and first block, the feed, and the lane whose own blocks are counted."""

    session: int
    cursor: int
    info: FeedInfo
    lane: Lane


@dataclass(frozen=True)
class DeliveredPart:
    """One part of a block: what it holds, a one-element list with the reference to its arrays (empty if it ended in an
    error), the task that made it, the node where it lies, and the share of the block that it is.
    """

    meta: BlockMeta
    payload: list[Any]
    number: int
    task: int
    node: str
    share: Share


@dataclass(frozen=True)
class DeliveredBlock:
    """One block: its number, and its parts."""

    number: int
    parts: tuple[DeliveredPart, ...]


@dataclass(frozen=True)
class Delivery:
    """Answer to a call that asked for blocks.

    Attributes:
        blocks: in stream order; empty if there is nothing yet, or on an error.
        waits_for: if there is nothing yet, a clause that says why.
        progress: a number that changes whenever the feed does something; a wait without change has a deadline.
        error: why there will be nothing more in this session.
        expelled: whether the error ends this session only: the consumer may join again at its cursor.
    """

    blocks: tuple[DeliveredBlock, ...] = ()
    waits_for: str = ""
    progress: int = 0
    error: MbaasError | None = None
    expelled: bool = False
