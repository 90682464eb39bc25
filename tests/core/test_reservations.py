"""Reservations hold positions for coming consumers, and each consumer enters the right cohort.

Epochs have 4 blocks.
"""

import pytest

from mbaas.core.consumers import ConsumerTable
from mbaas.core.epochs import EpochTable
from mbaas.core.story import Stories
from mbaas.core.transitions import ConsumerState

NOTHING_READY = frozenset().__contains__
"""False for every block: no block is ready."""


def table(*cursors, ahead=3):
    """Table with one cohort at each cursor; every cohort has one member."""
    found = ConsumerTable(EpochTable(4), ahead, Stories())
    for number, cursor in enumerate(cursors):
        join(found, f"c{number}", cursor)
    return found


def join(found, name, cursor, cohort=None):
    consumer = found.enter(name, 1, cohort or found.new_cohort(cursor), cursor, 30.0, ConsumerState.BUSY)
    found.advance()
    return consumer


def test_of_places_that_anybody_may_take_the_one_furthest_behind_is_taken_first():
    found = table(2, 6)
    for name in ("c0", "c1"):
        found.reserve_for_successor(found.by_name[name], 0.0, 20.0, at_once=False)
    assert [(c.cursor, c.for_anyone) for c in found.by_name.values() if c.state is ConsumerState.RESERVED] == [
        (4, True),
        (8, True),
    ]
    taken, other = found.free_reservations()
    assert (taken.cursor, other.cursor) == (4, 8), "first the one that is furthest behind"
    found.exit(taken, "somebody comes for it")
    assert found.free_reservations() == [other]
    found.exit(other, "somebody comes for it")
    assert found.free_reservations() == []
    found.validate()


def test_somebody_comes_to_the_cohort_whose_window_holds_its_block():
    """Cohort 0 is at block 2 with horizon 2 + 3; any block after 5 needs another cohort."""
    found = table(2)
    cohort = found.cohorts[0]
    assert found.cohort_at(2) is cohort
    assert found.cohort_at(5) is cohort
    assert found.cohort_at(6) is not cohort
    assert found.cohort_at(1) is not cohort, "that was dropped"


def test_of_cohorts_that_begin_an_epoch_together_the_larger_one_is_joined():
    found = table(5, 6)
    join(found, "c2", 6, found.cohorts[1])
    assert found.shared_start(0) == (found.cohorts[1], 8)


def test_a_newcomer_begins_where_it_waits_least():
    """From 5 to 8 are three blocks, from 7 one, although more are at 5. An empty table uses the given start."""
    found = table(5, 7)
    join(found, "c2", 5, found.cohorts[0])
    assert found.shared_start(0) == (found.cohorts[1], 8)
    found = table()
    assert found.shared_start(12) == (found.cohorts[0], 12)


def test_a_new_cohort_stands_in_the_epoch_of_its_first_block_and_can_be_joined_at_an_epochs_beginning():
    found = table()
    for start, boundary, join_start in ((6, 4, None), (8, 8, 8)):
        cohort = found.new_cohort(start)
        assert (cohort.boundary, cohort.join_start, cohort.keep_from, cohort.begun) == (
            boundary,
            join_start,
            start,
            start,
        )


@pytest.mark.parametrize(
    ("other", "begins"),
    [(5, 8), (6, 8), (3, 4), (8, 8), (10, 12)],
)
def test_one_that_begins_an_epoch_alone_begins_the_one_that_others_begin(other, begins):
    """It is at block 0. The others reach the next epoch within the three blocks that prep may be ahead."""
    found = table(0, other)
    alone = found.by_name["c0"]
    assert found.merge(alone, NOTHING_READY) == "c0 joined the cohort of c1"
    assert (alone.cursor, [*found.cohorts]) == (begins, [1])
    assert (found.cohorts[1].boundary, found.cohorts[1].keep_from) == (other - other % 4, 0)
    found.validate()


