"""Decisions of the staging core, one per test; epochs have 4 blocks of 10 bytes unless a test overrides it."""

import pytest
from staging_feeds import Feed, delivered, give, kinds, prepared

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import PUT_OFF_S, VERDICT_S, StagingState
from mbaas.core.story import InvariantError
from mbaas.samples.order import Shuffle
from mbaas.samples.placement import BlockPart
from mbaas.settings import Timeouts


def test_nothing_is_made_before_somebody_asks():
    """A consumer that joins may be about to load a state and move to another position."""
    feed = Feed()
    feed.send(ev.Announce("a"))
    assert feed.join("a", asks=False) == 0
    assert feed.tasks == {}
    assert prepared(feed.ask("a", 0)) == [0]


def test_a_block_is_made_once_and_handed_to_all_who_wait_for_it():
    feed = Feed()
    feed.join("a")
    feed.join("b")
    feed.ask("a", 0)
    feed.ask("b", 0)
    assert delivered(feed.finish(0)) == {"a": (0,), "b": (0,)}


def test_a_call_takes_all_ready_blocks_up_to_what_it_wants():
    feed = Feed(credit=3)
    feed.join("a")
    feed.make(0, 1, 2)
    assert delivered(feed.ask("a", 0, want=2)) == {"a": (0, 1)}


def test_a_newcomer_steps_in_at_the_epochs_beginning_while_its_blocks_are_staged():
    feed = Feed()
    feed.join("a")
    feed.ask("a", 0)
    feed.make(0)
    feed.ask("a", 1)
    feed.make(1)
    assert feed.join("b") == 0
    assert delivered(feed.ask("b", 0, want=2)) == {"b": (0, 1)}


def test_a_newcomer_waits_for_the_next_epoch_when_the_beginning_is_gone():
    feed = Feed(budget_blocks=2, ahead=2)
    feed.join("a")
    for block in range(3):
        feed.ask("a", block)
        feed.make(block)
    assert feed.join("b") == 4


def test_blocks_kept_for_newcomers_yield_to_blocks_that_are_needed():
    """The budget is 2 blocks: preparing block 2 needs the bytes of block 0, which is staged only for newcomers."""
    feed = Feed(budget_blocks=2, ahead=2)
    feed.join("a")
    feed.ask("a", 0)
    feed.make(0)
    done = feed.ask("a", 1)
    assert prepared(done) == []  # block 1 is in preparation already, and blocks 0 and 1 fill the budget
    done = feed.finish(1)
    assert kinds(done, ev.DropBlock) == [ev.DropBlock(0, for_room=True)]
    assert prepared(done) == [2]


def test_blocks_are_made_ahead_of_the_slowest_by_a_bounded_number():
    feed = Feed(ahead=3, credit=8)
    feed.join("fast")
    feed.join("slow", asks=False)
    assert sorted(feed.tasks) == [0, 1, 2]
    feed.make(0, 1, 2)
    feed.ask("fast", 0, want=3)
    assert prepared(feed.ask("fast", 3)) == []
    assert prepared(feed.ask("slow", 0)) == [3]


def test_an_announced_consumer_finds_its_reservation_although_others_went_on():
    feed = Feed(ahead=3, credit=8)
    feed.join("a")
    feed.send(ev.Announce("b"))
    feed.make(0, 1, 2)
    feed.ask("a", 0, want=3)
    feed.ask("a", 3)
    assert feed.join("b") == 0


def test_an_announced_consumer_that_does_not_come_holds_nobody_for_longer_than_the_reservation_time():
    feed = Feed(ahead=3, credit=8, reservation_s=5.0, lease_s=100.0)
    feed.join("a")
    feed.send(ev.Announce("b"))
    feed.make(0, 1, 2)
    feed.ask("a", 0, want=3)
    assert prepared(feed.ask("a", 3)) == []
    assert prepared(feed.wait(4.9)) == []
    done = feed.wait(0.2)
    assert prepared(done) == [3, 4, 5]
    assert "b did not come within 5 s" in kinds(done, ev.Note)[0].text


def test_the_place_of_a_trial_that_ended_goes_to_its_successor():
    """a and b finish epoch 0, b stops there, and a runs ahead. c takes b's reservation and starts epoch 1 at once."""
    feed = Feed(budget_blocks=8, ahead=4, credit=8)
    feed.join("a")
    feed.join("b")
    feed.make(0, 1, 2, 3)
    feed.ask("a", 0, want=4)
    feed.ask("b", 0, want=4)
    feed.send(ev.Heartbeat("b", 2, released=0, done=4))
    feed.ask("a", 4)
    feed.make(4, 5, 6, 7)
    feed.ask("a", 5, want=3)
    feed.send(ev.Leave("b", successors=1))
    feed.send(ev.Announce("c"))
    assert feed.join("c") == 4
    assert delivered(feed.ask("c", 4, want=4)) == {"c": (4, 5, 6, 7)}


def test_a_worker_that_dies_costs_only_its_blocks():
    feed = Feed(workers=2, credit=1)
    feed.join("a")
    assert sorted(feed.tasks) == [0, 1]
    done = feed.send(ev.WorkerDown(feed.tasks[0].worker, "killed"))
    assert prepared(done) == []  # the other worker has no credit left
    done = feed.finish(1)
    assert prepared(done) == [0]


def test_the_word_of_a_worker_that_was_given_up_is_ignored():
    feed = Feed(workers=2)
    feed.join("a")
    stale = feed.tasks[0]
    feed.send(ev.WorkerDown(stale.worker, "killed"))
    assert feed.send(ev.TaskEnded(stale.task)) == []


def test_a_block_that_kills_every_worker_is_bad_and_the_feed_goes_on():
    feed = Feed(max_deaths=3)
    feed.join("a")
    for death in range(3):
        feed.send(ev.WorkerDown(feed.tasks[0].worker, "signal 11"))
        if death < 2:
            feed.send(ev.WorkerUp(f"again{death}", 1))
    assert not kinds(feed.wait(VERDICT_S - 1), ev.Deliver), "perhaps their node died"
    assert explain.wait(feed.core, "a") == "block 0: too many prep workers died over it"
    done = feed.wait(1)
    assert [delivery.blocks for delivery in kinds(done, ev.Deliver)] == [(0,)]
    assert feed.core.window.blocks[0].error == "3 prep workers died over it; the last one: signal 11"
    feed.send(ev.WorkerUp("at last", 1))
    feed.ask("a", 1)
    assert feed.tasks[1].worker == "at last"


def test_a_death_is_charged_to_the_block_that_the_worker_was_making():
    """The worker's second, queued block is not charged."""
    feed = Feed(credit=2)
    feed.join("a")
    assert [task.block for task in feed.core.tasks.workers["w0"].tasks] == [0, 1]
    feed.send(ev.WorkerDown("w0", "signal 11"))
    assert [*feed.core.tasks.deaths] == [0]


