"""Rates from successive snapshots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mbaas.status import FeedStatus

WINDOW_S = 15.0
"""Consumers report every two seconds, so a shorter window would show steps."""


@dataclass(frozen=True)
class Rates:
    """Samples a second, prepared and delivered.

    Attributes:
        over_s: length of the time that they are means of; None: since the start of the feed.
    """

    prepared_per_s: float
    delivered_per_s: float
    over_s: float | None


def since_start(status: FeedStatus) -> Rates:
    """Means over the whole life of a feed."""
    up = max(status.uptime_s, 1e-9)
    return Rates(status.prepared_samples / up, status.delivered_samples / up, None)


@dataclass
class RateWindow:
    """The last snapshots of one feed; the oldest is at least `WINDOW_S` old as soon as there is one."""

    _seen: deque[FeedStatus] = field(default_factory=deque)

    def add(self, status: FeedStatus) -> Rates:
        """Take a snapshot in, and say how fast the feed went since the oldest."""
        if self._seen and status.uptime_s < self._seen[-1].uptime_s:
            self._seen.clear()  # another feed took the name
        self._seen.append(status)
        while len(self._seen) > 2 and status.uptime_s - self._seen[1].uptime_s >= WINDOW_S:
            self._seen.popleft()
        first = self._seen[0]
        passed = status.uptime_s - first.uptime_s
        if passed < 1.0:
            return since_start(status)
        prepared = status.prepared_samples - first.prepared_samples
        delivered = status.delivered_samples - first.delivered_samples
        return Rates(prepared / passed, delivered / passed, passed)
