"""The fastest trial may lead the slowest by as much as memory allows before it has to wait."""

from __future__ import annotations

import pytest
from staging_feeds import Feed, delivered, give
from timed_staging import Search

from mbaas.core.staging import events as ev

pytestmark = pytest.mark.slow

RUN_S = 40.0


@pytest.mark.parametrize("prep_s", [0.02, 0.08])
def test_a_trial_that_stops_for_a_moment_stops_no_other(prep_s: float) -> None:
    """Eight trials work 50 ms on a block, but each takes 550 ms on one of 40 blocks, as for a checkpoint."""

    def mean_rate(slack: int) -> float:
        steps_s = {f"t{number}": 0.05 for number in range(8)}
        search = Search(steps_s, prep_s=prep_s, pause_s=0.5, budget_blocks=5 + slack, slack_blocks=slack)
        rates = search.rates(RUN_S)
        assert search.all_exact()
        assert search.made <= 1.01 * RUN_S * max(rates.values()), "each block is still prepared once"
        return sum(rates.values()) / 8

    alone = 40 / (40 * 0.05 + 0.5)
    assert mean_rate(slack=12) >= 0.98 * alone
    assert mean_rate(slack=0) < 0.6 * alone, "each pause would stop all other trials"


@pytest.mark.parametrize("prep_s", [0.01, 0.06])
@pytest.mark.parametrize("budget", [8, 12])
def test_trials_of_other_paces_lose_nothing_by_it(budget: int, prep_s: float) -> None:
    """They have split, so blocks that one cohort has ahead use room that another cohort lacks."""
    steps_s = {f"{pace} {number}": pace for pace in (0.03, 0.06, 0.12) for number in range(2)}
    given, made = [], []
    for slack in (0, 8):
        search = Search(steps_s, prep_s=prep_s, pause_s=0.2, budget_blocks=budget, slack_blocks=slack)
        given.append(sum(search.rates(RUN_S).values()))
        made.append(search.made / given[-1])
    assert given[1] >= 0.99 * given[0]
    assert made[1] <= 1.01 * made[0], "no block is prepared more often"


def test_a_trial_that_rested_for_several_epochs_goes_on_where_it_was() -> None:
    """Epochs have one block: while one trial validates, the other receives six more, and all are still staged."""
    feed = Feed(budget_blocks=20, ahead=3, slack=16, blocks_per_epoch=1, workers=2)
    feed.join("slow")
    feed.join("fast")
    assert give(feed, "slow", 0) == (0,)
    feed.wait(2.0)
    for block in range(7):
        assert give(feed, "fast", block) == (block,)
    for block in range(1, 7):
        assert delivered(feed.ask("slow", block)) == {"slow": (block,)}, "it is there at once"
    assert give(feed, "fast", 7) == (7,)


def test_a_trial_that_comes_when_the_others_are_through_finds_their_epochs() -> None:
    """Its process had no free core. Epochs have one block, and its reservation is the last member of the cohort."""
    feed = Feed(budget_blocks=20, ahead=3, slack=16, blocks_per_epoch=1, workers=2)
    feed.send(ev.Announce("first", others=1))
    feed.join("first")
    feed.send(ev.Announce("late"))
    for block in range(7):
        assert give(feed, "first", block) == (block,)
    feed.send(ev.Leave("first", None))
    feed.wait(8.0)
    assert feed.join("late") == 0
    for block in range(1, 7):
        assert delivered(feed.ask("late", block)) == {"late": (block,)}, "it is there at once"


def test_what_is_made_ahead_is_counted_from_the_furthest() -> None:
    """Epochs have 40 blocks: one trial received four, so three more may be prepared; the other received one."""
    feed = Feed(budget_blocks=20, ahead=3, slack=16, blocks_per_epoch=40, workers=20)
    feed.join("slow")
    feed.join("fast")
    for block in range(4):
        assert give(feed, "fast", block) == (block,)
    (cohort,) = feed.core.consumers.cohorts.values()
    assert (cohort.slowest, cohort.horizon) == (1, 4 + 3)


def test_nothing_is_made_ahead_of_a_place_where_nobody_is_yet() -> None:
    """The successor of a trial that ended begins the next epoch; the remaining trial received three blocks."""
    feed = Feed(budget_blocks=20, ahead=3, slack=16, blocks_per_epoch=8, workers=20)
    for name in ("ends", "stays"):
        feed.join(name)
        for block in range(3):
            assert give(feed, name, block) == (block,)
    feed.send(ev.Leave("ends", None, successors=1))
    (cohort,) = feed.core.consumers.cohorts.values()
    assert sorted(member.cursor for member in cohort.members) == [3, 8]
    assert cohort.horizon == 3 + 3