def test_a_block_is_not_blamed_for_workers_whose_node_died():
    """Four workers die on the block; three deaths are node failures."""
    feed = Feed(max_deaths=3)
    feed.join("a")
    feed.send(ev.WorkerDown("w0", "signal 9"))
    for node in ("n1", "n2", "n3"):
        feed.send(ev.WorkerUp(f"on {node}", 1, node))
        feed.send(ev.WorkerDown(f"on {node}", "signal 9"))
        feed.send(ev.NodeDown(node, "its cache does not answer"))
    assert feed.core.window.blocks[0].error is None


def die(feed, *nodes):
    """Start a worker on each node in turn; it dies on the first block that lacks a part."""
    for node in nodes:
        feed.send(ev.WorkerUp("dies", 1, node))
        feed.send(ev.WorkerDown("dies", "signal 11"))


def test_a_block_whose_third_worker_died_with_its_node_is_made_again_at_once():
    """Seed 711481 of the whole-feed schedules: the node failure is detected shortly after the worker's death."""
    feed = Feed(max_deaths=3, workers=0)
    feed.join("a")
    die(feed, "n0", "n0", "n1")
    feed.send(ev.WorkerUp("lives", 9, "n2"))
    feed.send(ev.NodeDown("n3", "its cache does not answer"))
    assert feed.tasks[0].worker == "dies", "no worker died there"
    feed.send(ev.NodeDown("n1", "its cache does not answer"))
    assert feed.tasks[0].worker == "lives"
    assert [delivery.blocks for delivery in kinds(feed.finish(0), ev.Deliver)] == [(0,)]
    feed.wait(VERDICT_S)
    assert feed.core.window.blocks[0].error is None


def test_a_block_that_killed_enough_workers_elsewhere_is_not_cleared_by_the_death_of_one_node():
    """Both parts of the block kill a worker; the node failure excuses only the second death."""
    feed = Feed(max_deaths=1, workers=0, cut=lambda block, shuffle: (BlockPart("n0", 1),) * 2)
    feed.join("a")
    feed.send(ev.WorkerUp("dies", 1, "n0"))
    feed.send(ev.WorkerUp("goes with its node", 1, "n1"))
    feed.send(ev.WorkerDown("dies", "signal 11"))
    feed.wait(5.0)
    feed.send(ev.WorkerDown("goes with its node", "signal 9"))
    assert len(feed.core.tasks.deaths[0]) == 2
    feed.send(ev.WorkerUp("lives", 9, "n0"))
    feed.send(ev.NodeDown("n1", "its cache does not answer"))
    assert 0 not in {task.block for task in feed.core.tasks.workers["lives"].tasks}
    feed.wait(VERDICT_S - 5.0)
    assert feed.core.window.blocks[0].error == "1 prep worker died over it; the last one: signal 11"


def test_a_block_is_condemned_when_it_is_known_what_the_first_ones_died_of():
    feed = Feed(max_deaths=1, workers=0, cut=lambda block, shuffle: (BlockPart("n0", 1),) * 2)
    feed.join("a")
    for name in ("dies", "dies later"):
        feed.send(ev.WorkerUp(name, 1, "n0"))
    feed.send(ev.WorkerDown("dies", "signal 11"))
    feed.wait(5.0)
    feed.send(ev.WorkerDown("dies later", "signal 6"))
    feed.wait(VERDICT_S - 5.0)
    assert feed.core.window.blocks[0].error == "2 prep workers died over it; the last one: signal 6"


def test_neither_another_part_that_storage_gives_again_nor_one_that_is_made_decides_about_a_deadly_one():
    """Block 0 has three parts: the first kills its worker, storage fails on the second, and the third is prepared."""
    feed = Feed(max_deaths=1, workers=0, cut=lambda block, shuffle: (BlockPart("n0", 1),) * 3)
    feed.join("a")
    die(feed, "n0")
    feed.send(ev.WorkerUp("lives", 2, "n0"))
    second, third = feed.core.tasks.workers["lives"].tasks
    feed.send(ev.PutOff(second.number, "storage does not give it"))
    feed.send(ev.TaskEnded(third.number, None))
    feed.wait(PUT_OFF_S)
    assert feed.core.window.blocks[0].error is None, "perhaps the node of the one that died is gone"
    feed.wait(VERDICT_S - PUT_OFF_S)
    assert feed.core.window.blocks[0].error == "1 prep worker died over it; the last one: signal 11"


def test_deaths_and_errors_over_a_block_are_forgotten_with_it():
    feed = Feed(max_deaths=2)
    feed.join("a")
    for _ in range(2):
        feed.send(ev.WorkerDown(feed.tasks[0].worker, "signal 11"))
        feed.send(ev.WorkerUp("next", 1))
    feed.ask("a", 1)
    fail(feed, 1)
    assert feed.core.tasks.failures == {1: 1}
    feed.send(ev.Leave("a"))
    assert [*feed.core.window.blocks] == [2], "it is being prepared"
    assert (feed.core.tasks.deaths, feed.core.tasks.failures) == ({}, {})


def fail(feed, block, reason="a bug"):
    """Report a bug in a block's task; the worker stays alive."""
    return feed.send(ev.TaskFailed(feed.tasks.pop(block).task, reason))


def until_tried_again(feed, block):
    """Prepare other blocks until the pause is over and the block is assigned again."""
    feed.wait(PUT_OFF_S)
    while block not in feed.tasks:
        assert feed.tasks
        feed.make(*feed.tasks)


def test_a_part_over_which_a_worker_met_a_bug_is_tried_again_a_moment_later_and_the_worker_stays():
    feed = Feed()
    feed.join("a")
    done = fail(feed, 0, "KeyError: 7")
    assert kinds(done, ev.ReplaceWorker) == []
    assert [note.text for note in kinds(done, ev.Note)] == ["w0 failed on block 0: KeyError: 7"]
    assert prepared(done) == [1], "the worker has its next block, not the same one at once"
    feed.wait(0.9 * PUT_OFF_S)
    assert explain.wait(feed.core, "a") == "block 0: it is tried again after an error: KeyError: 7"
    assert prepared(feed.wait(0.1 * PUT_OFF_S)) == []
    assert prepared(feed.finish(1)) == [0]
    assert delivered(feed.finish(0)) == {"a": (0,)}


def test_a_block_that_ends_in_three_errors_is_bad_and_made_anew_for_a_consumer_that_asks_again():
    """The worker prepares other blocks in between, so the worker is healthy."""
    feed = Feed(max_deaths=3, budget_blocks=20, ahead=19, blocks_per_epoch=20)
    feed.join("a")
    for attempt in range(3):
        assert feed.core.window.blocks[0].error is None
        done = fail(feed, 0)
        assert kinds(done, ev.ReplaceWorker) == []
        if attempt < 2:
            until_tried_again(feed, 0)
    assert delivered(done) == {"a": (0,)}
    assert feed.core.window.blocks[0].error == "3 tries to prepare it ended in an error; the last one: a bug"
    feed.ask("a", 0)
    until_tried_again(feed, 0)
    fail(feed, 0)
    assert feed.core.window.blocks[0].error is None, "the errors before are forgotten"


