"""Reservations hold positions for coming consumers, and each consumer enters the right cohort.

Epochs have 4 blocks.
"""

import pytest

from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.epochs import EpochTable
from mbaas.core.staging.regrouping import Regrouping
from mbaas.core.staging.reservations import Arrivals
from mbaas.core.staging.transitions import ConsumerState
from mbaas.core.staging.window import Window
from mbaas.core.story import Stories
from mbaas.samples.placement import WHOLE
from tests.core.staging_feeds import one_stream


class Table(ConsumerTable):
    """Consumers, an empty window, and the logic that uses both."""

    def __init__(self, ahead, blocks_per_epoch):
        super().__init__(EpochTable(one_stream(blocks_per_epoch)), ahead, Stories())
        self.window = Window(10**6, Stories(), self.streams)
        self.beginnings = Beginnings(self, self.window)
        self.regrouping = Regrouping(self, self.beginnings)


def table(*cursors, ahead=3, blocks_per_epoch=4):
    """Table with one cohort at each cursor; every cohort has one member. Nothing is staged."""
    found = Table(ahead, blocks_per_epoch)
    for number, cursor in enumerate(cursors):
        join(found, f"c{number}", cursor)
    return found


def join(found, name, cursor, cohort=None):
    return found.enter(name, 1, cohort or found.new_cohort(cursor), cursor, 30.0, ConsumerState.BUSY)


def stage(found, *blocks):
    for block in blocks:
        found.window.grant(block, 10, [WHOLE])


def ready(found, *blocks):
    for number in blocks:
        block = found.window.grant(number, 10, [WHOLE])
        block.begin(0, number, "w")
        block.finish(0, "n")


def test_of_places_that_anybody_may_take_the_one_furthest_behind_is_taken_first():
    found = table(2, 6)
    arrivals = Arrivals(found, found.beginnings, 20.0)
    for name in ("c0", "c1"):
        arrivals.reserve_for_successor(found.by_name[name], 0.0, 20.0, at_once=False)
    assert [(c.cursor, c.is_unassigned) for c in found.by_name.values() if c.state is ConsumerState.RESERVED] == [
        (4, True),
        (8, True),
    ]
    taken, other = arrivals.unassigned()
    assert (taken.cursor, other.cursor) == (4, 8), "first the one that is furthest behind"
    found.exit(taken, "somebody comes for it")
    assert arrivals.unassigned() == [other]
    found.exit(other, "somebody comes for it")
    assert arrivals.unassigned() == []
    found.validate()


def test_somebody_comes_to_the_cohort_whose_window_holds_its_block():
    """Cohort 0 is at block 2 with horizon 2 + 3; any block after 5 needs another cohort."""
    found = table(2)
    cohort = found.cohorts[0]
    assert found.beginnings.cohort_at(2) is cohort
    assert found.beginnings.cohort_at(5) is cohort
    for block, why in ((6, "too far ahead"), (1, "that was dropped")):
        other = found.beginnings.cohort_at(block)
        assert other is not cohort, why
        del found.cohorts[other.number]
    stage(found, 1)
    assert found.beginnings.cohort_at(1) is cohort


def test_of_cohorts_that_begin_an_epoch_together_the_larger_one_is_joined():
    found = table(5, 6)
    join(found, "c2", 6, found.cohorts[1])
    assert found.beginnings.shared_start(0) == (found.cohorts[1], 8)


def test_a_newcomer_begins_where_it_waits_least():
    """From 5 to 8 are three blocks, from 7 one, although more are at 5. An empty table uses the given start."""
    found = table(5, 7)
    join(found, "c2", 5, found.cohorts[0])
    assert found.beginnings.shared_start(0) == (found.cohorts[1], 8)
    found = table()
    assert found.beginnings.shared_start(12) == (found.cohorts[0], 12)


@pytest.mark.parametrize(
    ("other", "begins"),
    [(5, 8), (6, 8), (3, 4), (8, 8), (10, 12)],
)
def test_one_that_begins_an_epoch_alone_begins_the_one_that_others_begin(other, begins):
    """It is at block 0. The others reach the next epoch within the three blocks that prep may be ahead."""
    found = table(0, other)
    alone = found.by_name["c0"]
    assert found.regrouping.merge(alone) == "c0 joined the cohort of c1"
    assert (alone.cursor, [*found.cohorts]) == (begins, [1])
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
    assert found.regrouping.merge(consumer) is None
    assert (consumer.cursor, [*found.cohorts]) == (own, [0, 1])


