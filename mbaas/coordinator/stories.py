"""The history of a block, consumer, worker or cache node across all lanes of a feed; see `mbaas.core.story`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from mbaas import units
from mbaas.coordinator.asking import answer_or_none
from mbaas.core.state import StagingState
from mbaas.core.story import Stories, block_name, block_number, names_meant, shown_name, unknown_thing
from mbaas.messages import Lane

ANSWER_S = 5.0
"""Timeout for a lane to return a story, in seconds."""


class LaneStory(Struct, frozen=True):
    """One lane's history of a thing, oldest line first, and the names of all things with a history in the lane."""

    lines: tuple[str, ...]
    names: tuple[str, ...]


def told_by(core: StagingState, lane: Lane, thing: str) -> LaneStory:
    """Return one lane's history of a thing. Block numbers in ``thing`` count over the feed."""
    number = block_number(thing)
    own = None if number is None or not lane.has(number) else lane.first_from(number)
    lines: list[str] = []
    if number is None or own is not None:
        lines = core.stories.lines(thing if own is None else block_name(own), _time_of_day)
    if lines and lane.lanes > 1:
        lines.insert(
            0, f"lane {lane.number}" + (", blocks counted as in the lane:" if own is None else f", its block {own}:")
        )
    return LaneStory(tuple(lines), tuple(_feed_name(name, lane) for name in core.stories.names()))


def with_supervisor(own: LaneStory, stories: Stories, thing: str) -> LaneStory:
    """Add the supervisor's history, of cache nodes, and of workers before lanes get them."""
    names = stories.names()
    lines = [line for name in names_meant(thing, names) for line in stories.lines(name, _time_of_day)]
    if lines and own.lines:
        lines = ["as the supervisor saw it:", *lines, "as the first lane saw it:"]
    return LaneStory((*lines, *own.lines), tuple(dict.fromkeys((*own.names, *map(shown_name, names)))))


async def told_by_all(own: LaneStory, lanes: Sequence[Any], thing: str) -> list[str]:
    """Collect the history of a thing from the first lane (``own``) and all others, and return its lines.

    ``thing`` is a block ("block 17"), or the name of a consumer, a worker or a cache node.

    Raises:
        ConfigError: the thing is unknown to every lane that answers; the message lists known names.
    """
    asked = [answer_or_none(lane.lane_story.remote(thing), ANSWER_S, is_reported=True) for lane in lanes]
    answers: list[LaneStory | None] = await asyncio.gather(*asked)
    told = [own, *(story for story in answers if story is not None)]
    lines = [line for story in told for line in story.lines]
    if not lines:
        raise unknown_thing(thing, dict.fromkeys(name for story in told for name in story.names))
    silent = [str(number) for number, story in enumerate(answers, 1) if story is None]
    return lines + [f"lane {number} did not answer within {units.seconds(ANSWER_S)}" for number in silent]


def _feed_name(name: str, lane: Lane) -> str:
    number = block_number(name)
    return name if number is None else block_name(lane.feed_block(number))


def _time_of_day(now: float) -> str:
    seconds = time.time() - time.monotonic() + now
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