def test_the_errors_of_a_block_are_forgotten_when_it_is_made():
    """It fails twice before it is prepared and lost with its node, and twice afterwards."""
    feed = Feed(max_deaths=3, workers=0, budget_blocks=20, ahead=19, blocks_per_epoch=20)
    feed.join("a")
    for node in ("n0", "n1"):
        feed.send(ev.WorkerUp(f"on {node}", 1, node))
        feed.ask("a", 0)
        for _ in range(2):
            until_tried_again(feed, 0)
            fail(feed, 0)
        until_tried_again(feed, 0)
        feed.finish(0)
        feed.tasks.clear()
        feed.send(ev.NodeDown(node, "killed"))
    assert feed.core.window.blocks[0].error is None


def test_a_worker_that_meets_two_errors_in_a_row_is_replaced_and_no_block_is_blamed():
    feed = Feed(credit=3)
    feed.join("a")
    assert kinds(fail(feed, 0), ev.ReplaceWorker) == []
    done = fail(feed, 1, "CUDA error")
    reason = "2 of its tasks in a row ended in an error; the last one: CUDA error"
    assert kinds(done, ev.ReplaceWorker) == [ev.ReplaceWorker("w0", reason, blame=False)]
    assert feed.core.tasks.deaths == {}
    feed.send(ev.WorkerUp("w1", 3))
    feed.wait(PUT_OFF_S)
    assert {task.worker for task in feed.tasks.values()} == {"w1"}
    feed.make(0, 1)
    assert delivered(feed.ask("a", 0, want=2)) == {"a": (0, 1)}


def test_a_worker_is_not_replaced_for_the_last_error_of_a_bad_block():
    """The worker prepares all other blocks after the first error, and none between the second and the third."""
    feed = Feed(max_deaths=3, ahead=2, credit=2)
    feed.join("a")
    fail(feed, 0)
    while feed.tasks:
        feed.make(*feed.tasks)
    for _ in range(2):
        assert prepared(feed.wait(PUT_OFF_S)) == [0]
        assert kinds(fail(feed, 0), ev.ReplaceWorker) == []
    assert feed.core.window.blocks[0].error is not None
    feed.ask("a", 0)
    assert kinds(fail(feed, 0), ev.ReplaceWorker) == [], "the worker's earlier failures do not count either"
    assert prepared(feed.wait(PUT_OFF_S)) == [0]
    assert kinds(fail(feed, 0), ev.ReplaceWorker), "but these two do: the block is not known to be bad"


def test_a_worker_that_makes_something_between_two_errors_stays():
    feed = Feed(credit=3)
    feed.join("a")
    fail(feed, 0)
    feed.make(1)
    assert kinds(fail(feed, 2), ev.ReplaceWorker) == []


def test_the_error_of_a_worker_that_was_given_up_is_ignored():
    feed = Feed(workers=2)
    feed.join("a")
    stale = feed.tasks[0]
    feed.send(ev.WorkerDown(stale.worker, "killed"))
    assert feed.send(ev.TaskFailed(stale.task, "a bug")) == []


def test_a_stuck_worker_is_named_and_replaced():
    feed = Feed(prep_s=10.0, lease_s=100.0)
    feed.join("a")
    assert kinds(feed.wait(10.0), ev.ReplaceWorker) == []
    done = feed.wait(0.1)
    assert kinds(done, ev.ReplaceWorker) == [ev.ReplaceWorker("w0", "it made block 0 for more than 10 s")]
    feed.send(ev.WorkerUp("w1", 1))
    assert feed.tasks[0].worker == "w1"


def test_the_clock_of_a_queued_task_starts_when_it_becomes_the_first():
    feed = Feed(credit=2, prep_s=10.0, lease_s=100.0)
    feed.join("a")
    feed.wait(9.0)
    feed.finish(0)
    assert kinds(feed.wait(9.0), ev.ReplaceWorker) == []


def test_a_silent_consumer_is_removed_and_its_bytes_come_back():
    feed = Feed(credit=8, ahead=3, lease_s=5.0)
    feed.join("a")
    feed.make(0, 1, 2)
    feed.ask("a", 0, want=3)
    assert feed.core.window.used_bytes == 30 + 10 * len(feed.tasks)
    for block in list(feed.tasks):
        feed.finish(block)
    done = feed.wait(5.0)
    assert kinds(done, ev.RemoveConsumer) == [ev.RemoveConsumer("a", 1, "it was silent for 5 s")]
    assert feed.core.window.used_bytes == 0


def test_a_heartbeat_keeps_the_lease_and_frees_what_was_let_go():
    feed = Feed(credit=8, ahead=2, lease_s=5.0, budget_blocks=2)
    feed.join("a")
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.now = 4.0
    done = feed.send(ev.Heartbeat("a", 1, released=1, done=1))
    assert ev.DropBlock(0, for_room=True) in done
    assert prepared(done) == [2]
    assert kinds(feed.wait(4.0), ev.RemoveConsumer) == []


def test_a_laggard_goes_on_alone_after_the_others_patience_and_nobody_loses_a_block():
    feed = Feed(budget_blocks=4, ahead=2, credit=8, patience_s=5.0, lease_s=1000.0)
    feed.join("a")
    feed.join("slow")
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.ask("slow", 0, want=1)
    feed.make(2)
    feed.ask("a", 2)
    feed.ask("a", 3)
    feed.wait(0.1)
    assert 3 not in feed.tasks
    done = feed.wait(5.0)
    assert "slow kept a waiting at block 1 for 5 s" in kinds(done, ev.Note)[0].text
    assert 3 in feed.tasks
    feed.make(3)
    assert delivered(feed.ask("slow", 1)) == {"slow": (1,)}


def detached(feed):
    return [member.name for member in feed.core.consumers.by_name.values() if member.apart]


def test_a_loader_that_nobody_reads_is_waited_for_no_longer_than_a_reservation():
    """It joined at its own block, so it cannot rest."""
    feed = Feed(budget_blocks=4, ahead=2, credit=8, reservation_s=20.0, patience_s=30.0, lease_s=1000.0)
    feed.wait(100)
    feed.join("unread", start=0, asks=False)
    feed.wait(15)
    feed.join("a")
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.ask("a", 2)
    feed.wait(4)
    assert detached(feed) == []
    assert 2 not in feed.tasks
    done = feed.wait(1)
    assert detached(feed) == ["unread"]
    assert "unread kept a waiting at block 0 for 1 s, and has asked for nothing since it joined" in (
        kinds(done, ev.Note)[0].text
    )
    assert 2 in feed.tasks
    assert delivered(feed.ask("unread", 0)) == {"unread": (0,)}, "it begins where it joined as long as that is staged"


