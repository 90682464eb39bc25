"""What the coordinator of the first lane and those of the others say to each other.

The first lane tells how things stand, not what happened: whoever was restarted, on either side, learns all he needs
from the next message, and to hear it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbaas.cache.homes import Homes
from mbaas.prep.worker import BlockMeta
from mbaas.staging.layout import Layout
from mbaas.staging.protocol import FeedInfo
from mbaas.staging.workforce import Hired

Version = tuple[int, int]
"""Of a standing: when its coordinator began, and a count."""


@dataclass(frozen=True)
class Charter:
    """What a lane is told once: what does not change as long as the feed lives."""

    layout: Layout
    info: FeedInfo


@dataclass(frozen=True)
class Standing:
    """How a feed stands, as far as its lanes must know.

    Attributes:
        version: grows with every change.
        workers: that are up and stay.
        leaving: names of workers that get no more tasks.
        gone, dead: name of a worker, id of a node -> why it is not there any more; of the last ones.
        homes: by which blocks are cut; every worker here knows them.
        detached: consumer -> how often it was moved out of step, in any lane: so it is in all of them.
        seats: (name, epoch) of consumers that are expected at the epoch's beginning.
        failed: why the feed cannot go on, or None.
    """

    version: Version
    workers: tuple[Hired, ...]
    leaving: frozenset[str]
    gone: Mapping[str, str]
    dead: Mapping[str, str]
    homes: Homes | None
    detached: Mapping[str, int]
    seats: frozenset[tuple[str, int]]
    failed: str | None


@dataclass(frozen=True)
class Filing:
    """What a lane tells of itself.

    Attributes:
        version: of the standing by which it goes; None if it knows none.
        made: (worker, what it made), since the last filing.
        notes: since the last filing.
        given_up: worker -> why the lane counts on it no more, as long as the standing lists it.
        tasks: worker -> tasks in hand.
        staged_blocks, staged_bytes: that are staged or being made.
        held: consumer -> blocks it was given and has not let go of; only if that was asked for.
        detached: consumer -> how often this lane moved it out of step.
        failed: why the lane cannot go on, or None.
    """

    version: Version | None = None
    made: tuple[tuple[str, BlockMeta], ...] = ()
    notes: tuple[str, ...] = ()
    given_up: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    staged_blocks: int = 0
    staged_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    detached: Mapping[str, int] = field(default_factory=dict)
    failed: str | None = None
