"""Parts whose storage fails for a while wait without holding up workers, other parts or consumers."""

from staging_feeds import Feed, delivered, kinds, prepared

from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import PUT_OFF_S


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


def test_what_storage_does_not_give_makes_room_for_whoever_else_waits():
    feed = Feed(budget_blocks=1)
    feed.join("ann")
    feed.now = 1.0
    feed.join("ben", 20)
    feed.send(ev.PutOff(feed.tasks.pop(0).task, "storage is away"))
    assert sorted(feed.core.window.blocks) == [20]
    assert delivered(feed.finish(20)) == {"ben": (20,)}