def test_a_laggard_that_catches_up_shares_again():
    feed = Feed(budget_blocks=6, ahead=2, credit=8, patience_s=5.0, lease_s=1000.0)
    cohorts = feed.core.consumers.cohorts
    feed.join("a")
    feed.join("slow", start=0, asks=False)
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.ask("a", 2)
    feed.wait(0.1)
    feed.wait(5.0)
    assert len(cohorts) == 2
    assert kinds(feed.ask("slow", 0, want=2), ev.Note) == [ev.Note("slow joined the cohort of a")]
    assert kinds(feed.ask("slow", 2), ev.Note) == []
    assert len(cohorts) == 1


def test_a_consumer_restored_far_away_gets_its_exact_block_in_a_cohort_of_its_own():
    feed = Feed(credit=8, ahead=2)
    feed.join("a")
    assert feed.join("restored", start=41) == 41
    assert len(feed.core.consumers.cohorts) == 2
    assert {41, 42} <= set(feed.tasks)


def test_those_who_wait_do_not_pull_a_laggard_back_in_by_asking_again():
    """A long wait repeats its call. If that rejoined the cohorts, the fast one would lose `patience_s` each time."""
    feed = Feed(patience_s=5.0)
    feed.join("slow", start=0, asks=False)
    feed.join("fast")
    feed.make(0, 1, 2)
    feed.ask("fast", 0, want=3)
    feed.ask("fast", 3)
    feed.wait(1.0)
    feed.wait(5.0)
    feed.ask("fast", 3)
    members = feed.core.consumers.by_name
    assert members["fast"].cohort != members["slow"].cohort
    assert delivered(feed.finish(3)) == {"fast": (3,)}


def test_a_consumer_restored_at_an_epochs_first_block_is_not_moved_to_a_later_epoch():
    """Its position may be inside that block; another epoch would not contain its samples."""
    feed = Feed()
    feed.join("other", start=8)
    assert feed.join("restored", start=0) == 0
    assert feed.core.consumers.by_name["restored"].cursor == 0


def test_a_state_between_epochs_joins_an_epoch_that_others_begin_and_that_it_has_not_had():
    feed = Feed()
    feed.join("a", start=48)
    assert feed.join("restored", start=40, flexible=True) == 48
    assert feed.join("further", start=52, flexible=True) == 52, "it has had the one that they are in"
    assert feed.join("same", start=48, flexible=True) == 48


def test_a_place_that_is_held_is_taken_only_for_an_epoch_that_was_not_had():
    feed = Feed()
    feed.join("a")
    feed.send(ev.Announce("restored"))
    assert feed.core.consumers.by_name["restored"].cursor == 0
    assert feed.join("restored", start=8, flexible=True) == 8


def test_a_state_between_epochs_starts_where_it_says_if_nobody_is_there():
    feed = Feed()
    assert feed.join("restored", start=40, flexible=True, asks=False) == 40
    feed.join("other", start=48)
    feed.ask("restored", 40)
    assert feed.core.consumers.by_name["restored"].cursor == 48, "and it may still begin another one with others"


def evaluated(feed, name, *, goes_on=False):
    """Blocks prepared while a consumer joins, reads an epoch (plus one block if `goes_on`) and leaves."""
    start = feed.join(name, asks=False)
    made = []
    for block in range(start, start + 4 + goes_on):
        made += prepared(feed.ask(name, block))
        while feed.tasks:
            made += prepared(feed.finish(min(feed.tasks)))
    feed.send(ev.Leave(name, feed.session))
    assert feed.wait(100.0) == [], "a feed without consumers prepares nothing"
    return made


def test_nothing_is_made_behind_the_epoch_of_those_who_leave_when_it_ends():
    """A loader is reopened for each evaluation: only the first visit also prepares the next epoch."""
    feed = Feed(ahead=6, budget_blocks=10)
    assert evaluated(feed, "first") == [*range(8)]
    for evaluation in range(2, 6):
        assert evaluated(feed, "validation") == [*range(4 * evaluation, 4 * evaluation + 4)]


def test_as_much_as_before_is_made_ahead_once_somebody_goes_on():
    feed = Feed(ahead=6, budget_blocks=10)
    evaluated(feed, "first")
    assert evaluated(feed, "trial", goes_on=True) == [*range(8, 19)]
    assert evaluated(feed, "next") == [*range(20, 28)]


def test_a_visitor_shortens_nothing_for_those_it_reads_with():
    feed = Feed(ahead=6, budget_blocks=12)
    evaluated(feed, "first")
    feed.join("trial", start=40, asks=False)
    feed.core.consumers.by_name["trial"].is_visitor = False
    feed.join("visitor", start=40, asks=False)
    assert feed.core.consumers.by_name["visitor"].is_visitor
    feed.ask("trial", 40)
    feed.make(40)
    feed.ask("visitor", 40)
    (cohort,) = feed.core.consumers.cohorts.values()
    assert cohort.horizon > 44


def test_a_feed_that_all_have_left_starts_a_fresh_epoch():
    feed = Feed()
    feed.join("a")
    feed.make(0)
    feed.send(ev.Leave("a"))
    assert feed.join("b") == 4


def test_calls_of_an_old_session_are_refused():
    feed = Feed()
    feed.join("a")
    feed.join("a")
    done = feed.send(ev.Ask("a", 1, 0, 0, 0))
    assert "is now in session 2, this call is from session 1" in kinds(done, ev.Refuse)[0].reason


def test_a_bad_block_reaches_its_consumers_as_an_error_and_the_log_and_takes_no_bytes():
    feed = Feed(ahead=1)
    feed.join("a")
    feed.ask("a", 0)
    done = feed.send(ev.TaskEnded(feed.tasks.pop(0).task, "cannot prepare x.jpg: truncated"))
    assert delivered(done) == {"a": (0,)}
    assert kinds(done, ev.Note)[0].text == "cannot prepare x.jpg: truncated"
    assert feed.core.window.blocks[0].nbytes == 0


