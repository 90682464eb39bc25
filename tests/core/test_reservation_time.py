"""Reservations last as long as trials have taken to arrive; epochs have 8 blocks."""

from __future__ import annotations

import pytest
from staging_feeds import Feed, delivered, give, kinds

from mbaas.core.staging import events as ev
from mbaas.core.staging.reservations import LEAST_S, MARGIN, MOST_GIVEN_UP, REMEMBERED, ReservationTime


def test_before_anybody_came_it_is_what_the_user_allows():
    assert ReservationTime(20.0).hold_s(0.0) == ReservationTime(20.0).hold_s(0.001) == 20.0


def test_the_longest_of_the_newest_arrivals_counts():
    time = ReservationTime(20.0)
    for seconds in (9.0, *[3.0 + number / 10 for number in range(REMEMBERED)]):
        time.came(seconds)
    assert time.hold_s(0.0) == pytest.approx(MARGIN * (3.0 + (REMEMBERED - 1) / 10))


@pytest.mark.parametrize(("first_s", "held_s"), [(20.0, LEAST_S), (2.0, 2.0)])
def test_it_is_never_so_short_that_a_busy_machine_would_make_it_vain(first_s, held_s):
    time = ReservationTime(first_s)
    time.came(0.01)
    assert time.hold_s(0.0) == held_s


def test_who_needs_longer_than_the_user_allows_is_waited_for_only_if_an_epoch_takes_longer_still():
    time = ReservationTime(20.0)
    time.came(15.0)
    assert [time.hold_s(epoch_s) for epoch_s in (0.0, 20.0, 29.0, 30.0, 400.0)] == [0.0, 0.0, 0.0, 30.0, 30.0]


def test_who_comes_when_its_place_is_gone_is_learned_from():
    time = ReservationTime(20.0)
    time.give_up("a", since=100.0)
    time.joined("b", 103.0)
    assert time.hold_s(0.0) == 20.0, "no trial waited for b"
    time.joined("a", 103.0)
    assert time.hold_s(0.0) == 6.0
    time.joined("a", 190.0)
    assert time.hold_s(0.0) == 6.0, "joining again does not count as an arrival"


def test_whether_those_who_are_announced_begin_at_once_is_known_from_the_last_one():
    time = ReservationTime(20.0)
    assert not time.at_once
    time.came(1.0, at_once=True)
    assert time.at_once
    time.came(1.0)
    assert time.at_once, "a resumed trial is not evidence about others"
    time.give_up("a", since=100.0)
    time.joined("a", 101.0, at_once=False)
    assert not time.at_once


def test_a_place_that_nobody_waits_for_may_be_held_longer_than_the_user_allows():
    time = ReservationTime(20.0)
    time.came(15.0, at_once=True)
    assert time.hold_s(0.0) == 30.0


def test_what_is_remembered_is_bounded():
    time = ReservationTime(20.0)
    for number in range(MOST_GIVEN_UP + 1):
        time.give_up(f"t{number}", since=0.0)
    time.joined("t0", 1.0)
    assert time.hold_s(0.0) == 20.0
    time.joined("t1", 8.0)
    assert time.hold_s(0.0) == 16.0


def make_feed(**changed: object) -> Feed:
    """Feed whose clock started long ago, so that no duration can count from its start."""
    feed = Feed(**{"blocks_per_epoch": 8, "ahead": 2, "credit": 4, "lease_s": 500.0, "patience_s": 500.0, **changed})
    feed.now = 1000.0
    return feed


def reserved(feed: Feed) -> dict[str, float]:
    """Remaining seconds of each reservation, by name."""
    found = feed.core.consumers.by_name.values()
    return {consumer.name: consumer.deadline - feed.now for consumer in found if not consumer.session}


