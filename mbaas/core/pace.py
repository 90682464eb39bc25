"""Which trials should share their blocks, and which go apart because of their pace.

Members of a cohort are given the same blocks, so in the long run all of them go at the pace of the slowest. Two cohorts
go at two paces, but a block is made for each of them. What is maximised is the number of blocks that all trials
together are given in a second, if prep divides its time fairly: each cohort is made as many blocks as it takes, as far
as none is made more because another one is made fewer (max-min fairness). So trials of very different paces go apart
where prep has the cores for it, and stay together where the data is what they wait for anyway.

A cohort parts only for a gain of `SPLIT_GAIN`, seen for `SPLIT_AFTER_S`; two unite where they lose no more than
`MERGE_LOSS` by it. Between the two nothing changes, so that noise moves nobody to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SPLIT_GAIN = 0.10
"""A cohort parts if its trials are given at least this share more. For less, a second cohort would mostly cost prep."""

SPLIT_AFTER_S = 0.5
"""A cohort parts only after the same trials were the slow ones for this long: in two looks in a row. That is enough,
because paces are means over seconds anyway.
"""

MERGE_LOSS = 0.03
"""Two cohorts unite if their trials lose at most this share of their blocks; paces are not measured more exactly than
that.
"""


class Group(NamedTuple):
    """Trials that get the same blocks.

    Attributes:
        trials: how many.
        blocks_per_s: what the slowest of them takes if its data is always ready.
    """

    trials: int
    blocks_per_s: float


class Split(NamedTuple):
    """Where a cohort is best parted.

    Attributes:
        faster: how many of its trials, the fastest, go on without the others.
        gain: what its trials are given more, as a share of what they are given together.
    """

    faster: int
    gain: float


def made_per_s(groups: Sequence[Group], prep_per_s: float) -> list[float]:
    """Compute the blocks/s that are made for each group if prep divides its time fairly.

    Args:
        groups: no block is made for two of them.
        prep_per_s: blocks/s that prep makes at most.
    """
    made, left_per_s = [0.0] * len(groups), prep_per_s
    # Those that take little first: what they leave of their part is divided among the others.
    for place, number in enumerate(sorted(range(len(groups)), key=lambda number: groups[number].blocks_per_s)):
        made[number] = min(groups[number].blocks_per_s, left_per_s / (len(groups) - place))
        left_per_s -= made[number]
    return made


def given_per_s(groups: Sequence[Group], prep_per_s: float) -> float:
    """Compute the blocks/s that all trials of the groups together are given; arguments as in `made_per_s`."""
    made = made_per_s(groups, prep_per_s)
    return sum(group.trials * per_s for group, per_s in zip(groups, made, strict=True))


def best_split(paces: Sequence[float], others: Sequence[Group], prep_per_s: float) -> Split | None:
    """Find where a cohort should be parted into a faster and a slower one.

    Args:
        paces: blocks/s that each of its trials takes if its data is always ready, descending.
        others: the other cohorts.
        prep_per_s: blocks/s that prep makes at most.

    Returns:
        where most is gained; None if that is less than `SPLIT_GAIN`.
    """
    together = [Group(len(paces), paces[-1]), *others]
    given, own = given_per_s(together, prep_per_s), len(paces) * made_per_s(together, prep_per_s)[0]
    splits = [
        Split(faster, (given_per_s([*parted(paces, faster), *others], prep_per_s) - given) / own)
        for faster in range(1, len(paces))
        if paces[faster - 1] > paces[faster]
    ]
    best = max(splits, key=lambda split: split.gain, default=None)
    return best if best is not None and best.gain >= SPLIT_GAIN else None


def parted(paces: Sequence[float], faster: int) -> tuple[Group, Group]:
    """Return the groups of the ``faster`` first trials and of the others; ``paces`` descend."""
    return Group(faster, paces[faster - 1]), Group(len(paces) - faster, paces[-1])


def may_unite(one: Group, other: Group, others: Sequence[Group], prep_per_s: float) -> bool:
    """Whether two cohorts that meet lose no more than `MERGE_LOSS` if they go on together.

    Args:
        one, other: the two.
        others: all other cohorts.
        prep_per_s: blocks/s that prep makes at most.
    """
    apart = [one, other, *others]
    united = Group(one.trials + other.trials, min(one.blocks_per_s, other.blocks_per_s))
    made = made_per_s(apart, prep_per_s)
    own = one.trials * made[0] + other.trials * made[1]
    return given_per_s(apart, prep_per_s) - given_per_s([united, *others], prep_per_s) <= MERGE_LOSS * own