@pytest.mark.parametrize(
    ("own", "other", "options"),
    [
        (0, 9, {"ahead": 2}),
        (1, 6, {}),
        (8, 6, {}),
        (0, 6, {"exact": 0}),
        (0, 6, {"company": True}),
    ],
    ids=[
        "the others' next epoch is too far away",
        "it is inside of its epoch",
        "the others come to where it is",
        "it asked for just that epoch",
        "it is not alone",
    ],
)
def test_one_stays_in_its_epoch(own, other, options):
    found = table(own, other, ahead=options.get("ahead", 3))
    consumer = found.by_name["c0"]
    consumer.exact = options.get("exact")
    if options.get("company"):
        join(found, "company", own, found.cohorts[0])
    assert found.merge(consumer, NOTHING_READY) is None
    assert (consumer.cursor, [*found.cohorts]) == (own, [0, 1])


def test_where_two_cohorts_meet_newcomers_can_begin_the_epoch_of_the_one_behind():
    """One consumer is at 3 and holds all blocks from 0 on. Another, at 5, keeps all from 3 on and delayed others."""
    found = table(0, 5)
    behind, (rear, front) = found.by_name["c0"], found.cohorts.values()
    behind.cursor = 3
    found.advance()
    front.keep_from, front.held_up = 3, (5, 7.0)
    assert found.merge(found.by_name["c1"], NOTHING_READY) is None, "those ahead wait until it comes"
    assert found.merge(behind, NOTHING_READY) == "c0 joined the cohort of c1"
    assert (front.boundary, front.join_start, front.keep_from, front.held_up) == (rear.boundary, 0, 0, None)
    assert front.boundary == 0
    assert {member.cohort for member in front.members} == {1}


def test_two_cohorts_are_one_when_the_one_behind_reaches_the_window_of_the_other():
    """The front cohort keeps blocks from 5 on; the other cohort's horizon is 3 blocks after its slowest member."""
    found = table(2, 5)
    behind, front = found.cohorts.values()
    assert not behind.can_merge(front)
    front.keep_from = 2
    assert behind.can_merge(front), "5 <= 2 + 3"
    front.members[0].cursor = 6
    assert not behind.can_merge(front)


def test_who_is_detached_keeps_what_its_old_cohort_keeps_and_stands_in_its_own_epoch():
    found = table(6)
    slow = join(found, "slow", 5, found.cohorts[0])
    found.cohorts[0].keep_from = 4
    found.detach([slow], "it lags")
    own = found.cohorts[slow.cohort]
    assert (own.boundary, own.keep_from, own.slowest) == (4, 4, 5)
    assert [m.name for m in found.cohorts[0].members] == ["c0"]
    found.validate()


def test_cohorts_that_unite_keep_what_either_kept():
    found = table(4, 4)
    keep, gone = found.cohorts.values()
    keep.keep_from, gone.keep_from, keep.begun, gone.begun = 4, 3, 5, 7
    found.merge(found.by_name["c1"], NOTHING_READY)
    assert [(c.keep_from, c.begun) for c in found.cohorts.values()] == [(3, 7)]


def test_what_was_skipped_is_forgotten_when_all_before_it_is_let_go():
    found = table(0)
    consumer = found.by_name["c0"]
    consumer.go_to(2)
    consumer.go_to(6)
    assert consumer.skipped == (range(2), range(2, 6))
    assert consumer.let_go(2, 0)
    assert consumer.skipped == (range(2, 6),)
    assert not consumer.let_go(1, 0), "it never goes back"
    assert not consumer.holds(3)


def test_words_of_a_session_are_heard_in_their_order():
    consumer = table(0).by_name["c0"]
    assert not consumer.was_overtaken(2)
    assert consumer.was_overtaken(1)
    assert not consumer.was_overtaken(2), "the same call once more"
    assert not consumer.was_overtaken(0), "one without a number"


