"""Division of trials into cohorts by their pace.

Members of a cohort get the same blocks, so the slowest sets the pace. Two cohorts run at two paces, but their blocks
are prepared twice. The objective is the total number of blocks per second delivered to all trials, if prep divides its
time by max-min fairness. Trials of very different paces are therefore split if prep has spare cores, and stay together
if prep is the bottleneck.

A split needs a gain of `SPLIT_GAIN` that lasts for `SPLIT_AFTER_S`, and a merge may lose at most `MERGE_LOSS`. The gap
between the two limits prevents oscillation due to noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mbaas.model.lending import fair_shares

SPLIT_GAIN = 0.10
"""Least relative gain in delivered blocks for a split. Below it, a second cohort would mostly cost prep time."""

SPLIT_AFTER_S = 0.5
"""A cohort is split only if the same trials were slow for this long, that is, in two consecutive measurements. These
are already averages over seconds.
"""

MERGE_LOSS = 0.03
"""Largest relative loss in delivered blocks for a merge; paces are not measured more accurately than that."""


class Group(NamedTuple):
    """Trials that get the same blocks.

    Attributes:
        trials: number of trials.
        blocks_per_s: pace of the slowest, with data always ready.
    """

    trials: int
    blocks_per_s: float


class CohortSplit(NamedTuple):
    """Best split of a cohort.

    Attributes:
        faster: number of fastest trials that are separated from the others.
        gain: additional blocks for its trials, relative to their blocks together.
    """

    faster: int
    gain: float


def made_per_s(groups: Sequence[Group], prep_per_s: float) -> list[float]:
    """Compute the blocks/s prepared for each group if prep divides its maximum speed fairly; groups share no blocks."""
    return fair_shares([group.blocks_per_s for group in groups], prep_per_s)


def given_per_s(groups: Sequence[Group], prep_per_s: float) -> float:
    """Compute the total blocks/s delivered to all trials of the groups; arguments as in `made_per_s`."""
    made = made_per_s(groups, prep_per_s)
    return sum(group.trials * per_s for group, per_s in zip(groups, made, strict=True))


def best_split(paces: Sequence[float], others: Sequence[Group], prep_per_s: float) -> CohortSplit | None:
    """Find the best split of a cohort into a faster and a slower one; None if the gain is below `SPLIT_GAIN`.

    Args:
        paces: blocks/s of each of its trials with data always ready, descending.
        others: the other cohorts.
        prep_per_s: maximum speed of prep in blocks/s.
    """
    together = [Group(len(paces), paces[-1]), *others]
    given, own = given_per_s(together, prep_per_s), len(paces) * made_per_s(together, prep_per_s)[0]
    splits = [
        CohortSplit(faster, (given_per_s([*parted(paces, faster), *others], prep_per_s) - given) / own)
        for faster in range(1, len(paces))
        if paces[faster - 1] > paces[faster]
    ]
    best = max(splits, key=lambda split: split.gain, default=None)
    return best if best is not None and best.gain >= SPLIT_GAIN else None


def parted(paces: Sequence[float], faster: int) -> tuple[Group, Group]:
    """Return the groups of the first ``faster`` trials and of the others; ``paces`` must be descending."""
    return Group(faster, paces[faster - 1]), Group(len(paces) - faster, paces[-1])


def may_unite(one: Group, other: Group, others: Sequence[Group], prep_per_s: float) -> bool:
    """Return whether two cohorts lose at most `MERGE_LOSS` by merging; ``others`` are all other cohorts."""
    apart = [one, other, *others]
    united = Group(one.trials + other.trials, min(one.blocks_per_s, other.blocks_per_s))
    made = made_per_s(apart, prep_per_s)
    own = one.trials * made[0] + other.trials * made[1]
    return given_per_s(apart, prep_per_s) - given_per_s([united, *others], prep_per_s) <= MERGE_LOSS * own
