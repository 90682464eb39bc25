"""Trials of different paces share blocks only where that costs little, and each keeps its pace; times are virtual."""

from __future__ import annotations

import pytest
from staging_feeds import Feed, give, kinds, prepared
from timed_staging import Search

from mbaas.core.staging import events as ev
from mbaas.core.staging.pace import (
    MERGE_LOSS,
    SPLIT_AFTER_S,
    SPLIT_GAIN,
    CohortSplit,
    Group,
    best_split,
    given_per_s,
    made_per_s,
    may_unite,
)

pytestmark = pytest.mark.slow


def test_prep_divides_its_time_fairly() -> None:
    groups = [Group(1, 10.0), Group(1, 1.0), Group(5, 4.0)]
    assert made_per_s(groups, 100.0) == [10.0, 1.0, 4.0], "as much as each takes"
    assert made_per_s(groups, 9.0) == [4.0, 1.0, 4.0], "a slow one gets all it needs; the others get equal parts"
    assert made_per_s(groups, 6.0) == [2.5, 1.0, 2.5]
    assert given_per_s(groups, 9.0) == 4.0 + 1.0 + 5 * 4.0


def test_a_cohort_is_parted_where_most_is_gained() -> None:
    assert best_split([1.0, 1.0, 0.5, 0.1], [], 100.0) == CohortSplit(2, pytest.approx(4.5))
    assert best_split([1.0, 0.9, 0.85], [], 100.0) is None, f"less than {SPLIT_GAIN:.0%}"
    assert best_split([6.0, 5.0], [], 100.0) == CohortSplit(1, SPLIT_GAIN), "10 delivered together, 11 after a split"
    assert best_split([1.0] * 9, [], 100.0) is None


def test_a_gain_is_a_share_of_what_the_cohort_itself_is_given() -> None:
    """Two trials receive 1 together and 1.5 after a split; other groups do not count."""
    assert best_split([1.0, 0.5], [Group(100, 7.0)], 100.0) == CohortSplit(1, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (Group(10, 10.0), Group(1, 9.75), True),  # the loss is 10 x 0.25 of 109.75, or 2.3 %
        (Group(10, 10.0), Group(1, 9.6), False),  # 3.6 %
        (Group(1, 10.0), Group(10, 9.0), True),  # 1 % of the total, although 10 % of one group
        (Group(100, 100.0), Group(1, 97.02), True),  # 2.95 %
        (Group(1, 51.5), Group(1, 48.5), True),  # 3 %, the limit
        (Group(100, 100.0), Group(50, 95.5), False),  # 3.05 %
    ],
)
def test_a_loss_is_a_share_of_what_both_are_given(one: Group, other: Group, may: bool) -> None:
    assert may_unite(one, other, [], 1e6) is may
    assert may_unite(other, one, [], 1e6) is may


def test_where_prep_is_what_they_wait_for_they_share_all_it_makes() -> None:
    assert best_split([20.0, 20.0, 10.0, 10.0], [], 5.0) is None
    assert may_unite(Group(2, 20.0), Group(2, 10.0), [], 5.0)
    assert not may_unite(Group(2, 20.0), Group(2, 10.0), [], 50.0)
    assert may_unite(Group(2, 20.0), Group(2, 19.8), [], 50.0), f"less than {MERGE_LOSS:.0%}"


def test_each_pace_reaches_what_it_would_alone() -> None:
    steps_s = {"fast-1": 0.03, "fast-2": 0.03, "half-1": 0.06, "half-2": 0.06, "tenth-1": 0.3, "tenth-2": 0.3}
    search = Search(steps_s)
    rates = search.rates(40.0)
    for trial, step_s in steps_s.items():
        assert rates[trial] >= 0.95 / step_s, trial
    assert search.cohorts() == {frozenset({f"{pace}-1", f"{pace}-2"}) for pace in ("fast", "half", "tenth")}
    assert search.all_exact()
    assert search.made <= 40.0 * (1 / 0.03 + 1 / 0.06 + 1 / 0.3) * 1.02, "at most once for each block and pace"


def test_without_known_paces_all_go_as_the_slowest() -> None:
    search = Search({"fast": 0.03, "slow": 0.3}, tells_paces=False)
    assert search.rates(10.0)["fast"] == pytest.approx(1 / 0.3, rel=0.05)