def test_who_leaves_an_epoch_half_way_and_holds_its_last_block_gets_the_next_epoch():
    """Epochs have 8 blocks, the budget is 4: block 0 is held and 1 to 3 are ready when the consumer skips to 8.

    Blocks 1 to 3 were never delivered and no consumer needs them, so they are dropped at once.
    """
    feed = Feed(budget_blocks=4, ahead=4, blocks_per_epoch=8)
    feed.join("ann")
    feed.finish(0)
    feed.make(1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    done = feed.send(ev.Ask("ann", session, 8, 0, 0, 1))
    assert kinds(done, ev.DropBlock) == [ev.DropBlock(1), ev.DropBlock(2), ev.DropBlock(3)]
    assert delivered(feed.finish(8)) == {"ann": (8,)}
    assert 0 in feed.core.window.blocks
    feed.send(ev.Ask("ann", session, 9, 0, 0, 1))
    assert delivered(feed.finish(9)) == {"ann": (9,)}
    assert sorted(feed.core.window.blocks) == [0, 8, 9, 10]


def test_who_gives_up_what_it_was_given_ahead_and_holds_an_older_block_gets_the_next_epoch():
    """As in the test above, but blocks 1 to 3 were already delivered, and the consumer hands them back."""
    feed = Feed(budget_blocks=5, ahead=4, blocks_per_epoch=8, credit=4)
    feed.join("ann")
    feed.finish(0)
    feed.make(1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    assert delivered(feed.send(ev.Ask("ann", session, 1, 0, 0, 3))) == {"ann": (1, 2, 3)}
    feed.send(ev.HandBack("ann", session, 1, 0))
    feed.send(ev.Ask("ann", session, 8, 0, 0, 1))
    assert delivered(feed.finish(8)) == {"ann": (8,)}
    assert 0 in feed.core.window.blocks


def test_a_word_that_was_overtaken_changes_nothing():
    """If a late hand-back of blocks 1 to 3 were applied after block 8 was delivered, block 8 would count as skipped."""
    feed = Feed(budget_blocks=12, ahead=4, blocks_per_epoch=8, credit=4)
    feed.join("ann")
    feed.make(0, 1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 1, 0, 0, 3, number=1))
    feed.send(ev.Ask("ann", session, 8, 0, 0, 1, number=3))
    feed.make(4, 8)
    feed.send(ev.HandBack("ann", session, 1, 0, number=2))
    feed.send(ev.Ask("ann", session, 9, 0, 0, 1, number=4))
    assert feed.core.consumers.by_name["ann"].holds(8)
    assert not feed.send(ev.Ask("ann", session, 1, 0, 0, 3, number=1)), "a repeated call"
    assert feed.core.consumers.by_name["ann"].cursor == 9


def test_a_call_that_comes_again_after_its_block_was_used_up_is_left_alone():
    """Its answer did arrive. Delivering the block again would count it both as used and as outstanding."""
    feed = Feed()
    session = feed.session + 1
    feed.join("ann", asks=False)
    for number, block in enumerate(range(4), 1):
        feed.send(ev.Ask("ann", session, block, block, 0, number=number))
        feed.finish(block)
    feed.send(ev.Heartbeat("ann", session, released=3, done=4))
    assert not feed.send(ev.Ask("ann", session, 3, 3, 0, number=4)), "neither answered nor refused"
    feed.send(ev.Heartbeat("ann", session, released=4, done=4))
    assert not feed.send(ev.Ask("ann", session, 3, 3, 0, number=4))
    assert feed.core.consumers.by_name["ann"].cursor == 4


def test_a_call_that_comes_twice_is_answered_twice_and_what_it_got_first_stays():
    """Blocks 1 to 3 are held when the call is repeated; the second answer may contain fewer blocks."""
    feed = Feed(budget_blocks=5, ahead=4, blocks_per_epoch=8, credit=4)
    feed.join("ann")
    feed.make(0, 1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    first = ev.Ask("ann", session, 1, 0, 0, 3, number=1)
    assert delivered(feed.send(first)) == {"ann": (1, 2, 3)}
    assert delivered(feed.send(first)) == {"ann": (1, 2, 3)}, "the first answer may not have arrived"
    assert delivered(feed.send(ev.Ask("ann", session, 1, 0, 0, 1, number=1))) == {"ann": (1,)}
    feed.send(ev.Ask("ann", session, 4, 0, 3, 1, number=2))
    assert [feed.core.consumers.by_name["ann"].holds(block) for block in range(5)] == [True, True, True, True, False]


def test_who_is_moved_to_the_epoch_that_others_begin_still_holds_its_last_block():
    """Its trial works on block 3 when it requests the next epoch, which it starts at block 16 with the other."""
    feed = Feed(budget_blocks=12, ahead=8, workers=2, credit=4)
    feed.join("ann")
    feed.make(*range(4))
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 0, 0, 0, 4))
    feed.join("bob", start=16)
    feed.ask("bob", 16)
    feed.send(ev.Ask("ann", session, 4, 3, 3, 1))
    ann = feed.core.consumers.by_name["ann"]
    assert ann.cursor == 16, "it begins the epoch that bob begins"
    assert ann.holds(3)
    assert not ann.holds(4)
    assert 3 in feed.core.window.blocks
    feed.send(ev.Heartbeat("ann", session, 4, 4))
    assert 3 not in feed.core.window.blocks


def test_the_longest_waiting_cohort_is_served_first_when_bytes_are_short():
    """Two cohorts share a budget of two blocks: neither may starve."""
    feed = Feed(budget_blocks=2, ahead=1, credit=2)
    feed.join("a")
    feed.join("b", start=21)
    next_block, taken = {"a": 0, "b": 21}, {"a": 0, "b": 0}

    def note(done):
        for consumer, blocks in delivered(done).items():
            next_block[consumer] = blocks[-1] + 1
            taken[consumer] += len(blocks)

    for _ in range(40):
        for name, block in list(next_block.items()):
            note(feed.ask(name, block))
        for block in list(feed.tasks):
            note(feed.finish(block))
    assert min(taken.values()) > 15


def test_limits_are_checked():
    with pytest.raises(ValueError, match="ahead_blocks must be at least 1, got 0"):
        StagingLimits(budget_bytes=1, ahead_blocks=0)


# ---- storage failures and bad samples ----


def put_off(feed, block, reason="storage does not give x.jpg: slow down"):
    return feed.send(ev.PutOff(feed.tasks.pop(block).task, reason))


def test_a_part_that_waits_for_storage_holds_no_worker_and_is_tried_again():
    """One worker takes one task at a time: while block 0 waits for storage, it prepares blocks 1 and 2."""
    feed = Feed()
    feed.join("a")
    assert prepared(put_off(feed, 0)) == [1]
    assert explain.wait(feed.core, "a") == "block 0: storage does not give x.jpg: slow down"
    feed.make(1, 2)
    assert prepared(feed.wait(PUT_OFF_S / 2)) == []
    assert prepared(feed.wait(PUT_OFF_S / 2)) == [0]
    assert delivered(feed.finish(0)) == {"a": (0,)}


def test_nobody_else_waits_behind_a_part_that_waits_for_storage():
    """The only worker cannot prepare one consumer's block; another one elsewhere in the stream still progresses."""
    feed = Feed(budget_blocks=2, ahead=1)
    feed.join("stuck", start=0)
    feed.join("other", start=20)
    for _ in range(3):
        put_off(feed, 0)
        block = feed.core.consumers.by_name["other"].cursor
        assert delivered(feed.finish(block)) == {"other": (block,)}
        feed.wait(PUT_OFF_S)
        feed.ask("other", block + 1)
    assert feed.core.consumers.by_name["stuck"].cursor == 0