def test_a_place_is_held_as_long_as_the_last_trials_took_to_join():
    feed = make_feed()
    feed.send(ev.Announce("a"))
    assert reserved(feed) == {"a": 20.0}
    feed.wait(4.0)
    feed.join("a")
    feed.send(ev.Announce("b"))
    assert reserved(feed) == {"b": 8.0}


def test_the_place_of_one_that_ended_is_held_as_long_as_it_took_until_others_were_announced():
    feed = make_feed()
    for name in ("a", "b", "c"):
        feed.join(name)
    feed.send(ev.Leave("a", None, successors=1))
    assert reserved(feed) == {"reservation 0": 20.0}
    feed.wait(3.0)
    feed.send(ev.Announce("d"))
    assert reserved(feed) == {"d": 20.0}, "how long it takes to join is not known yet"
    feed.send(ev.Leave("b", None, successors=1))
    assert reserved(feed) == {"d": 20.0, "reservation 1": 6.0}


def test_a_trial_that_joins_before_it_is_announced_takes_the_place_that_was_held_for_it():
    """Class trainables of Tune join in their constructor, which runs before callbacks hear of the trial's start."""
    feed = make_feed()
    for name in ("a", "b"):
        feed.join(name)
    feed.send(ev.Leave("a", None, successors=1))
    feed.join("c")
    assert reserved(feed) == {"reservation 0": 20.0}
    feed.wait(3.0)
    feed.send(ev.Announce("c"))
    assert not reserved(feed)
    feed.send(ev.Leave("b", None, successors=1))
    assert reserved(feed) == {"reservation 1": 6.0}, "as long as it took until the last one was announced"


@pytest.mark.parametrize("joins_first", [False, True])
def test_a_repeated_announcement_takes_no_place_of_others(joins_first):
    feed = make_feed()
    feed.join("a")
    if joins_first:
        feed.join("b")
    feed.send(ev.Announce("b"))
    if not joins_first:
        feed.join("b")
    feed.send(ev.Leave("a", None, successors=1))
    feed.send(ev.Announce("b"))
    assert "reservation 0" in reserved(feed)


# ---- further trials to be announced ----


def test_places_are_held_for_others_that_are_announced_after_the_first():
    """Trial processes that start together come up one after the other; all begin the same epoch."""
    feed = make_feed()
    feed.send(ev.Announce("a", others=2))
    assert reserved(feed) == {"a": 20.0, "reservation 0": 20.0, "reservation 1": 20.0}
    feed.join("a")
    assert [give(feed, "a", block) for block in range(2)] == [(0,), (1,)]
    feed.ask("a", 2)
    assert not feed.tasks, "prep stays at most two blocks ahead of trials that are still to arrive"
    for name in ("b", "c"):
        feed.wait(2.0)
        feed.send(ev.Announce(name))
        assert feed.join(name) == 0
    assert not reserved(feed)


def test_nobody_waits_for_others_that_do_not_come():
    feed = make_feed()
    feed.send(ev.Announce("a", others=1))
    feed.join("a")
    for block in range(2):
        give(feed, "a", block)
    feed.ask("a", 2)
    assert not feed.tasks
    (note,) = kinds(feed.wait(20.0), ev.Note)
    assert note.text == "reservation 0 did not come within 20 s: reservation given up"
    assert feed.tasks


def test_others_are_waited_for_as_long_as_the_user_allows_also_if_those_before_came_sooner():
    """Ray has already placed these trials, so they will come; on a busy machine they need longer than earlier ones."""
    feed = make_feed()
    feed.send(ev.Announce("a", others=1))
    feed.join("a")
    feed.wait(3.0)
    feed.send(ev.Announce("b"))
    feed.join("b")
    feed.send(ev.Announce("c", others=1))
    assert reserved(feed) == {"c": 5.0, "reservation 1": 20.0}
    feed.send(ev.Leave("a", None, successors=2))
    assert reserved(feed)["reservation 2"] == 20.0, "how long successors need is not learned from others"