def test_who_goes_back_has_skipped_only_what_lies_before():
    """It skips blocks 0 and 1, then 2 to 5. It goes back to 4, to its current position, to 2 and to 1."""
    consumer = table(0).by_name["c0"]
    consumer.go_to(2)
    consumer.go_to(6)
    consumer.go_to(4)
    assert consumer.skipped == (range(2), range(2, 4))
    consumer.go_to(4)
    assert consumer.skipped == (range(2), range(2, 4)), "who stands still skips nothing"
    consumer.go_to(2)
    assert consumer.skipped == (range(2),)
    consumer.go_to(1)
    consumer.cursor = 3
    assert [consumer.holds(block) for block in range(4)] == [False, True, True, False]


def test_who_asks_twice_with_one_call_holds_what_it_may_have_got_for_the_first():
    """Blocks 1 to 3 are delivered, the repeated call gets block 1, and the next call reports all three."""
    consumer = table(0).by_name["c0"]
    consumer.go_to(1)
    consumer.cursor = consumer.given = 4
    consumer.go_to(1, again=True)
    consumer.cursor = 2
    assert [consumer.holds(block) for block in range(1, 5)] == [True, True, True, False]
    consumer.go_to(4)
    assert (consumer.skipped, consumer.holds(3)) == ((range(1),), True)
    consumer.go_to(2)
    assert not consumer.holds(3), "a new call says what it has"


def test_blocks_are_made_to_the_end_of_the_next_epoch_at_most():
    found = ConsumerTable(EpochTable(4), 100, Stories())
    consumer = join(found, "ann", 0)
    cohort, horizons = found.cohorts[0], []
    for consumer.cursor in (0, 3, 4, 5):
        horizons.append(cohort.horizon)
    assert horizons == [4, 8, 8, 12], "it has asked for nothing, and then it is in its last block"


def test_two_blocks_are_made_ahead_where_epochs_have_one():
    found = ConsumerTable(EpochTable(1), 100, Stories())
    join(found, "ann", 5)
    assert found.cohorts[0].horizon == 7


def test_newcomers_can_begin_the_epoch_that_the_slowest_is_in_while_nothing_of_it_was_dropped():
    found = table(0)
    cohort, consumer = found.cohorts[0], found.by_name["c0"]
    assert not cohort.give_up_places(), "it would free nothing: the member holds all of it"
    assert (cohort.join_start, found.entrance(cohort)) == (0, 0)
    consumer.cursor, consumer.released = 6, 5
    found.advance()
    assert (cohort.boundary, cohort.join_start, cohort.keep_from) == (4, 4, 4)
    assert cohort.give_up_places()
    assert (cohort.join_start, cohort.keep_from, found.entrance(cohort)) == (None, 5, 8)
    found.advance()
    assert cohort.join_start is None, "block 4 was dropped"
    consumer.cursor, consumer.released = 8, 8
    found.advance()
    assert (cohort.boundary, cohort.join_start, cohort.keep_from) == (8, 8, 8)


def test_newcomers_can_begin_an_epoch_to_which_the_slowest_goes_back_if_all_of_it_is_held():
    found = table(0)
    cohort, consumer = found.cohorts[0], found.by_name["c0"]
    consumer.cursor = 6
    found.advance()
    assert cohort.join_start == 4
    consumer.go_to(2)
    found.advance()
    assert (cohort.boundary, cohort.join_start, cohort.keep_from) == (0, 0, 0)


def test_no_call_may_come_for_a_reservation():
    found = table(2)
    found.enter("ann", 0, found.cohort_at(4), 4, 20.0, ConsumerState.RESERVED)
    for _ in range(2):
        found.reserve_for_successor(found.by_name["c0"], 0.0, 20.0, at_once=False)
    assert [*found.by_name] == ["c0", "ann", "reservation 0", "reservation 1"]
    for name in ("ann", "reservation 0", "reservation 1"):
        assert [found.session(name, session) for session in (0, 1)] == [None, None]
        assert (
            found.why_unknown(name, 1) == f"the service has no session 1 of consumer '{name}': it left or was removed"
        )
    assert found.why_unknown("c0", 3) == "consumer 'c0' is now in session 1, this call is from session 3"
    assert found.session("c0", 1) is found.by_name["c0"]