def test_storage_that_is_away_is_the_fault_of_no_worker_and_no_consumer():
    """One consumer waits minutes for block 2. The one at block 1 is not detached, and no worker is replaced."""
    feed = Feed(ahead=3, patience_s=30, prep_s=10, lease_s=1000)
    feed.join("slow")
    feed.join("fast")
    feed.make(0, 1)
    feed.ask("fast", 1)
    feed.ask("fast", 2)
    for _ in range(150):
        for block in [*feed.tasks]:
            put_off(feed, block) if block == 2 else feed.finish(block)
        done = feed.wait(0.7)
        assert not kinds(done, ev.ReplaceWorker)
        assert not any(member.apart for member in feed.core.consumers.by_name.values())
    assert feed.core.window.blocks[2].error is None
    assert feed.core.consumers.by_name["fast"].waiting


def test_a_bad_sample_is_tried_anew_when_a_consumer_that_had_its_error_asks_again():
    feed = Feed(workers=1)
    feed.join("a")
    feed.join("b")
    assert delivered(feed.send(ev.TaskEnded(feed.tasks.pop(0).task, "bad"))) == {"a": (0,), "b": (0,)}
    done = feed.ask("a", 0)
    assert kinds(done, ev.DropBlock) == [ev.DropBlock(0)]
    feed.make(1)
    assert 0 in feed.tasks
    assert delivered(feed.finish(0)) == {"a": (0,)}
    assert feed.core.window.blocks[0].error is None


def test_a_bad_sample_is_not_tried_anew_for_a_consumer_that_had_no_error_yet():
    """Otherwise eight trials would retry it eight times."""
    feed = Feed(workers=1)
    feed.join("a")
    feed.join("late", asks=False)
    assert delivered(feed.send(ev.TaskEnded(feed.tasks.pop(0).task, "bad"))) == {"a": (0,)}
    assert kinds(feed.ask("a", 1), ev.DropBlock) == [], "it continues after it"
    assert delivered(feed.ask("late", 0)) == {"late": (0,)}
    assert feed.core.window.blocks[0].error == "bad"


def test_a_block_over_which_workers_died_is_not_tried_anew():
    feed = Feed(workers=1, max_deaths=1)
    feed.join("a")
    feed.send(ev.WorkerDown("w0", "killed"))
    feed.wait(VERDICT_S)
    feed.send(ev.WorkerUp("w1", 1))
    assert delivered(feed.ask("a", 0)) == {"a": (0,)}
    assert feed.core.window.blocks[0].error == "1 prep worker died over it; the last one: killed"


def test_asking_renews_the_lease():
    feed = Feed(lease_s=10.0)
    feed.join("ann")
    feed.wait(9.0)
    feed.ask("ann", 0)
    feed.wait(9.0)
    assert "ann" in feed.core.consumers.by_name
    feed.wait(1.0)
    assert not feed.core.consumers.by_name


def test_what_is_handed_back_says_what_is_let_go_too():
    feed = Feed(credit=3)
    feed.join("ann")
    feed.make(0, 1, 2)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 1, 0, 0, 3))
    feed.send(ev.HandBack("ann", session, 2, 1))
    ann = feed.core.consumers.by_name["ann"]
    assert (ann.released, ann.cursor, ann.waiting) == (1, 2, False)


def test_a_worker_that_is_stuck_is_charged_to_its_block():
    feed = Feed(workers=1, max_deaths=1, prep_s=5.0)
    feed.join("ann")
    done = feed.wait(6.0)
    assert [i.worker for i in kinds(done, ev.ReplaceWorker)] == ["w0"]
    feed.wait(VERDICT_S)
    assert feed.core.window.blocks[0].error is not None


def test_heartbeats_and_ticks_that_change_nothing_lead_to_nothing():
    feed = Feed()
    feed.join("ann")
    session = feed.core.consumers.by_name["ann"].session
    for event in (ev.Heartbeat("ann", session, 0, 0), ev.Tick(), ev.Heartbeat("nobody", 1, 0, 0)):
        before = len(feed.core.window.blocks)
        assert not kinds(feed.send(event), ev.Prepare)
        assert len(feed.core.window.blocks) == before


def test_the_block_that_is_needed_last_by_everybody_makes_room():
    """The budget is 4 blocks: ann holds 0 and waits for 1. Blocks 2 and 3 are not held, and 3 is needed last."""
    feed = Feed(budget_blocks=4, ahead=4, credit=4, blocks_per_epoch=8)
    feed.join("ann")
    feed.make(0, 1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 1, 0, 0, 1))
    feed.join("has not asked yet", start=16, asks=False)
    feed.join("far", start=16)
    assert [i.block for i in kinds(feed.ask("far", 16), ev.DropBlock)] == []
    assert sorted(feed.core.window.blocks) == [0, 1, 2, 16]


def test_who_keeps_the_budget_is_named():
    feed = Feed(budget_blocks=2, ahead=2)
    feed.join("ann")
    feed.make(0)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 0, 0, 0, 1))
    feed.finish(1)
    feed.send(ev.Ask("ann", session, 1, 0, 0, 1))
    feed.join("bob", start=30)
    assert explain.wait(feed.core, "bob") == "the staging budget of 20 B is held by ann", "bob holds nothing"
    assert "not a consumer" in explain.wait(feed.core, "nobody")


def test_who_comes_after_the_feed_failed_learns_why_and_all_else_is_silence():
    feed = Feed()
    feed.join("ann")
    assert feed.send(ev.Stop("it was stopped")) == [ev.Refuse("ann", 1, "it was stopped")], "a waiting trial is refused"
    assert feed.send(ev.Stop("another reason")) == []
    for thing in ("ann", "w0", "block 0"):
        story = feed.core.stories.lines(thing)
        assert story[-1].endswith("the feed ended: it was stopped  <- Stop(reason='it was stopped')")
    for event in (ev.Join("bob", 9), ev.Ask("ann", 1, 0, 0, 0)):
        assert [i.reason for i in kinds(feed.send(event), ev.Refuse)] == ["it was stopped"]
    assert feed.send(ev.TaskEnded(0)) == []


def test_who_asks_for_what_it_let_go_of_is_refused():
    feed = Feed()
    feed.join("ann")
    feed.make(0)
    feed.ask("ann", 1)
    (refused,) = kinds(feed.send(ev.Ask("ann", 1, 0, 0, 0)), ev.Refuse)
    assert refused.reason == "it asked for block 0 after it let go of all blocks below 1"


def test_who_hands_back_while_it_waits_waits_no_more():
    feed = Feed()
    feed.join("ann")
    assert feed.core.consumers.by_name["ann"].waiting
    feed.send(ev.HandBack("ann", 1, 0, 0))
    assert not feed.core.consumers.by_name["ann"].waiting
    assert delivered(feed.finish(0)) == {}


