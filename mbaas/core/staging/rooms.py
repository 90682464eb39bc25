"""Division of the staging budget among cohorts, if consumers use several pipelines.

With one stream, prep runs ahead as far as the layout says. With several, the cohorts share the budget: each gets room
for `MIN_BLOCKS_STAGED` of its blocks, and what is left is divided equally. If not even that fits, a cohort's next block
is prepared while the one before is in use, or only once a consumer waits for it. So any number of pipelines runs in any
budget that holds one block, and none makes another's blocks again by taking their room.
"""

from __future__ import annotations

from collections.abc import Iterable

from mbaas.core.layout import MIN_BLOCKS_STAGED
from mbaas.core.staging.consumers import Cohort
from mbaas.core.staging.streams import Stream


def room_blocks(stream: Stream, cohorts: Iterable[Cohort], budget_bytes: int) -> int:
    """Return the blocks of a stream that fit its part of the budget, as the last `divide` made it."""
    cohorts = [*cohorts]
    if not _share(cohorts):
        return budget_bytes // stream.block_bytes
    return sum(cohort.room_blocks for cohort in cohorts if cohort.stream is stream)


def divide(cohorts: Iterable[Cohort], budget_bytes: int, ahead_blocks: int, slack_blocks: int) -> None:
    """Set each cohort's room, and how far prep may run ahead for it.

    ``ahead_blocks`` and ``slack_blocks`` are the layout's, which bound both.
    """
    cohorts = [*cohorts]
    if not _share(cohorts):
        for cohort in cohorts:
            cohort.ahead_blocks, cohort.slack_blocks = ahead_blocks, slack_blocks
        return
    reading = [cohort for cohort in cohorts if any(member.asked for member in cohort.members)]
    all_bytes = sum([cohort.stream.block_bytes for cohort in reading])
    left = budget_bytes - MIN_BLOCKS_STAGED * all_bytes
    for cohort in reading:
        if left >= 0:
            ahead = MIN_BLOCKS_STAGED - 1 + left // len(reading) // cohort.stream.block_bytes
        else:
            ahead = int((MIN_BLOCKS_STAGED - 1) * all_bytes <= budget_bytes)
        cohort.room_blocks = 1 + ahead
        cohort.ahead_blocks = min(ahead, ahead_blocks)
        cohort.slack_blocks = min(ahead - cohort.ahead_blocks, slack_blocks)


def _share(cohorts: Iterable[Cohort]) -> bool:
    return len({cohort.stream.number for cohort in cohorts}) > 1
