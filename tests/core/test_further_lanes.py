"""A further lane counts as silent, and is restarted, at the right time."""

from __future__ import annotations

import pytest
from timed_supervisor import TimedSupervisor

from mbaas.core import cluster_events as ev
from mbaas.core.lanes import LANE_BEGIN_S, LANE_RESTART_S, LANE_SILENT_S
from mbaas.core.supervised import LanePhase
from mbaas.core.supervisor import Supervisor


class Feed(TimedSupervisor):
    """Supervisor of a feed with three lanes, and a clock."""

    def __init__(self) -> None:
        super().__init__(Supervisor(own=1, credit=1, lanes=3))

    def wait(self, seconds: float) -> list[int]:
        """Let time pass; return the lanes to restart."""
        self.advance(seconds)
        return [instruction.lane for instruction in self.kinds(ev.RestartLane)]

    def answer(self, *lanes: int) -> None:
        for lane in lanes:
            self.send(ev.LaneAnswered(lane))

    def phases(self) -> list[LanePhase]:
        return [lane.phase for lane in self.supervisor.lanes.by_number.values()]

    def waits(self) -> list[str]:
        return [wait for wait in self.supervisor.told_waits(self.now) if "lane" in wait]


@pytest.fixture
def feed() -> Feed:
    feed = Feed()
    feed.answer(1, 2)
    return feed


def test_lanes_are_being_started_until_they_answer():
    feed = Feed()
    assert feed.phases() == [LanePhase.BRIEFING] * 2
    assert feed.waits() == ["lane 1 is being started (for 0 s so far)", "lane 2 is being started (for 0 s so far)"]
    feed.answer(2)
    assert feed.phases() == [LanePhase.BRIEFING, LanePhase.SERVING]
    assert feed.waits() == ["lane 1 is being started (for 0 s so far)"]
    assert feed.wait(1.0) == []
    assert feed.phases() == [LanePhase.BRIEFING, LanePhase.SERVING]
    assert feed.waits() == ["lane 1 is being started (for 1 s so far)"]


def test_a_lane_that_answers_is_left_alone(feed):
    for _ in range(100):
        assert feed.wait(LANE_SILENT_S - 0.1) == []
        assert feed.waits() == []
        feed.answer(1, 2)


def test_a_silent_lane_is_told_of_and_then_started_anew_alone(feed):
    assert feed.wait(LANE_SILENT_S - 0.1) == []
    feed.answer(1)
    assert feed.wait(0.1) == []
    assert feed.phases() == [LanePhase.SERVING, LanePhase.SILENT]
    assert feed.waits() == ["lane 2 does not answer (for 0 s so far)"]
    feed.answer(1)
    for _ in range(int(LANE_RESTART_S - LANE_SILENT_S) - 1):
        assert feed.wait(1.0) == []
        feed.answer(1)
    assert feed.wait(1.0) == [2]
    assert feed.phases() == [LanePhase.SERVING, LanePhase.BRIEFING]
    assert ev.Note("lane 2 does not answer, and is restarted") in feed.said
    for _ in range(int(LANE_BEGIN_S) - 1):
        feed.answer(1)
        assert feed.wait(1.0) == [], "Ray starts it"
    feed.answer(1, 2)
    assert feed.phases() == [LanePhase.SERVING] * 2
    assert feed.waits() == []
    story = "\n".join(feed.supervisor.stories.lines("lane 2"))
    for change in ("BRIEFING -> SERVING", "SERVING -> SILENT", "SILENT -> BRIEFING: it was silent for too long"):
        assert change in story


def test_a_lane_that_answers_again_is_not_started_anew(feed):
    feed.wait(LANE_SILENT_S)
    assert feed.phases() == [LanePhase.SILENT] * 2
    feed.answer(1, 2)
    assert feed.wait(LANE_SILENT_S - 0.1) == []
    assert feed.phases() == [LanePhase.SERVING] * 2


def test_a_lane_that_ray_starts_has_a_minute_to_come_up(feed):
    feed.send(ev.LaneLost(1))
    feed.send(ev.LaneLost(1))  # every failed call to the lane reports it
    assert feed.phases() == [LanePhase.BRIEFING, LanePhase.SERVING]
    for _ in range(int(LANE_BEGIN_S) - 1):
        feed.answer(2)
        assert feed.wait(1.0) == []
    feed.answer(2)
    assert feed.wait(1.0) == [1]
    for _ in range(int(LANE_BEGIN_S) - 1):
        feed.answer(2)
        assert feed.wait(1.0) == [], "it has another minute"
    feed.answer(2)
    assert feed.wait(1.0) == [1]


def test_a_coordinator_that_stood_still_itself_does_not_blame_the_lanes(feed):
    assert feed.wait(10 * LANE_RESTART_S) == []
    assert feed.wait(1.0) == []
    feed.answer(1, 2)
    assert feed.phases() == [LanePhase.SERVING] * 2


def test_lanes_end_with_the_feed_and_nothing_is_said_of_them_then(feed):
    feed.send(ev.Stop("it was stopped"))
    assert [said.lane for said in feed.said if isinstance(said, ev.EndLane)] == [1, 2]
    feed.send(ev.LaneLost(1))
    feed.answer(2)
    assert feed.wait(1000.0) == []
    assert feed.phases() == []
    stories = feed.supervisor.stories
    told = stories.lines("lane 1")
    assert "it was stopped" in told[-1]
    assert stories.begin("lane", "lane 1").lines() == told, "its story is over, and kept"


def test_a_lane_that_is_not_known_changes_nothing(feed):
    feed.answer(7)
    feed.send(ev.LaneLost(0))
    assert feed.phases() == [LanePhase.SERVING] * 2
