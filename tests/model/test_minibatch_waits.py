"""Waits are counted in classes, and steps whose ranks wait unequally are found whatever the order of reports."""

from __future__ import annotations

import math
from random import Random

import pytest

from mbaas.model import waits
from mbaas.model.waits import CLASSES, WAIT_BOUNDS_S, RankSteps, UnevenSteps, WaitCounts, wait_class


def counted(*waits_s: float) -> WaitCounts:
    counts = [0] * CLASSES
    for wait_s in waits_s:
        counts[wait_class(wait_s)] += 1
    return WaitCounts(tuple(counts))


def test_a_wait_is_in_the_first_class_whose_bound_it_does_not_exceed() -> None:
    assert [wait_class(bound_s) for bound_s in WAIT_BOUNDS_S] == [*range(CLASSES - 1)]
    assert [wait_class(bound_s * 1.01) for bound_s in WAIT_BOUNDS_S] == [*range(1, CLASSES)]
    assert wait_class(0.0) == 0


def test_the_time_within_which_a_share_of_the_minibatches_came() -> None:
    """Of 20 minibatches 18 came at once, one within 0.1 s and one after 11 s."""
    found = counted(*[0.0] * 18, 0.07, 11.0)
    assert [found.within_s(share) for share in (0.5, 0.9, 0.95, 0.96)] == [0.001, 0.001, 0.1, math.inf]
    assert WaitCounts().within_s(0.95) == 0.0
    assert (found + counted(0.07)).counts[wait_class(0.07)] == 2
    assert (found + found) - found == found


def report(table: UnevenSteps, rank: int, *percents: int, first: int = 0, step: int = 1, loader: str = "") -> None:
    """Report steps from number ``step`` on, before which the loader made ``first`` steps."""
    numbered = [*enumerate(percents, step)]
    table.take("t", f"t[{rank}]", ranks=2, loader=loader or f"loader-{rank}", first=first, waits=numbered)


@pytest.mark.parametrize(("one", "other", "uneven"), [(0, 10, 0), (0, 11, 1), (60, 49, 1), (95, 100, 0), (100, 0, 1)])
def test_a_step_is_uneven_if_the_waits_differ_by_more_than_a_tenth_of_it(one: int, other: int, uneven: int) -> None:
    table = UnevenSteps()
    report(table, 0, one)
    assert table.by_trial(["t"]) == (RankSteps("t", 2, 0, 0),), "the other rank has not reported the step"
    report(table, 1, other)
    assert table.by_trial(["t", "single"]) == (RankSteps("t", 2, 1, uneven),)


def test_reports_that_overlap_come_late_or_repeat_count_each_step_once() -> None:
    """Two ranks make 200 steps; every third is uneven.

    Each report begins anywhere among the steps already sent, and old reports come again.
    """
    random = Random(0)
    for _ in range(50):
        table, sent = UnevenSteps(), [0, 0]
        told: list[tuple[int, int, int]] = []
        while min(sent) < 200:
            rank = random.randrange(2)
            begin, end = random.randint(0, sent[rank]), min(200, sent[rank] + random.randint(0, 40))
            sent[rank] = max(sent[rank], end)
            told += [(rank, begin, end), random.choice([*told, (rank, begin, end)])]
        for rank, begin, end in told:
            percents = [30 if rank and step % 3 == 0 else 0 for step in range(begin, end)]
            report(table, rank, *percents, first=begin, step=begin)
        assert (table.steps, table.uneven) == (200, 67)


def test_a_rank_that_returns_with_a_new_loader_repeats_steps_that_the_others_have_not_made() -> None:
    """Rank 1 dies after step 3, and both go back to step 2."""
    table = UnevenSteps()
    report(table, 0, 0, 0)
    report(table, 1, 0, 0, 50)
    report(table, 0, 0, 0, step=2, loader="again-0")
    report(table, 1, 0, 0, step=2, loader="again-1")
    assert (table.steps, table.uneven) == (4, 1), "steps 1, 2, 3 against the first loader of rank 1, and 2 again"


def test_a_trial_with_another_number_of_ranks_begins_again() -> None:
    table = UnevenSteps()
    report(table, 0, 0)
    report(table, 1, 50)
    table.take("t", "t[0]", ranks=3, loader="x", first=0, waits=[(1, 0)])
    assert table.by_trial(["t"]) == (RankSteps("t", 3, 0, 0),)
    assert (table.steps, table.uneven) == (1, 1)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("KEPT_STEPS", 5), ("KEPT_TRIALS", 2), ("KEPT_LOADERS", 2)):
        monkeypatch.setattr(waits, name, most)
    table = UnevenSteps()
    report(table, 0, *range(20))
    report(table, 1, *range(20))
    assert table.steps == 5, "the last five steps of rank 0"
    for trial in "abc":
        table.take(trial, f"{trial}[0]", ranks=2, loader=trial, first=0, waits=[(1, 0)])
    assert [each.trial for each in table.by_trial("tabc")] == ["b", "c"]
    assert len(table._taken) == 2
