"""Stories of several lanes name blocks by the feed's numbers. No Ray is started."""

from __future__ import annotations

import re
import time

import pytest

from mbaas.coordinator.stories import LaneStory, told_by, with_supervisor
from mbaas.core import events as ev
from mbaas.core.layout import StagingLimits
from mbaas.core.state import StagingState
from mbaas.core.story import Stories
from mbaas.messages import Lane


def core_at(cursor: int) -> StagingState:
    """A core whose only consumer waits for its block ``cursor``, which is being prepared."""
    core = StagingState(StagingLimits(budget_bytes=80, ahead_blocks=1), 4, lambda _: 10)
    core.handle(ev.WorkerUp("prep-0", 1), time.monotonic())
    core.handle(ev.Join("ann", 1, cursor), time.monotonic())
    core.handle(ev.Ask("ann", 1, cursor, cursor, cursor), time.monotonic())
    return core


def test_a_lane_tells_of_the_feeds_block_which_is_another_one_to_its_core():
    """Three lanes, 11 blocks an epoch: lane 1 has blocks 1, 4, 7, 10, 12 and 15. Block 15 is block 5 of the lane."""
    story = told_by(core_at(5), Lane(11, 1, 3), "block 15")
    assert story.lines[0] == "lane 1, its block 5:"
    assert "GRANTED" in story.lines[1]
    assert set(story.names) == {"prep-0", "ann", "block 15"}


def test_a_lane_knows_nothing_of_the_blocks_of_others():
    assert told_by(core_at(5), Lane(11, 1, 3), "block 5").lines == ()
    assert told_by(core_at(5), Lane(11, 1, 3), "block 14").lines == ()


def test_the_one_lane_of_a_feed_is_not_mentioned():
    story = told_by(core_at(5), Lane(4), "ann")
    assert story.lines[0].endswith(
        "BUSY: session 1, from block 5 on, in cohort 0  "
        "<- Join(consumer='ann', session=1, start=5, flexible=False, now=False, resumed=None, trial=None, "
        "world_size=1, node='', born=0)"
    )


def test_times_are_those_of_the_log():
    story = told_by(core_at(5), Lane(4), "ann")
    assert re.match(r"\d\d:\d\d:\d\d\.\d\d\d  BUSY", story.lines[0])
    assert story.lines[0][:5] in (time.strftime("%H:%M"), time.strftime("%H:%M", time.localtime(time.time() - 60)))


NODE = "1a2b3c4d" + 48 * "0"


@pytest.mark.parametrize("thing", ["1a2b3c4d", "cache 1a2b3c4d", "cache 1a2b3c4d0", NODE, f"cache {NODE}"])
def test_the_story_of_a_cache_node_is_found_by_what_the_status_shows_of_its_machine(thing):
    stories = Stories()
    for kind, name in (("worker", "prep-0"), ("cache node", f"cache {NODE}"), ("cache node", f"cache {NODE[::-1]}")):
        stories.begin(kind, name).tell("{} began", name)
    story = with_supervisor(LaneStory((), ("ann",)), stories, thing)
    (line,) = story.lines
    assert line.endswith(f"cache {NODE} began")
    assert story.names == ("ann", "prep-0", "cache 1a2b3c4d", "cache 00000000")


@pytest.mark.parametrize("thing", ["cache", "cache ", "", "1a2b3c4", "cache 1a2b3c4", "prep-0"])
def test_less_than_the_status_shows_is_no_cache_node(thing):
    stories = Stories()
    stories.begin("cache node", f"cache {NODE}").tell("asked for")
    assert with_supervisor(LaneStory((), ()), stories, thing).lines == ()
