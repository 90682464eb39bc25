"""Blocks are made once, ahead of need, for all. An epoch has 4 blocks of 10 bytes unless a test overrides it."""

import pytest
from staging_feeds import Feed, delivered, kinds, prepared

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import StagingState
from mbaas.samples.order import Shuffle
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


def test_blocks_are_made_ahead_of_the_slowest_by_a_bounded_number():
    feed = Feed(ahead=3, credit=8)
    feed.join("fast")
    feed.join("slow", asks=False)
    assert sorted(feed.tasks) == [0, 1, 2]
    feed.make(0, 1, 2)
    feed.ask("fast", 0, want=3)
    assert prepared(feed.ask("fast", 3)) == []
    assert prepared(feed.ask("slow", 0)) == [3]


def test_limits_are_checked():
    with pytest.raises(ValueError, match="ahead_blocks must be at least 1, got 0"):
        StagingLimits(budget_bytes=1, ahead_blocks=0)


def test_heartbeats_and_ticks_that_change_nothing_lead_to_nothing():
    feed = Feed()
    feed.join("ann")
    session = feed.core.consumers.by_name["ann"].session
    for event in (ev.Heartbeat("ann", session, 0, 0), ev.Tick(), ev.Heartbeat("nobody", 1, 0, 0)):
        before = len(feed.core.window.blocks)
        assert not kinds(feed.send(event), ev.Prepare)
        assert len(feed.core.window.blocks) == before


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


def test_of_what_trials_share_each_block_is_new_to_one_of_them():
    feed = Feed(credit=3)
    feed.join("a")
    feed.join("b")
    feed.make(0, 1)
    given = [(i.consumer, i.blocks, i.new) for i in kinds(feed.ask("a", 1), ev.Deliver)]
    given += [(i.consumer, i.blocks, i.new) for i in kinds(feed.ask("b", 1), ev.Deliver)]
    assert given == [("a", (1,), (1,)), ("b", (1,), ())]


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
