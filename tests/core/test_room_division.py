"""Cohorts with different pipelines divide the staging budget; those with one pipeline have the layout's room.

Blocks of the feed's pipeline have 10 bytes, those of a consumer's pipeline 30.
"""

import pytest

from mbaas.core.staging.rooms import divide, room_blocks
from tests.core.staged_blocks import Table

AHEAD, SLACK = 5, 2
"""The layout's bounds."""


def cohorts_of(*consumers):
    """Make the cohorts of consumers, each given as (stream, whether it has asked for a block) of all members."""
    table = Table()
    own = table.add_stream(block_bytes=30)
    for number, (stream, *asked) in enumerate(consumers):
        first = table.join(f"{number}", own.first if stream else 0)
        cohort = table.consumers.cohorts[first.cohort]
        members = [first, *(table.join(f"{number}-{k}", first.cursor, cohort=cohort) for k in range(1, len(asked)))]
        for member, has_asked in zip(members, asked, strict=True):
            member.asked = has_asked
    return table.consumers.streams, [*table.consumers.cohorts.values()]


def test_with_one_pipeline_each_cohort_has_the_room_of_the_layout():
    streams, cohorts = cohorts_of((0, True), (0, True))
    divide(cohorts, 200, AHEAD, SLACK)
    assert [(cohort.ahead_blocks, cohort.slack_blocks) for cohort in cohorts] == [(AHEAD, SLACK)] * 2
    assert room_blocks(streams[0], cohorts, 205) == 20


@pytest.mark.parametrize(
    ("budget_bytes", "rooms", "ahead"),
    [
        # three blocks of each are 120 bytes; 40 more for each pipeline are 4 blocks and 1 block
        pytest.param(200, [7, 4], [(5, 1), (3, 0)], id="more than enough"),
        pytest.param(120, [3, 3], [(2, 0), (2, 0)], id="three blocks"),
        pytest.param(119, [2, 2], [(1, 0), (1, 0)], id="two blocks"),
        pytest.param(80, [2, 2], [(1, 0), (1, 0)], id="exactly two blocks"),
        pytest.param(79, [1, 1], [(0, 0), (0, 0)], id="one block"),
    ],
)
def test_cohorts_with_different_pipelines_share_the_budget(budget_bytes, rooms, ahead):
    streams, cohorts = cohorts_of((0, True), (1, True))
    divide(cohorts, budget_bytes, AHEAD, SLACK)
    assert [cohort.room_blocks for cohort in cohorts] == rooms
    assert [(cohort.ahead_blocks, cohort.slack_blocks) for cohort in cohorts] == ahead
    assert [room_blocks(streams[number], cohorts, budget_bytes) for number in (0, 1)] == rooms


def test_a_pipeline_has_the_room_of_all_its_cohorts():
    """Three blocks of each of the three cohorts are 150 bytes; 20 more for each are two blocks, or none."""
    streams, cohorts = cohorts_of((0, True), (0, True), (1, True))
    divide(cohorts, 210, AHEAD, SLACK)
    assert [room_blocks(streams[number], cohorts, 210) for number in (0, 1)] == [10, 3]


def test_only_cohorts_that_read_have_room():
    """One member that asked for a block is enough."""
    _, cohorts = cohorts_of((0, False, True), (1, True), (1, False))
    divide(cohorts, 200, AHEAD, SLACK)
    assert [cohort.room_blocks for cohort in cohorts[:2]] == [7, 4]
    assert cohorts[2].room_blocks == cohorts_of((1, False))[1][0].room_blocks, "as it was"
