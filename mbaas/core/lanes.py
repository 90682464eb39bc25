"""Which further lanes of a feed serve, and which are silent and must be started anew.

A further lane is the coordinator of its own (`mbaas.coordinator.lane`), beside the feed's main one, which exchanges
messages with it all the time. Consumers take blocks from all lanes in turn, so one that is silent stops them all.
"""

from __future__ import annotations

from mbaas.core.story import Stories
from mbaas.core.supervised import LanePhase, SupervisedLane

LANE_SILENT_S = 5.0
"""After this long without an answer a lane is reported as silent: to people, and to consumers that wait."""

LANE_RESTART_S = 30.0
"""After this long without an answer a lane is started anew. It can learn again all that it knew, but what it had staged
must be made again. So a lane that only pauses is given time to come back.
"""

LANE_BEGIN_S = 60.0
"""Longest time in which the process of a lane must be up and told how the feed stands."""


class Lanes:
    """The further lanes of one feed.

    Args:
        stories: where what happens to them is told.

    Attributes:
        by_number: lane -> its state.
    """

    def __init__(self, stories: Stories) -> None:
        self._stories = stories
        self.by_number: dict[int, SupervisedLane] = {}

    def begin(self, lanes: int, now: float) -> None:
        """Watch lanes 1 to ``lanes`` - 1, which were started or found."""
        for number in range(1, lanes):
            lane = SupervisedLane(number, self._stories.begin("lane", f"lane {number}"), now + LANE_BEGIN_S)
            lane.story.tell("it is there, and must be told how the feed stands")
            self.by_number[number] = lane

    def answered(self, number: int, now: float) -> None:
        """Note that a lane answered, and knows how the feed stands."""
        lane = self.by_number.get(number)
        if lane is None:
            return
        if lane.phase is LanePhase.SERVING:
            lane.deadline = now + LANE_SILENT_S
        else:
            lane.transition(LanePhase.SERVING, now + LANE_SILENT_S)

    def lost(self, number: int, now: float) -> None:
        """Note that a lane's process is gone; Ray starts it again."""
        lane = self.by_number.get(number)
        if lane is not None and lane.phase is not LanePhase.BRIEFING:
            lane.transition(LanePhase.BRIEFING, now + LANE_BEGIN_S, "its process is gone")

    def overdue(self, now: float) -> list[int]:
        """Look at the time; return the lanes whose processes must be ended, so that Ray starts them again."""
        restart = []
        for lane in self.by_number.values():
            if now < lane.deadline:
                continue
            if lane.phase is LanePhase.SERVING:
                # From now on, and not from its last answer: if it was this coordinator that stood still, the lane gets
                # all of its time.
                lane.transition(LanePhase.SILENT, now + LANE_RESTART_S - LANE_SILENT_S, "it does not answer")
            else:
                restart.append(lane.number)
                if lane.phase is LanePhase.SILENT:
                    lane.transition(LanePhase.BRIEFING, now + LANE_BEGIN_S, "it was silent for too long")
                else:
                    lane.story.tell("it did not come up, and is started once more")
                    lane.deadline = now + LANE_BEGIN_S
        return restart

    def end(self, reason: str) -> list[int]:
        """End all lanes with the feed; return which there were."""
        numbers = list(self.by_number)
        for lane in self.by_number.values():
            lane.story.tell("{}", reason)
            self._stories.end(lane.story)
        self.by_number.clear()
        return numbers