def test_one_of_the_others_is_waited_for_as_long_also_once_it_is_announced():
    """Its process is up, but it may still build a model or have no free core."""
    feed = make_feed()
    feed.send(ev.Announce("a", others=1))
    feed.join("a")
    feed.wait(3.0)
    feed.send(ev.Announce("b"))
    assert reserved(feed) == {"b": 20.0}
    feed.send(ev.Announce("c"))
    assert reserved(feed) == {"b": 20.0, "c": 5.0}, "c is not among the expected trials"


def test_others_that_came_too_late_are_learned_from():
    feed = make_feed()
    feed.send(ev.Announce("a", others=1))
    feed.join("a")
    feed.wait(20.0)
    assert not reserved(feed)
    feed.wait(10.0)
    feed.send(ev.Announce("b"))
    feed.join("b")
    feed.send(ev.Announce("c", others=1))
    assert reserved(feed) == {"c": 5.0}, "30 s is more than the user allows"
    feed.send(ev.Leave("a", None, successors=1))
    assert reserved(feed)["reservation 1"] == 20.0, "how long successors need is not learned from others"


def test_others_who_would_need_longer_are_waited_for_if_an_epoch_takes_longer_still():
    feed = make_feed()
    feed.send(ev.Announce("a", others=1))
    feed.join("a")
    feed.wait(15.0)
    feed.send(ev.Announce("b"))
    feed.join("b")
    feed.send(ev.Announce("c", others=1))
    assert reserved(feed) == {"c": 5.0}
    feed.send(ev.PacesMeasured((), prep_per_s=0.1))  # 80 s for an epoch
    feed.send(ev.Announce("d", others=1))
    assert reserved(feed) == {"c": 5.0, "d": 5.0, "reservation 1": 30.0}


def test_places_for_others_are_held_once():
    """An announcement may arrive twice, and successors may have reservations already."""
    feed = make_feed()
    for name in ("here", "ends"):
        feed.join(name)
    feed.send(ev.Leave("ends", None, successors=3))
    for _ in range(2):
        feed.send(ev.Announce("a", others=2))
        assert set(reserved(feed)) == {"a", "reservation 1", "reservation 2"}
    feed.send(ev.Announce("b", others=1))
    assert set(reserved(feed)) == {"a", "b", "reservation 2"}


def test_places_are_held_for_others_also_when_the_first_is_there_already():
    """A trial class that joins in its constructor has joined before Tune reports its start."""
    feed = make_feed()
    feed.join("a")
    feed.send(ev.Announce("a", others=1))
    assert list(reserved(feed)) == ["reservation 0"]


def began_at_once(feed: Feed, name: str) -> int:
    """Join a trial with its own session that begins at once; return its first block."""
    feed.session += 1
    (admitted,) = kinds(feed.send(ev.Join(name, feed.session, now=True)), ev.Admitted)
    return admitted.cursor


def test_others_that_begin_at_once_are_waited_for_where_nobody_else_is():
    """The next trial finds no epoch in progress to join; without a wait, the first would finish whole epochs first."""
    feed = make_feed()
    for name, other in ("ab", "cd"):
        feed.send(ev.Announce(name, others=1))
        start = began_at_once(feed, name)
        assert [give(feed, name, start + block) for block in range(2)] == [(start,), (start + 1,)]
        feed.ask(name, start + 2)
        assert not feed.tasks, "it waits for the other one"
        feed.send(ev.Announce(other))
        feed.wait(1.0)
        assert not feed.tasks, "also while that joins"
        assert began_at_once(feed, other) == start
        for each in (name, other):
            feed.send(ev.Leave(each, None))
        feed.wait(1.0)


def test_others_that_begin_at_once_are_not_waited_for_where_somebody_is():
    """They begin where that consumer is."""
    feed = make_feed(blocks_per_epoch=8)
    feed.send(ev.Announce("a"))
    began_at_once(feed, "a")
    feed.send(ev.Announce("b", others=2))
    assert not reserved(feed)


