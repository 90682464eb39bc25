"""Copies of samples that are kept for a while, because other pipelines need them soon. Pure.

Pipelines read the same samples in the same order, each at its own position. A sample that is not cached for good is
read once for all of them if the first one's copy stays until the last one has come by. If they are within a share *s*
of an epoch, and the cache could hold a share *x* of the samples, such copies take *s* (1 - x) / (1 - s) of the bytes of
all samples, and as much less stays for good. Then

    (1 - x) / (1 - s)

of the samples are read in an epoch by the pipelines within *s* together, and by each other one. Without copies, each
pipeline reads 1 - x. The pipelines that share copies are chosen so that the sum is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

ACTIVE_FETCHES = 256
"""A pipeline counts until this many fetches after its last one."""

SPREAD = 1.25
"""Spread that copies get room for, relative to the present one, which varies."""


STEADY = 0.8
"""The room for copies stays as it is until less than this share of it is needed. Samples that stay for good and copies
would otherwise displace each other with each fetch.
"""


class Span(NamedTuple):
    """The beginning and end of a part, in epochs."""

    begin: float
    end: float


class Together(NamedTuple):
    """The pipelines that share copies, and the share of the bytes of all samples that copies may take."""

    pipelines: frozenset[str]
    share: float


NOBODY = Together(frozenset(), 0.0)


class SharedReads:
    """The positions of pipelines in epochs, and which of them share copies.

    ``fits`` returns the share of the samples that the cache could hold.
    """

    def __init__(self, fits: Callable[[], float]) -> None:
        self._fits = fits
        self._positions: dict[str, Span] = {}  # the part that a pipeline fetched last
        self._newest: dict[str, int] = {}  # pipeline -> number of its newest fetch
        self._fetches = 0
        self.together = NOBODY

    def fetched(self, pipeline: str, span: Span) -> None:
        """Record a fetch of a pipeline."""
        self._fetches += 1
        is_new = pipeline not in self._positions
        self._positions[pipeline], self._newest[pipeline] = span, self._fetches
        for gone in [each for each, at in self._newest.items() if self._fetches - at >= ACTIVE_FETCHES]:
            del self._positions[gone], self._newest[gone]
        # Positions change slowly, and the choice takes time for many pipelines.
        if is_new or self._fetches % len(self._positions) == 0:
            found = together(self._positions, self._fits()) if len(self._positions) > 1 else NOBODY
            is_same = found.pipelines == self.together.pipelines
            if not (is_same and STEADY * self.together.share <= found.share <= self.together.share):
                self.together = found

    def awaited(self, pipeline: str, span: Span) -> bool:
        """Return whether others will need the samples that a pipeline reads."""
        members = self.together.pipelines
        others = members - {pipeline} if pipeline in members else ()
        return any(each in self._positions and self._positions[each].end < span.end for each in others)

    @property
    def passed(self) -> float:
        """The position up to which all pipelines have used the copies; infinite without pipelines that share any."""
        members = [self._positions[each] for each in self.together.pipelines if each in self._positions]
        return min((span.begin for span in members), default=math.inf)


def together(positions: Mapping[str, Span], fits: float) -> Together:
    """Choose the pipelines that share copies, from the parts that they fetched last."""
    best, found = (1 - fits) * len(positions), NOBODY
    if fits >= 1 or len(positions) < 2:
        return found
    ordered = sorted((span, pipeline) for pipeline, span in positions.items())
    for end in range(2, len(ordered) + 1):
        for begin in range(end - 2, -1, -1):
            spread = SPREAD * (ordered[end - 1][0].end - ordered[begin][0].begin)
            if spread >= fits:  # all of the cache for copies would not suffice
                break
            read = (1 - fits) / (1 - spread) * (1 + len(ordered) - (end - begin))
            if read < best:
                members = frozenset(pipeline for _, pipeline in ordered[begin:end])
                best, found = read, Together(members, spread * (1 - fits) / (1 - spread))
    return found