def test_cohorts_at_one_block_unite_and_nobody_is_apart():
    found = table(5, 5)
    for consumer in found.by_name.values():
        consumer.apart = "it lagged"
    assert found.regrouping.merge(found.by_name["c0"]) == "c0 joined the cohort of c1"
    assert [consumer.apart for consumer in found.by_name.values()] == ["", ""]


def test_one_of_several_moves_ahead_alone():
    """The consumer has requested block 0. The cohort ahead no longer waits."""
    found = table(0, 5)
    join(found, "company", 0, found.cohorts[0])
    moving, ahead = found.by_name["c0"], found.cohorts[1]
    moving.asked, moving.apart, ahead.held_up = True, "it lagged", (5, 7.0)
    assert found.regrouping.merge(moving) == "c0 joined the cohort of c1"
    assert (moving.cursor, moving.cohort, moving.apart, ahead.held_up) == (8, 1, "", None)
    assert [member.name for member in found.cohorts[0].members] == ["company"]
    found.validate()


def test_where_two_cohorts_meet_newcomers_can_begin_the_epoch_of_the_one_behind():
    """One consumer is at 3 and all blocks from 0 on are staged. Another, at 5, delayed others."""
    found = table(3, 5)
    behind, (_, front) = found.by_name["c0"], found.cohorts.values()
    front.held_up = (5, 7.0)
    stage(found, 0, 1, 2)
    assert found.regrouping.merge(behind) is None, "blocks 3 and 4 would be prepared again"
    stage(found, 3, 4)
    assert found.regrouping.merge(found.by_name["c1"]) is None, "trials ahead wait until it arrives"
    assert found.regrouping.merge(behind) == "c0 joined the cohort of c1"
    assert (found.beginnings.join_start(front), front.held_up) == (0, None)
    assert {member.cohort for member in front.members} == {1}


def test_two_cohorts_are_one_when_all_blocks_between_them_are_staged():
    """The horizon of the cohort behind is 3 blocks after its slowest member."""
    found = table(2, 5)
    behind, front = found.cohorts.values()
    stage(found, 2, 3)
    assert not found.regrouping.can_merge(behind, front)
    stage(found, 4, 5)
    assert found.regrouping.can_merge(behind, front), "5 <= 2 + 3"
    assert found.regrouping.can_merge(front, behind)
    front.members[0].cursor = 6
    assert not found.regrouping.can_merge(behind, front)


def test_who_is_detached_is_alone_at_its_block():
    found = table(6)
    slow = join(found, "slow", 5, found.cohorts[0])
    found.detach([slow], "it lags")
    assert (found.cohorts[slow.cohort].slowest, slow.apart) == (5, "it lags")
    assert [m.name for m in found.cohorts[0].members] == ["c0"]
    found.validate()


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
    assert not consumer.was_overtaken(2), "the same call again"
    assert not consumer.was_overtaken(0), "one without a number"


def test_who_goes_back_has_skipped_only_what_lies_before():
    """It skips blocks 0 and 1, then 2 to 5. It goes back to 4, to its current position, to 2 and to 1."""
    consumer = table(0).by_name["c0"]
    consumer.go_to(2)
    consumer.go_to(6)
    consumer.go_to(4)
    assert consumer.skipped == (range(2), range(2, 4))
    consumer.go_to(4)
    assert consumer.skipped == (range(2), range(2, 4)), "a consumer that does not move skips nothing"
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
    assert not consumer.holds(3), "the new call lists the blocks that it holds"


def test_blocks_are_made_to_the_end_of_the_next_epoch_at_most():
    found = table(ahead=100)
    consumer = join(found, "ann", 0)
    cohort, horizons = found.cohorts[0], []
    for consumer.cursor in (0, 3, 4, 5):
        horizons.append(cohort.horizon)
    assert horizons == [4, 8, 8, 12], "it has asked for nothing, and then it is in its last block"


def test_two_blocks_are_made_ahead_where_epochs_have_one():
    found = table(ahead=100, blocks_per_epoch=1)
    join(found, "ann", 5)
    assert found.cohorts[0].horizon == 7