def test_others_that_begin_at_once_are_waited_for_also_when_the_first_is_there_already():
    feed = make_feed()
    feed.send(ev.Announce("a"))
    began_at_once(feed, "a")
    feed.send(ev.Announce("a", others=2))
    assert list(reserved(feed)) == ["reservation 0", "reservation 1"]


def test_one_that_begins_at_once_does_not_wait_for_a_place_at_the_next_epoch():
    feed = make_feed(budget_blocks=2)
    feed.join("here")
    for block in range(4):
        give(feed, "here", block)
    feed.send(ev.Announce("b"))
    assert feed.core.consumers.by_name["b"].cursor == 8
    assert began_at_once(feed, "b") == 3


def test_one_that_begins_at_once_after_an_epoch_does_not_go_back_to_a_place_at_which_others_wait():
    feed = make_feed()
    feed.join("here")
    feed.send(ev.Announce("b"))
    assert feed.core.consumers.by_name["b"].cursor == 0
    (admitted,) = kinds(feed.send(ev.Join("b", 2, start=16, now=True)), ev.Admitted)
    assert admitted.cursor == 16


def test_one_that_begins_at_once_does_not_go_back_to_a_place_at_which_nobody_waited():
    feed = last_one_left(8)
    feed.send(ev.Announce("b"))
    start = feed.join("other")
    for block in range(start, start + 3):
        give(feed, "other", block)
    assert began_at_once(feed, "b") == start + 2


def test_one_that_was_passed_by_begins_with_the_others():
    """The previous trial began at once, so this one was expected to do the same; meanwhile the room was needed."""
    feed = last_one_left(8, budget_blocks=2)
    feed.send(ev.Announce("b"))
    start = feed.join("other")
    for block in range(start, start + 6):
        give(feed, "other", block)
    assert list(reserved(feed)) == ["b"]
    assert feed.join("b") == start + 8, "its first block was dropped"


def test_one_that_begins_with_an_epoch_does_not_begin_at_a_place_inside_of_one():
    """The previous trial began at once, so this one was expected to do the same."""
    feed = last_one_left(3)
    feed.send(ev.Announce("b"))
    assert feed.join("b") == 8


def test_no_place_is_held_that_nobody_reaches_in_time():
    """Otherwise the others would stall for 20 s each time, and still continue alone."""
    feed = make_feed()
    feed.join("here")
    feed.send(ev.Announce("late"))
    give(feed, "here", 0)
    feed.wait(20.0)
    assert not reserved(feed)
    feed.wait(40.0)
    feed.join("late")
    feed.send(ev.Announce("next"))
    feed.send(ev.Leave("late", None, successors=1))
    assert not reserved(feed)
    assert [give(feed, "here", block) for block in (1, 2, 3)] == [(1,), (2,), (3,)]


def test_a_place_that_was_left_is_not_held_for_one_that_will_come_too_late():
    feed = make_feed()
    feed.join("here")
    feed.join("ends")
    feed.send(ev.Announce("late"))
    feed.send(ev.Leave("ends", None, successors=1))
    feed.wait(20.0)
    feed.wait(40.0)
    feed.send(ev.Leave("here", None, successors=1))
    feed.join("late")
    assert set(reserved(feed)) == {"reservation 1"}
    feed.send(ev.Announce("next"))
    assert not reserved(feed)


def test_a_successor_that_came_too_late_is_learned_from():
    feed = make_feed()
    for name in ("here", "a", "b", "c"):
        feed.join(name)
    held = []
    for name, seconds in (("a", 1.0), ("b", 8.0), ("c", 1.0)):
        feed.send(ev.Leave(name, None, successors=1))
        held += reserved(feed).values()
        feed.wait(seconds)
        feed.send(ev.Announce(f"after {name}"))
        feed.join(f"after {name}")
    assert held == [20.0, 5.0, 16.0]


