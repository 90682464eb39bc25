"""Health of the lanes other than lane 0: which are serving, and which are silent and must be restarted.

Each of these lanes has a separate coordinator process (`mbaas.coordinator.lane`), which continuously exchanges messages
with the main coordinator. Consumers take blocks from all lanes in turn, so a silent lane stops every consumer.
"""

from __future__ import annotations

from mbaas.core.story import Stories
from mbaas.core.supervised import LanePhase, SupervisedLane

LANE_SILENT_S = 5.0
"""A lane without an answer for this long is reported as silent, in the status and to waiting consumers."""

LANE_RESTART_S = 30.0
"""A lane without an answer for this long is restarted. It can restore its state, but its staged blocks must be prepared
again; a lane that only pauses therefore gets time to come back.
"""

LANE_BEGIN_S = 60.0
"""Longest time for a lane's process to start and receive the feed's state."""


class Lanes:
    """Lanes of one feed, other than lane 0; ``by_number`` maps lane numbers to states."""

    def __init__(self, stories: Stories) -> None:
        self._stories = stories
        self.by_number: dict[int, SupervisedLane] = {}

    def begin(self, lanes: int, now: float) -> None:
        """Supervise lanes 1 to ``lanes`` - 1, which were started or found."""
        for number in range(1, lanes):
            lane = SupervisedLane(number, self._stories.begin("lane", f"lane {number}"), now + LANE_BEGIN_S)
            lane.story.tell("it is up, and needs the state of the feed")
            self.by_number[number] = lane

    def answered(self, number: int, now: float) -> None:
        """Record an answer of a lane, which implies that it has the feed's state."""
        lane = self.by_number.get(number)
        if lane is None:
            return
        if lane.phase is LanePhase.SERVING:
            lane.deadline = now + LANE_SILENT_S
        else:
            lane.transition(LanePhase.SERVING, now + LANE_SILENT_S)

    def lost(self, number: int, now: float) -> None:
        """Record that a lane's process is gone; Ray restarts it."""
        lane = self.by_number.get(number)
        if lane is not None and lane.phase is not LanePhase.BRIEFING:
            lane.transition(LanePhase.BRIEFING, now + LANE_BEGIN_S, "its process is gone")

    def overdue(self, now: float) -> list[int]:
        """Check deadlines; return the lanes whose processes must be killed, so that Ray restarts them."""
        restart = []
        for lane in self.by_number.values():
            if now < lane.deadline:
                continue
            if lane.phase is LanePhase.SERVING:
                # Count from now, not from its last answer: if this coordinator stalled, the lane still gets its full
                # time.
                lane.transition(LanePhase.SILENT, now + LANE_RESTART_S - LANE_SILENT_S, "it does not answer")
            else:
                restart.append(lane.number)
                if lane.phase is LanePhase.SILENT:
                    lane.transition(LanePhase.BRIEFING, now + LANE_BEGIN_S, "it was silent for too long")
                else:
                    lane.story.tell("it did not come up, and is restarted")
                    lane.deadline = now + LANE_BEGIN_S
        return restart

    def end(self, reason: str) -> list[int]:
        """End all lanes together with the feed; return their numbers."""
        numbers = list(self.by_number)
        for lane in self.by_number.values():
            lane.story.tell("{}", reason)
            self._stories.end(lane.story)
        self.by_number.clear()
        return numbers
