"""Copies of samples that stay cached for a while, because other pipelines need them soon. Pure.

Pipelines read the same samples in the same order, each at its own position. A sample that is not cached for good is
read once for all of them if the first reader's copy stays until the last one has passed. Let the parts that they read
now, and one more, be within a share *s* of an epoch, and let the cache have room for a share *x* of the samples. Copies
then take *s* (1 - x) / (1 - s) of the bytes of all samples, and leave that much less for samples cached for good. So

    (1 - x) / (1 - s)

of the samples are read per epoch, once for all pipelines within *s* and once for each other pipeline. Without copies,
each pipeline reads 1 - x. The pipelines that share copies are chosen to minimize the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mbaas.model.tiers import COPIES

ACTIVE_FETCHES = 256
"""A pipeline is forgotten this many fetches after its own last one."""

STEADY_FETCHES = 256
"""Copies get room for the largest spread of at least this many fetches. Otherwise copies and samples cached for good
would displace each other all the time.
"""


class Span(NamedTuple):
    """The beginning and end of a part, in epochs."""

    begin: float
    end: float


class SharingGroup(NamedTuple):
    """The pipelines that share copies, and the part of an epoch from the last one's position to the first one's."""

    pipelines: frozenset[str]
    spread: float


NO_SHARING = SharingGroup(frozenset(), 0.0)


class SharedReads:
    """Records the positions of pipelines in epochs, and chooses the pipelines that share copies.

    ``fits`` returns the share of the samples that the cache could hold.
    """

    def __init__(self, fits: Callable[[], float]) -> None:
        self._fits = fits
        self._positions: dict[str, Span] = {}  # the last part fetched by each pipeline
        self._newest: dict[str, int] = {}  # pipeline -> number of its newest fetch
        self._began = math.inf  # where the first fetch began, in epochs
        self._fetches = 0
        self.group = NO_SHARING
        self._largest = 0.0  # largest spread since the last reduction

    def fetched(self, pipeline: str, span: Span) -> None:
        """Record a fetch of a pipeline."""
        self._fetches += 1
        self._began = min(self._began, span.begin)
        is_new = pipeline not in self._positions
        self._positions[pipeline], self._newest[pipeline] = span, self._fetches
        for gone in [each for each, at in self._newest.items() if self._fetches - at >= ACTIVE_FETCHES]:
            del self._positions[gone], self._newest[gone]
        # Positions change slowly, and choosing takes long with many pipelines.
        if is_new or self._fetches % len(self._positions) == 0:
            found = sharing_group(self._positions, self._fits()) if len(self._positions) > 1 else NO_SHARING
            if found.pipelines != self.group.pipelines:
                self.group, self._largest = found, 0.0
            self._largest = max(self._largest, found.spread)
            self.group = found._replace(spread=max(found.spread, self.group.spread))
        if self._fetches % STEADY_FETCHES == 0:
            self.group, self._largest = self.group._replace(spread=self._largest), 0.0

    def is_awaited(self, pipeline: str, span: Span) -> bool:
        """Return whether other pipelines still need the samples of a part."""
        members = self.group.pipelines
        others = members - {pipeline} if pipeline in members else ()
        return any(each in self._positions and self._positions[each].end < span.end for each in others)

    @property
    def share(self) -> float:
        """The largest share of the bytes of all samples that copies may take."""
        # In the first epoch, the samples cached for good are all from its beginning, and the others need copies.
        uncached = 1.0 if self.passed_position < self._began + 1 else (1 - self._fits()) / (1 - self.group.spread)
        return self.group.spread * uncached

    @property
    def passed_position(self) -> float:
        """The position that all pipelines sharing copies have reached; infinite if none share any."""
        members = [self._positions[each] for each in self.group.pipelines if each in self._positions]
        return min((span.begin for span in members), default=math.inf)


def sharing_group(positions: Mapping[str, Span], fits: float) -> SharingGroup:
    """Choose the pipelines that share copies, from the last part that each fetched."""
    best, found = (1 - fits) * len(positions), NO_SHARING
    if fits >= 1 or len(positions) < 2:
        return found
    ordered = sorted((span, pipeline) for pipeline, span in positions.items())
    for end in range(2, len(ordered) + 1):
        last = ordered[end - 1][0]
        largest = last.end - last.begin
        for begin in range(end - 2, -1, -1):
            first = ordered[begin][0]
            largest = max(largest, first.end - first.begin)
            # One more part, because a part's copies stay until the last pipeline has passed all of them.
            spread = COPIES * (last.end - first.begin + largest)
            if spread >= fits:  # the whole cache is too small for the copies
                break
            read = (1 - fits) / (1 - spread) * (1 + len(ordered) - (end - begin))
            if read < best:
                members = frozenset(pipeline for _, pipeline in ordered[begin:end])
                best, found = read, SharingGroup(members, spread)
    return found