def test_successors_that_come_in_time_again_have_places_again():
    """Arrivals without a reservation also count."""
    feed = make_feed()
    feed.join("here")
    held = []
    for number, seconds in enumerate([19.0, *[4.0] * REMEMBERED]):
        feed.join(f"t{number}")
        feed.send(ev.Leave(f"t{number}", None, successors=1))
        held.append(len(reserved(feed)))
        feed.wait(seconds)
        feed.send(ev.Announce(f"t{number + 1}"))
    assert held == [1] + [0] * REMEMBERED
    feed.send(ev.Leave("here", None, successors=1))
    assert reserved(feed)["reservation 1"] == 8.0


def test_nothing_is_learned_from_places_that_were_held_for_another_search():
    """Neither the successor nor the other trial arrived, and all consumers left."""
    feed = make_feed()
    feed.send(ev.Announce("a", others=1))
    feed.join("a")
    feed.wait(20.0)
    feed.send(ev.Leave("a", None, successors=1))
    feed.wait(20.0)
    assert not reserved(feed)
    feed.wait(3600.0)
    feed.send(ev.Announce("b"))
    feed.join("b")
    feed.send(ev.Announce("c", others=1))
    assert reserved(feed)["reservation 2"] == 20.0
    feed.send(ev.Leave("b", None, successors=2))
    assert reserved(feed)["reservation 3"] == 20.0


def test_trials_that_come_in_time_again_have_places_again():
    """Arrivals without a reservation also count, and the one that took too long is finally forgotten."""
    feed = make_feed()
    feed.join("here")
    for number, seconds in enumerate([60.0, *[4.0] * REMEMBERED]):
        feed.send(ev.Announce(f"t{number}"))
        assert bool(reserved(feed)) == (number == 0)
        feed.wait(seconds)
        feed.join(f"t{number}")
    feed.send(ev.Announce("next"))
    assert reserved(feed) == {"next": 8.0}


def test_while_nobody_knows_how_long_an_epoch_takes_nobody_waits_longer_than_the_user_allows():
    feed = make_feed(reservation_s=0.5)
    feed.send(ev.Announce("a"))
    feed.wait(0.4)
    feed.join("a")
    feed.send(ev.Announce("b"))
    assert not reserved(feed), "it would be held for 0.8 s"


def test_an_epoch_that_takes_long_is_worth_a_long_wait():
    feed = make_feed(blocks_per_epoch=8)
    feed.join("here")
    feed.send(ev.Announce("late"))
    feed.wait(25.0)
    feed.join("late")
    feed.send(ev.PacesMeasured((), prep_per_s=0.1))  # 80 s for an epoch
    feed.send(ev.Announce("next"))
    assert reserved(feed) == {"next": 50.0}
    feed.send(ev.PacesMeasured((), prep_per_s=1.0))
    feed.send(ev.Announce("after that"))
    assert reserved(feed) == {"next": 50.0}


def test_the_log_says_how_long_a_place_was_held():
    feed = make_feed()
    feed.join("here")
    feed.send(ev.Announce("b"))
    (note,) = kinds(feed.wait(23.0), ev.Note)
    assert note.text == "b did not come within 20 s: reservation given up"


def test_trials_that_begin_at_once_are_not_waited_for():
    """This holds for announced trials and for the successor of a trial that ended."""
    feed = make_feed()
    feed.join("here")
    feed.send(ev.Announce("a"))
    assert reserved(feed) == {"a": 20.0}, "its start is not known yet"
    feed.send(ev.Join("a", 2, now=True))
    feed.send(ev.Announce("b"))
    feed.send(ev.Leave("a", None, successors=1))
    assert not reserved(feed)
    assert [give(feed, "here", block) for block in range(8)] == [(block,) for block in range(8)]
    feed.join("b")
    feed.send(ev.Announce("c"))
    assert list(reserved(feed)) == ["c"], "b began with an epoch"


