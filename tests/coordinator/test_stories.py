"""Stories of a feed's blocks, consumers, workers and cache nodes. No Ray is started."""

from __future__ import annotations

import re
import time

import pytest

from mbaas.coordinator.status_report import story_of
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.core.story import Stories
from mbaas.errors import ConfigError


def core_at(cursor: int) -> StagingState:
    """A core whose only consumer waits for block ``cursor``, which is being prepared."""
    core = StagingState(StagingLimits(budget_bytes=80, ahead_blocks=1), 4, lambda _: 10)
    core.handle(ev.WorkerUp("prep-0", 1), time.monotonic())
    core.handle(ev.Join("ann", 1, cursor), time.monotonic())
    core.handle(ev.Ask("ann", 1, cursor, cursor, cursor), time.monotonic())
    return core


def test_a_block_has_a_story_once_it_is_prepared():
    assert "GRANTED" in story_of(core_at(5).stories, Stories(), "block 5")[0]
    with pytest.raises(ConfigError, match="nothing is known of 'block 14'"):
        story_of(core_at(5).stories, Stories(), "block 14")


def test_a_change_of_a_consumer_is_shown_with_the_event_that_caused_it():
    story = story_of(core_at(5).stories, Stories(), "ann")
    assert story[0].endswith(
        "BUSY: session 1, from block 5 on, in cohort 0  "
        "<- Join(consumer='ann', session=1, start=5, flexible=False, now=False, resumed=None, trial=None, "
        "world_size=1, node='', born=0, stream=0)"
    )


def test_times_are_those_of_the_log():
    story = story_of(core_at(5).stories, Stories(), "ann")
    assert re.match(r"\d\d:\d\d:\d\d\.\d\d\d  BUSY", story[0])
    assert story[0][:5] in (time.strftime("%H:%M"), time.strftime("%H:%M", time.localtime(time.time() - 60)))


NODE = "1a2b3c4d" + 48 * "0"


@pytest.mark.parametrize("thing", ["1a2b3c4d", "cache 1a2b3c4d", "cache 1a2b3c4d0", NODE, f"cache {NODE}"])
def test_the_story_of_a_cache_node_is_found_by_what_the_status_shows_of_its_machine(thing):
    stories = Stories()
    for kind, name in (("worker", "prep-0"), ("cache node", f"cache {NODE}"), ("cache node", f"cache {NODE[::-1]}")):
        stories.begin(kind, name).tell("{} began", name)
    (line,) = story_of(core_at(5).stories, stories, thing)
    assert line.endswith(f"cache {NODE} began")


@pytest.mark.parametrize("thing", ["cache", "cache ", "", "1a2b3c4", "cache 1a2b3c4", "prep-0"])
def test_less_than_the_status_shows_is_no_cache_node(thing):
    stories = Stories()
    stories.begin("cache node", f"cache {NODE}").tell("asked for")
    with pytest.raises(ConfigError, match="cache 1a2b3c4d"):
        story_of(Stories(), stories, thing)


def test_the_message_about_an_unknown_thing_lists_the_known_ones():
    stories = Stories()
    stories.begin("cache node", f"cache {NODE}").tell("asked for")
    with pytest.raises(ConfigError) as refused:
        story_of(core_at(5).stories, stories, "bob")
    for name in ("ann", "prep-0", "block 5", "cache 1a2b3c4d"):
        assert name in str(refused.value)


def test_a_workers_story_has_both_views():
    stories = Stories()
    stories.begin("worker", "prep-0").tell("asked for")
    story = story_of(core_at(5).stories, stories, "prep-0")
    assert story[0] == "as the supervisor saw it:"
    assert story[1].endswith("asked for")
    assert story[2] == "as the staging core saw it:"
    assert len(story) > 3