@pytest.mark.parametrize("prep_s", [0.02, 0.04, 0.08, 0.16, 0.32])
def test_where_prep_has_too_few_cores_no_less_is_given_than_together_or_apart(prep_s: float) -> None:
    steps_s = {"fast-1": 0.03, "fast-2": 0.03, "half": 0.06, "tenth": 0.3}
    chosen = Search(steps_s, prep_s=prep_s).rates(40.0)
    together = Search(steps_s, prep_s=prep_s, tells_paces=False).rates(40.0)
    apart = given_per_s([Group(1, 1 / step_s) for step_s in steps_s.values()], 2 / prep_s)
    assert sum(chosen.values()) >= 0.95 * max(sum(together.values()), apart)


def test_what_a_faster_one_had_made_is_kept_for_the_slower_as_long_as_there_is_room() -> None:
    """The budget holds an epoch, so each block is prepared once, although the slower trial needs it much later."""
    search = Search({"fast": 0.03, "slow": 0.12}, budget_blocks=100)
    rates = search.rates(30.0)
    assert rates["fast"] >= 0.95 / 0.03
    assert rates["slow"] >= 0.95 / 0.12
    assert search.made <= 1.1 * 30 / 0.03, "for the faster one only"
    assert search.all_exact()
    short = Search({"fast": 0.03, "slow": 0.12}, budget_blocks=12)
    assert short.rates(30.0)["fast"] >= 0.95 / 0.03
    assert short.made > search.made


# ---- splitting a cohort: quickly, but not for a short slowdown ----


def feed_of(*trials: str, **options: object) -> Feed:
    """Feed whose trials begin together, long after its clock started."""
    feed = Feed(**options)
    feed.now = 100.0
    for trial in trials:
        feed.join(trial, asks=False)
    return feed


def tell_paces(feed: Feed, *, after_s: float = 0.0, **blocks_per_s: float) -> list[ev.Instruction]:
    """Report the trials' paces to the core, `after_s` later; prep is faster than all trials together."""
    feed.now += after_s
    trials = tuple(ev.TrialPace((trial,), per_s) for trial, per_s in blocks_per_s.items())
    return feed.send(ev.PacesMeasured(trials, prep_per_s=100.0))


def cohorts(feed: Feed) -> list[str]:
    return sorted(map(str, feed.core.consumers.cohorts.values()))


def test_a_trial_goes_on_apart_when_it_was_too_slow_for_long_enough_and_the_log_and_the_status_say_why() -> None:
    feed = feed_of("ann", "bob")
    assert not tell_paces(feed, ann=10, bob=1)
    assert not tell_paces(feed, ann=10, bob=1, after_s=SPLIT_AFTER_S / 2)
    (note,) = kinds(tell_paces(feed, ann=10, bob=1, after_s=SPLIT_AFTER_S / 2), ev.Note)
    assert cohorts(feed) == ["ann", "bob"]
    why = "1 blocks/s instead of 10; the split delivers 450 % more in total"
    assert note.text == f"split bob from ann: {why}"
    assert {name: consumer.apart for name, consumer in feed.core.consumers.by_name.items()} == {"ann": "", "bob": why}


def test_a_trial_that_caught_up_in_between_has_all_of_that_time_again() -> None:
    feed = feed_of("ann", "bob")
    tell_paces(feed, ann=10, bob=1)
    tell_paces(feed, ann=10, bob=10, after_s=SPLIT_AFTER_S / 2)
    tell_paces(feed, ann=10, bob=1, after_s=SPLIT_AFTER_S / 2)
    assert cohorts(feed) == ["ann, bob"]
    tell_paces(feed, ann=10, bob=1, after_s=SPLIT_AFTER_S)
    assert cohorts(feed) == ["ann", "bob"]


def test_slow_trials_of_several_paces_are_all_parted_in_one_look() -> None:
    """Otherwise the slowest trials would delay the others until the next split is decided."""
    feed = feed_of("ann", "bob", "cid", "dan")
    paces = {"ann": 10.0, "bob": 5.0, "cid": 1.0, "dan": 1.0}
    tell_paces(feed, **paces)
    notes = kinds(tell_paces(feed, after_s=SPLIT_AFTER_S, **paces), ev.Note)
    assert cohorts(feed) == ["ann", "bob", "cid, dan"]
    assert [note.text.partition(":")[0] for note in notes] == [
        "split bob, cid, dan from ann",
        "split cid, dan from bob",
    ]


def test_blocks_for_a_trial_that_need_not_wait_any_more_are_begun_at_once() -> None:
    feed = feed_of("fast", "slow", ahead=2)
    assert [give(feed, "fast", block) for block in range(3)] == [(0,), (1,), ()], "it waits for the slow one"
    tell_paces(feed, fast=10, slow=1)
    assert prepared(tell_paces(feed, fast=10, slow=1, after_s=SPLIT_AFTER_S)) == [2]
