"""Places that are held for consumers, and which cohort somebody comes to. Epochs have 4 blocks."""

from mbaas.core.consumers import ConsumerTable
from mbaas.core.story import Stories
from mbaas.core.transitions import ConsumerState


def table(*cursors, leads=True):
    """A table with a cohort for each of the cursors, whose only member is there."""
    found = ConsumerTable(4, 3, Stories(), leads=leads)
    for number, cursor in enumerate(cursors):
        join(found, f"c{number}", cursor)
    return found


def join(found, name, cursor, cohort=None):
    consumer = found.enter(name, 1, cohort or found.new_cohort(cursor), cursor, 30.0, ConsumerState.BUSY)
    found.advance()
    return consumer


def test_a_place_that_anybody_may_take_is_there_once_and_goes_to_the_next_who_is_announced():
    found = table(2, 6)
    for name in ("c0", "c1"):
        found.reserve_for_successor(found.by_name[name], 20.0)
    assert [(c.cursor, c.for_anyone) for c in found.by_name.values() if c.state is ConsumerState.RESERVED] == [
        (4, True),
        (8, True),
    ]
    assert found.claim_reservation("next", 25.0)
    (taken,) = [c for c in found.by_name.values() if c.name == "next"]
    assert (taken.cursor, taken.deadline, taken.for_anyone) == (4, 25.0, False), "the one that is furthest behind"
    assert sum(c.for_anyone for c in found.by_name.values()) == 1
    assert found.claim_reservation("last", 25.0)
    assert not found.claim_reservation("late", 25.0)
    found.validate()


def test_a_further_lane_holds_the_places_that_the_first_one_holds_and_no_others():
    found = table(2, leads=False)
    found.hold_reservations(frozenset({("ann", 4), ("bob", 0), ("c0", 4)}))
    assert {name: c.cursor for name, c in found.by_name.items() if c.state is ConsumerState.RESERVED} == {
        "ann": 4,
        "bob": 0,
    }
    found.hold_reservations(frozenset({("ann", 8)}))
    assert {name: c.cursor for name, c in found.by_name.items()} == {"c0": 2, "ann": 8}
    found.validate()


def test_somebody_comes_to_the_cohort_whose_window_holds_its_block():
    """Cohort 0 is at block 2, its horizon is 2 + 3; from 5 on another one is needed."""
    found = table(2)
    cohort = found.cohorts[0]
    assert found.cohort_at(2) is cohort
    assert found.cohort_at(5) is cohort
    assert found.cohort_at(6) is not cohort
    assert found.cohort_at(1) is not cohort, "that was dropped"


def test_of_cohorts_that_begin_an_epoch_together_the_larger_one_is_joined():
    found = table(5, 6)
    join(found, "c2", 6, found.cohorts[1])
    assert found.cohort_towards(8) is found.cohorts[1]
    assert found.shared_start(0) == (found.cohorts[1], 8)


def test_two_cohorts_are_one_when_the_one_behind_reaches_the_window_of_the_other():
    """The one in front keeps blocks from 5 on, the other's horizon is 3 blocks ahead of its slowest."""
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
    found.detach(slow)
    own = found.cohorts[slow.cohort]
    assert (own.boundary, own.keep_from, own.slowest) == (4, 4, 5)
    assert [m.name for m in found.cohorts[0].members] == ["c0"]
    found.validate()


def test_cohorts_that_unite_keep_what_either_kept():
    found = table(4, 4)
    keep, gone = found.cohorts.values()
    keep.keep_from, gone.keep_from, keep.begun, gone.begun = 4, 3, 5, 7
    found.merge(found.by_name["c1"])
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