def test_newcomers_can_begin_the_epoch_that_the_slowest_is_in_while_nothing_of_it_was_dropped():
    found = table(6)
    cohort, consumer = found.cohorts[0], found.by_name["c0"]
    stage(found, 4, 5)
    assert (found.beginnings.join_start(cohort), found.beginnings.entrance(cohort)) == (4, 4)
    found.window.drop(4, "its bytes are needed")
    assert (found.beginnings.join_start(cohort), found.beginnings.entrance(cohort)) == (None, 8)
    consumer.cursor = 8
    assert (found.beginnings.join_start(cohort), found.beginnings.entrance(cohort)) == (8, 8)


def test_a_newcomer_that_had_the_epoch_begins_the_next_one():
    found = table(6)
    stage(found, 4, 5)
    assert [found.beginnings.entrance(found.cohorts[0], least) for least in (4, 5)] == [4, 8]


def test_no_call_may_come_for_a_reservation():
    found = table(2)
    arrivals = Arrivals(found, found.beginnings, 20.0)
    arrivals.reserve("ann", found.cohorts[0], 4, 0.0, 20.0, at_once=False)
    for _ in range(2):
        arrivals.reserve_for_successor(found.by_name["c0"], 0.0, 20.0, at_once=False)
    assert [*found.by_name] == ["c0", "ann", "reservation 0", "reservation 1"]
    for name in ("ann", "reservation 0", "reservation 1"):
        assert [found.session(name, session) for session in (0, 1)] == [None, None]
        assert (
            found.why_unknown(name, 1) == f"the service has no session 1 of consumer '{name}': it left or was removed"
        )
    assert found.why_unknown("c0", 3) == "consumer 'c0' is now in session 1, this call is from session 3"
    assert found.session("c0", 1) is found.by_name["c0"]


@pytest.mark.parametrize(
    ("cursor", "made", "half_made", "begins"),
    [
        (4, (), (), 4),
        (5, (4,), (), 4),  # the epoch has hardly begun
        (5, (), (4,), 4),
        (6, (4, 5), (), 5),  # block 5 is in use; the newcomer reads it while block 6 is made
        (6, (4, 5, 6), (), 6),
        (6, (4,), (5,), 4),
        (7, (5,), (6,), 5),
        (7, (4,), (5, 6), 7),  # too far behind
        (7, (5,), (), 7),  # block 6 is gone
        (6, (), (), 6),
    ],
)
def test_who_begins_immediately_gets_a_block_that_is_ready_near_the_slowest(cursor, made, half_made, begins):
    found = table(cursor)
    found.epochs.fix(4, [])  # epoch 1 has begun
    ready(found, *made)
    stage(found, *half_made)
    assert found.beginnings.place_now(0) == (found.cohorts[0], begins)


def test_who_begins_immediately_prefers_a_ready_block_and_then_the_largest_cohort():
    found = table(5, 7)
    found.epochs.fix(4, [])
    assert found.beginnings.place_now(0) == (found.cohorts[0], 5)
    join(found, "another", 7, found.cohorts[1])
    assert found.beginnings.place_now(0) == (found.cohorts[1], 7), "nothing is ready, and it has two members"
    ready(found, 5)
    assert found.beginnings.place_now(0) == (found.cohorts[0], 5)
    assert found.beginnings.place_now(0, 5) == (found.cohorts[0], 5)
    assert found.beginnings.place_now(0, 6) == (found.cohorts[1], 7)
    assert found.beginnings.place_now(0, 8) is None


def test_ranks_of_a_trial_begin_together_unless_one_has_asked():
    found = table(5, 9)
    rank = found.enter("t[0]", 1, found.cohorts[0], 8, 30.0, ConsumerState.BUSY, None, "t")
    assert found.beginnings.shared_start(0, "t") == (found.cohorts[0], 8)
    assert found.beginnings.shared_start(0, "t", 8) == (found.cohorts[0], 8)
    assert found.beginnings.shared_start(0, "t", 9) == (found.cohorts[1], 12)
    assert found.beginnings.shared_start(0) == (found.cohorts[0], 8), "cohort 0 begins its next epoch sooner"
    rank.asked = True
    found.cohorts[0].remove(found.by_name["c0"])
    del found.by_name["c0"]
    assert found.beginnings.shared_start(0, "t") == (found.cohorts[1], 12), "an earlier run of the trial"