def test_who_is_ahead_waits_for_the_slowest_and_is_told_so():
    feed = Feed(ahead=1)
    feed.join("ann")
    feed.join("bob", asks=False)
    feed.make(0)
    feed.ask("ann", 1)
    assert explain.wait(feed.core, "ann") == "the slowest consumer, bob, is at block 0, this one at 1"


def test_who_waits_for_workers_is_told_for_which():
    """The only worker prepares block 0, which the consumer then skips; finally the worker dies."""
    feed = Feed()
    feed.join("ann")
    assert explain.wait(feed.core, "ann") == "block 0 is being prepared by w0"
    feed.ask("ann", 1)
    assert explain.wait(feed.core, "ann") == "block 1 waits for a prep worker"
    feed.send(ev.WorkerDown("w0", "killed"))
    assert explain.wait(feed.core, "ann") == "no prep worker is up"
    awaited = ["prep-3 is being started, it needs 1 CPU", "the cache of node a is being started"]
    assert explain.wait(feed.core, "ann", awaited) == "; ".join(["no prep worker is up", *awaited])


def test_small_blocks_do_not_pass_a_large_one_that_waits_for_room():
    """The budget is 40 bytes. One consumer holds 20 and the other waits for 30, so the 20 free bytes are reserved."""
    feed = Feed(budget_blocks=4, ahead=2, credit=4, block_bytes=lambda block: 30 if block >= 40 else 10)
    feed.join("holds", asks=False)
    feed.send(ev.Ask("holds", 1, 0, 0, 0, 2))
    feed.make(1, 0, 2, 3)
    assert feed.join("waits", 40) == 40
    assert feed.tasks == {}
    assert sorted(feed.core.window.blocks) == [0, 1], "blocks 2 and 3 were dropped, which is not enough"
    assert prepared(feed.ask("waits", 40)) == [], "block 2 is not prepared for the other one either"
    assert prepared(feed.send(ev.Heartbeat("holds", 1, released=1, done=1))) == [40]


def test_of_the_blocks_ahead_the_one_makes_room_that_is_furthest_from_whoever_comes_there_next():
    """One consumer is at block 1 with 1 to 3 staged, another at 21 with 21 and 22 staged; a third waits for 40."""
    feed = Feed(budget_blocks=5, credit=8)
    feed.join("at 1")
    feed.make(0, 1, 2, 3)
    feed.send(ev.Heartbeat("at 1", 1, released=1, done=1))
    feed.join("at 21", start=20)
    feed.make(20)
    feed.send(ev.Heartbeat("at 21", 2, released=21, done=21))
    feed.make(21, 22)
    assert sorted(feed.core.window.blocks) == [1, 2, 3, 21, 22]
    feed.join("waits", start=40)
    assert sorted(feed.core.window.blocks) == [1, 2, 21, 22, 40]


@pytest.mark.timeout(20)  # a failure is an endless loop: two cohorts take each other's bytes
def test_two_who_wait_do_not_take_each_others_bytes_while_another_node_is_at_it():
    """All samples have home node a, whose only worker prepares block 0; the worker on b is idle."""
    feed = Feed(budget_blocks=2, workers=0, cut=lambda block, _: (BlockPart("a", 1),))
    feed.send(ev.WorkerUp("on a", 1, "a"))
    feed.join("ann")
    feed.send(ev.WorkerUp("on b", 2, "b"))
    for second, (name, start) in enumerate((("ben", 20), ("cid", 40)), 1):
        feed.now = second
        feed.join(name, start)
    assert sorted(feed.core.window.blocks) == [0, 20], "ben joined first"
    feed.finish(0)
    assert delivered(feed.finish(20)) == {"ben": (20,)}
    feed.send(ev.Heartbeat("ben", 2, released=21, done=21))
    assert delivered(feed.finish(40)) == {"cid": (40,)}


@pytest.mark.timeout(20)
def test_bytes_that_are_taken_back_without_end_are_an_error_and_no_standstill(monkeypatch):
    """Each block is dropped as soon as it is granted."""
    feed = Feed(workers=0, cut=lambda block, _: (BlockPart("a", 1),))
    feed.send(ev.WorkerUp("on b", 2, "b"))
    feed.send(ev.WorkerUp("on a", 1, "a"))
    feed.join("ann", asks=False)
    feed.core.tasks.workers["on a"].credit = 0
    monkeypatch.setattr(feed.core.window, "fits", lambda nbytes: True)
    grant = feed.core.window.grant

    def granted_and_dropped(number, nbytes, parts):
        block = grant(number, nbytes, parts)
        feed.core.window.drop(number, "for this test")
        return block

    monkeypatch.setattr(feed.core.window, "grant", granted_and_dropped)
    with pytest.raises(InvariantError, match="block 0 was granted more than 100 times after one event"):
        feed.ask("ann", 0)


def test_what_storage_does_not_give_makes_room_for_whoever_else_waits():
    feed = Feed(budget_blocks=1)
    feed.join("ann")
    feed.now = 1.0
    feed.join("ben", 20)
    feed.send(ev.PutOff(feed.tasks.pop(0).task, "storage is away"))
    assert sorted(feed.core.window.blocks) == [20]
    assert delivered(feed.finish(20)) == {"ben": (20,)}


def test_whoever_waits_for_a_block_that_is_being_made_does_not_come_before_one_whose_block_nobody_makes():
    feed = Feed()
    feed.join("first")
    feed.now = 5.0
    feed.join("second", start=20)
    assert sorted(feed.tasks) == [0]
    assert prepared(feed.send(ev.WorkerUp("w1", 1))) == [20]


def test_where_nobody_waits_the_block_is_made_that_is_needed_soonest():
    """One consumer waits for block 0; the other has all blocks up to 20 and needs 21 next."""
    feed = Feed()
    feed.join("at 21", start=20)
    feed.send(ev.WorkerLeaves("w0"))
    feed.make(20)
    feed.join("at 0", start=0)
    assert prepared(feed.send(ev.WorkerUp("w1", 1))) == [0]
    assert prepared(feed.send(ev.WorkerUp("w2", 1))) == [21]


def test_a_session_that_is_not_newer_than_the_open_one_is_refused():
    """The join call was overtaken, or arrived twice."""
    feed = Feed()
    feed.send(ev.Join("ann", 5))
    for session in (4, 5):
        (refused,) = feed.send(ev.Join("ann", session))
        assert refused == ev.Refuse("ann", session, "session 5 of 'ann' is newer")
    assert feed.core.consumers.by_name["ann"].session == 5


def test_a_successor_begins_behind_the_epoch_that_its_predecessor_used_up():
    """This also holds while another trial is so far behind that the whole epoch is still staged."""
    feed = Feed(ahead=4, credit=8)
    feed.join("ann")
    feed.join("bob")
    feed.make(0, 1, 2, 3)
    feed.send(ev.Ask("bob", 2, 0, 0, 0, 4))
    feed.send(ev.Heartbeat("bob", 2, released=4, done=4))
    feed.send(ev.Leave("bob", 2, successors=1))
    feed.send(ev.Announce("eve"))
    assert feed.join("eve") == 4


