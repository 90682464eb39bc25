"""A reader reuses the reply for a part for a second, and only if the node would give the same one again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mbaas.cache.reader import REUSED_PARTS, REUSED_S, FetchReply, RecentParts
from mbaas.samples.placement import PartRequest
from mbaas.wire.samples import Amount, FetchCounts

SAMPLES = 3
ROWS = [np.zeros(1, np.uint8)] * SAMPLES


def reply(*, local: int = SAMPLES, decoded: int = SAMPLES, **more: Any) -> FetchReply:
    counts = FetchCounts(local=Amount(local, 9), storage=Amount(SAMPLES - local, 9), decoded=Amount(decoded, 9))
    none = np.zeros(SAMPLES, np.int64)
    return FetchReply((1,), none.astype(np.int32), none, none, {}, counts, incarnation=1, slab_refs=[None], **more)


def added(parts: RecentParts, block: int, now: float, given: FetchReply | None = None) -> FetchReply:
    given = given or reply()
    parts.add(PartRequest(block), given, ROWS, now)
    return given


def test_a_part_is_reused_until_its_time_is_over() -> None:
    parts = RecentParts()
    given = added(parts, 0, 5.0)
    assert parts.find(PartRequest(0), 5.0 + REUSED_S / 2) == (given, ROWS)
    assert parts.find(PartRequest(1), 5.0) is None
    assert parts.find(PartRequest(0), 5.0 + REUSED_S) is None


def test_expired_parts_hold_no_memory() -> None:
    parts = RecentParts()
    added(parts, 0, 5.0)
    added(parts, 1, 5.0 + REUSED_S, reply(local=2, decoded=2))
    assert not parts._parts


def test_the_newest_parts_are_reused() -> None:
    parts = RecentParts()
    for block in range(REUSED_PARTS + 2):
        added(parts, block, 5.0)
    assert [block for block in range(REUSED_PARTS + 2) if parts.find(PartRequest(block), 5.0)] == [
        *range(2, REUSED_PARTS + 2)
    ]


def test_slabs_that_the_node_dropped_do_not_stay_in_memory() -> None:
    parts = RecentParts()
    added(parts, 0, 5.0)
    added(parts, 1, 5.0, reply(dropped_slabs=(7,)))
    assert parts.find(PartRequest(0), 5.0) is None
    assert parts.find(PartRequest(1), 5.0) is not None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(reply(local=2, decoded=2), id="read from storage"),
        pytest.param(reply(decoded=2), id="encoded"),
        pytest.param(reply(hand_in=np.array([1])), id="to be handed in"),
    ],
)
def test_a_part_that_may_be_read_otherwise_next_time_is_requested_again(other: FetchReply) -> None:
    parts = RecentParts()
    added(parts, 0, 5.0, other)
    assert parts.find(PartRequest(0), 5.0) is None