def last_one_left(blocks: int, **changed: object) -> Feed:
    """Feed whose trials begin at once; the last one has left after `blocks` blocks, and more are prepared ahead."""
    feed = make_feed(**changed)
    feed.send(ev.Announce("a"))
    feed.send(ev.Join("a", 2, now=True))
    for block in range(blocks):
        feed.ask("a", block)
        feed.make(*sorted(feed.tasks))
    feed.ask("a", blocks)
    feed.send(ev.Heartbeat("a", 2, blocks, blocks))
    assert not kinds(feed.send(ev.Leave("a", None, successors=1)), ev.DropBlock)
    return feed


@pytest.mark.parametrize("blocks", [3, 8])
def test_what_was_made_ahead_when_the_last_one_left_is_there_for_the_next_that_begins_at_once(blocks):
    feed = last_one_left(blocks)
    assert not kinds(feed.send(ev.Announce("b")), ev.DropBlock)
    feed.wait(1.0)
    (admitted,) = kinds(feed.send(ev.Join("b", 3, now=True)), ev.Admitted)
    assert admitted.cursor == blocks
    feed.session = 3
    done = feed.ask("b", blocks, want=2)
    assert delivered(done) == {"b": (blocks, blocks + 1)}, "both were there"
    assert not reserved(feed)


def test_a_place_of_one_that_begins_at_once_holds_up_nobody_and_gives_room():
    feed = last_one_left(3, budget_blocks=2)
    feed.send(ev.Announce("b"))
    assert list(reserved(feed)) == ["b"]
    start = feed.join("exact", start=16)
    assert [give(feed, "exact", block) for block in range(start, start + 8)] == [
        (block,) for block in range(start, start + 8)
    ]
    assert list(reserved(feed)) == ["b"], "its time is not over"


@pytest.mark.parametrize("is_announced", [False, True])
def test_one_that_was_not_announced_does_not_wait_for_a_place_of_one_that_begins_at_once(is_announced):
    feed = last_one_left(3)
    if is_announced:
        feed.send(ev.Announce("b"))
    feed.session = 3
    feed.send(ev.Join("other", 3, now=True))
    assert len(reserved(feed)) == 1
    assert [give(feed, "other", block) for block in range(3, 11)] == [(block,) for block in range(3, 11)]


def test_one_that_goes_on_after_an_epoch_does_not_go_back_to_a_place():
    feed = last_one_left(3)
    feed.send(ev.Announce("b"))
    (admitted,) = kinds(feed.send(ev.Join("b", 3, start=16, now=True)), ev.Admitted)
    assert admitted.cursor == 16


def test_a_place_in_the_middle_of_an_epoch_whose_next_one_has_begun_is_at_that_one():
    """Otherwise the trial that begins there would lack samples: the next epoch is already shuffled as a whole."""
    feed = last_one_left(7)
    feed.send(ev.Announce("b"))
    (admitted,) = kinds(feed.send(ev.Join("b", 3, now=True)), ev.Admitted)
    assert admitted.cursor == 8


def test_no_more_places_are_held_than_trials_are_to_come():
    feed = make_feed()
    for name in ("a", "b", "c"):
        feed.join(name)
    for name in ("a", "b"):
        feed.send(ev.Leave(name, None, successors=1))
    assert len(reserved(feed)) == 1
    feed.send(ev.Announce("d"))
    assert list(reserved(feed)) == ["d"]
    feed.send(ev.Leave("c", None, successors=1))
    assert len(reserved(feed)) == 2, "the other one is held for d alone"


def test_one_that_goes_on_where_it_was_says_nothing_of_those_to_come():
    feed = make_feed()
    feed.join("here")
    feed.send(ev.Announce("a"))
    feed.send(ev.Join("a", 2, now=True))
    feed.send(ev.Announce("restored"))
    feed.join("restored", 3)
    feed.send(ev.Announce("next"))
    assert not reserved(feed)