def test_who_leaves_ends_its_own_session_only():
    feed = Feed()
    feed.join("ann")
    feed.join("ann")
    feed.send(ev.Leave("ann", 1))
    assert "ann" in feed.core.consumers.by_name
    feed.send(ev.Leave("ann", 2))
    assert feed.core.consumers.by_name == {}


def test_the_place_of_one_that_left_is_held_for_the_reservation_time():
    feed = Feed(reservation_s=5.0)
    feed.join("ann")
    feed.send(ev.Leave("ann", successors=1))
    feed.wait(4.0)
    assert [*feed.core.consumers.by_name] == ["reservation 0"]
    feed.wait(1.0)
    assert feed.core.consumers.by_name == {}


def test_patience_begins_anew_when_nobody_waited_between():
    feed = Feed(patience_s=5.0, lease_s=1000.0, reservation_s=1000.0)
    feed.join("slow", start=0, asks=False)
    feed.join("fast")
    feed.make(0, 1, 2)
    feed.ask("fast", 3)
    feed.wait(0.0)
    feed.wait(4.0)
    feed.send(ev.HandBack("fast", 2, 3, 3))
    feed.wait(0.5)
    feed.ask("fast", 3)
    feed.wait(0.5)
    feed.wait(4.5)
    assert detached(feed) == []
    feed.wait(0.5)
    assert detached(feed) == ["slow"]


def test_of_two_that_others_wait_for_the_one_goes_first_that_never_began_and_the_other_has_its_time():
    """A third consumer waits: 20 s for the one at block 0 that never asked, then 30 s for the one at block 1."""
    feed = Feed(ahead=2, credit=8, reservation_s=20.0, patience_s=30.0, lease_s=1000.0)
    feed.join("works")
    feed.join("never began", start=0, asks=False)
    feed.join("waits")
    feed.make(0, 1)
    feed.ask("waits", 2)
    feed.wait(0.0)
    for seconds, gone in ((19.0, []), (1.0, ["never began"])):
        feed.wait(seconds)
        assert detached(feed) == gone
    feed.make(2)
    feed.ask("waits", 3)
    feed.wait(0.0)
    for seconds, gone in ((29.0, ["never began"]), (1.0, ["works", "never began"])):
        feed.wait(seconds)
        assert detached(feed) == gone


def test_what_was_made_ahead_stays_when_a_slower_one_joins():
    """Blocks are prepared one ahead: block 1 is ready when a consumer joins at 0, and is not prepared again."""
    feed = Feed(ahead=1)
    feed.join("fast")
    feed.make(0, 1)
    assert feed.core.consumers.by_name["fast"].cursor == 1
    assert feed.join("slow", asks=False) == 0
    assert feed.core.window.is_ready(1)


def test_the_cohort_is_served_first_of_which_somebody_waits_longest():
    """Consumers have been waiting at block 0 since 0 s and 10 s, and at block 20 since 5 s."""
    feed = Feed(workers=0)
    feed.join("longest", start=0)
    feed.now = 5.0
    feed.join("elsewhere", start=20)
    feed.now = 10.0
    feed.join("beside", start=0)
    assert prepared(feed.send(ev.WorkerUp("w0", 1))) == [0]


def test_one_that_is_announced_has_no_session_before_it_joins():
    feed = Feed()
    feed.send(ev.Announce("ann"))
    for session in (0, 1):
        (refused,) = feed.send(ev.Heartbeat("ann", session, 0, 0))
        assert refused.reason == f"the service has no session {session} of consumer 'ann': it left or was removed"


def test_of_what_trials_share_each_block_is_new_to_one_of_them():
    feed = Feed(credit=3)
    feed.join("a")
    feed.join("b")
    feed.make(0, 1)
    given = [(i.consumer, i.blocks, i.new) for i in kinds(feed.ask("a", 1), ev.Deliver)]
    given += [(i.consumer, i.blocks, i.new) for i in kinds(feed.ask("b", 1), ev.Deliver)]
    assert given == [("a", (1,), (1,)), ("b", (1,), ())]


# ---- epoch shuffles are persisted ----


def written_feed():
    """Feed whose coordinator persists epochs of two blocks, and its instructions after block 0 is prepared."""
    core = StagingState(StagingLimits(80, 3, Timeouts(patience_s=5.0)), 2, lambda _: 10, written={})
    core.handle(ev.WorkerUp("w", 1), 0.0)
    for session, name in enumerate("ab", 1):
        core.handle(ev.Join(name, session), 0.0)
    done = core.handle(ev.Ask("a", 1, 0, 0, 0), 0.0)
    assert kinds(done, ev.WriteEpochs) == [ev.WriteEpochs(0, {0: Shuffle(0)})]
    (task,) = kinds(done, ev.Prepare)
    return core, core.handle(ev.TaskEnded(task.task), 0.0)


def test_no_block_of_an_epoch_is_given_before_it_is_written_down_how_that_is_shuffled():
    core, done = written_feed()
    assert delivered(done) == {}
    assert "shuffle of epoch 0 is not stored" in explain.wait(core, "a")
    core.validate()
    assert delivered(core.handle(ev.EpochsWritten((0,)), 1.0)) == {"a": (0,)}


def test_the_slowest_is_not_blamed_while_an_epoch_is_still_to_be_written_down():
    core, _ = written_feed()
    core.handle(ev.EpochsWritten((0,)), 0.0)
    core.handle(ev.Ask("b", 2, 0, 0, 0), 0.0)
    core.handle(ev.TaskEnded(1), 0.0)
    core.handle(ev.Ask("a", 1, 1, 1, 1), 0.0)
    core.handle(ev.Ask("a", 1, 2, 2, 2), 0.0)
    core.handle(ev.TaskEnded(2), 0.0)
    core.handle(ev.TaskEnded(3), 0.0)
    assert core.window.is_ready(2)
    assert core.consumers.by_name["b"].cursor == 1, "it works on the blocks that it received"
    assert not [i for now in (1.0, 20.0) for i in core.handle(ev.Tick(), now) if isinstance(i, ev.Note)]
    assert len(core.consumers.cohorts) == 1
    assert delivered(core.handle(ev.EpochsWritten((1,)), 21.0)) == {"a": (2,)}


def test_a_loader_that_joins_again_at_an_epochs_end_is_no_visitor():
    """It loads a state at that position, or was removed; either way it continues."""
    feed = Feed(ahead=6, budget_blocks=10)
    start = feed.join("a", asks=False)
    for block in range(start, start + 4):
        give(feed, "a", block)
    feed.join("a", start=start + 4, asks=False)
    assert not feed.core.consumers.expects_visitors
    feed.send(ev.Leave("a", feed.session))
    assert not feed.core.consumers.expects_visitors, "it had nothing of an epoch in this session"
