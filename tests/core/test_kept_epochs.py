"""A feed whose epochs are all the same prepares each block once and keeps it, and no consumer waits for another."""

import pytest
from staging_feeds import Feed, delivered, kinds

from mbaas.core.demand import DemandEstimator, Look
from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import VERDICT_S
from mbaas.core.staging.transitions import BlockState
from mbaas.samples.placement import BlockPart
from mbaas.wire.consumers import ConsumerReport

EPOCH = 4


def kept(**options):
    return Feed(keeps_all=True, budget_blocks=EPOCH, blocks_per_epoch=EPOCH, ahead=2, **options)


def read(feed, name, cursor, blocks=1):
    """Request blocks one by one, prepare the missing ones, and return the delivered blocks."""
    given = []
    for block in range(cursor, cursor + blocks):
        done = feed.ask(name, block)
        while feed.core.consumers.by_name[name].waiting:
            done = feed.finish(min(feed.tasks))
        given += [b for i in done if isinstance(i, ev.Deliver) and i.consumer == name for b in i.blocks]
    return given


def test_each_block_is_made_once_for_all_consumers_and_all_epochs():
    feed, made = kept(), []
    feed.send, plain = (
        lambda event: [i for i in plain(event) if not isinstance(i, ev.Prepare) or made.append(i) or True],
        feed.send,
    )
    fast, slow = feed.join("fast", asks=False), feed.join("slow", asks=False)
    assert read(feed, "fast", fast, 3 * EPOCH) == list(range(fast, fast + 3 * EPOCH))
    assert read(feed, "slow", slow, EPOCH) == list(range(slow, slow + EPOCH))
    assert sorted(task.block for task in made) == [0, 1, 2, 3]


def test_one_that_stands_still_holds_up_nobody():
    """One joined and requests nothing; the other requested one block and never moves on."""
    feed = kept()
    feed.join("unread", asks=False)
    first = feed.join("stuck")
    feed.make(first % EPOCH)
    start = feed.join("quick", asks=False)
    assert read(feed, "quick", start, 5 * EPOCH) == list(range(start, start + 5 * EPOCH))
    feed.wait(25.0)
    feed.wait(5.0)
    assert not [c for c in feed.core.consumers.by_name.values() if c.apart], "no consumer waits, so none is moved"


def test_what_is_kept_outlives_its_consumers():
    feed = kept()
    start = feed.join("first", asks=False)
    read(feed, "first", start, EPOCH)
    feed.send(ev.Leave("first", feed.session))
    feed.wait(100.0)
    start = feed.join("second", asks=False)
    for block in range(start, start + EPOCH):
        given = [i.blocks for i in feed.ask("second", block) if isinstance(i, ev.Deliver)]
        assert given == [(block,)], "it does not wait"
    assert not feed.tasks


def test_only_what_lay_on_a_dead_node_is_made_again():
    feed = kept(workers=0, cut=lambda block, _: (BlockPart("ab"[block % 2], 1),))
    for node in "ab":
        feed.send(ev.WorkerUp(f"w-{node}", 1, node))
    start = feed.join("c", asks=False)
    read(feed, "c", start, EPOCH)
    assert not feed.tasks
    feed.send(ev.NodeDown("a", "killed"))
    assert read(feed, "c", start + EPOCH, EPOCH) == list(range(start + EPOCH, start + 2 * EPOCH))
    assert [feed.core.window.blocks[b].parts[0].task for b in (1, 3)] == [1, 3], "these were not lost"
    assert [feed.core.window.blocks[b].parts[0].task for b in (0, 2)] == [4, 5]


def test_a_block_over_which_workers_died_is_tried_anew_in_the_next_epoch():
    """The cause may have passed. A feed with differing epochs also prepares the next epoch's blocks again."""
    feed = kept(max_deaths=1)
    start = feed.join("c")
    feed.send(ev.WorkerDown("w0", "killed"))
    feed.wait(VERDICT_S)
    block = feed.core.window.blocks[start % EPOCH]
    assert block.state is BlockState.FAILED
    feed.tasks.clear()
    feed.send(ev.WorkerUp("w1", 1))
    read(feed, "c", start + 1, EPOCH - 1)
    assert feed.core.window.blocks[start % EPOCH] is block, "not before that: another try may cost another worker"
    assert read(feed, "c", start + EPOCH) == [start + EPOCH]
    assert feed.core.window.blocks[start % EPOCH].error is None


def test_a_block_that_is_made_anew_has_all_of_its_tries_again():
    """Three workers died over it in the first epoch, and another one dies in the second."""
    feed = kept(max_deaths=3)
    start = feed.join("c")
    for death in range(3):
        feed.send(ev.WorkerDown(feed.tasks.pop(0).worker, "killed"))
        feed.send(ev.WorkerUp(f"w{death + 1}", 1))
    feed.wait(VERDICT_S)
    assert feed.core.window.blocks[0].state is BlockState.FAILED
    read(feed, "c", start + 1, EPOCH - 1)
    feed.ask("c", start + EPOCH)
    feed.send(ev.WorkerDown(feed.tasks.pop(0).worker, "killed"))
    assert feed.core.window.blocks[0].state is BlockState.GRANTED
    feed.send(ev.WorkerUp("w4", 1))
    assert [i.blocks for i in feed.finish(0) if isinstance(i, ev.Deliver)] == [(start + EPOCH,)]


def test_a_block_with_a_bad_sample_is_tried_anew_in_the_next_epoch():
    feed = kept()
    start = feed.join("c")
    feed.send(ev.TaskEnded(feed.tasks.pop(0).task, "a sample is bad"))
    read(feed, "c", start + 1, EPOCH - 1)
    assert feed.core.window.blocks[0].error == "a sample is bad"
    assert read(feed, "c", start + EPOCH) == [start + EPOCH]
    assert feed.core.window.blocks[0].error is None


def test_a_part_that_cannot_be_read_is_made_again_in_any_epoch():
    feed = kept()
    start = feed.join("c", asks=False)
    read(feed, "c", start, EPOCH + 2)
    task = feed.core.window.blocks[1].parts[0].task
    feed.send(ev.UnreadablePart(start + EPOCH + 1, 0, task))
    assert read(feed, "c", start + EPOCH + 1) == [start + EPOCH + 1]
    assert feed.core.window.blocks[1].parts[0].task > task


def test_who_waits_in_a_later_epoch_is_told_what_for():
    feed = kept(workers=0)
    feed.send(ev.WorkerUp("w-a", 1, "a"))
    start = feed.join("c", asks=False)
    read(feed, "c", start, EPOCH)
    feed.send(ev.NodeDown("a", "killed"))
    feed.send(ev.WorkerUp("w-b", 1, "b"))
    feed.ask("c", start + EPOCH)
    assert explain.wait(feed.core, "c") == f"block {start + EPOCH} is being prepared by w-b"


def test_there_is_no_demand_once_all_is_kept():
    feed, estimator = kept(), DemandEstimator()
    start = feed.join("c", asks=False)
    read(feed, "c", start, EPOCH - 1)
    assert not feed.core.has_all
    read(feed, "c", start + EPOCH - 1)
    assert feed.core.has_all
    demands = []
    for now in (0.0, 10.0):
        report = ConsumerReport(samples=int(now) * 100, step_s=now)
        for has_all in (False, True):
            seen = estimator.observe(
                Look(now, {"c": report}, now, now), feed.core.consumers,
                workers=1, pending=0, reserved=1, most=1, has_all=has_all,
            )  # fmt: skip
            demands.append(seen and seen.demand_per_s)
    assert demands == [None, None, pytest.approx(100.0), 0.0]


# ---- blocks that lack samples ----


def lack(feed, block):
    """Finish a block with one sample left out."""
    return feed.send(ev.TaskEnded(feed.tasks.pop(block).task, lacks=True))


def fill(feed, name, start, *lacking):
    """Read the consumer's first epoch; the `lacking` blocks each lack a sample."""
    for block in range(start, start + EPOCH):
        feed.ask(name, block)
        while feed.core.consumers.by_name[name].waiting:
            made = min(feed.tasks)
            lack(feed, made) if made in lacking else feed.finish(made)


def test_a_block_that_lacks_samples_is_made_anew_once_in_each_epoch_before_its_consumer_asks():
    feed = kept()
    start = feed.join("c", asks=False)
    fill(feed, "c", start, 2)
    assert feed.core.has_all, "the incomplete block stays for the rest of its first epoch"
    dropped = [i for i in feed.ask("c", start + EPOCH) if isinstance(i, ev.DropBlock)]
    assert dropped == [ev.DropBlock(2, anew=True)], "block 2 is two blocks after the delivered one, within prep's lead"
    assert [*feed.tasks] == [2]
    lack(feed, 2)
    assert delivered(feed.ask("c", start + EPOCH + 1)) == {"c": (start + EPOCH + 1,)}
    assert read(feed, "c", start + EPOCH + 2, 3) == list(range(start + EPOCH + 2, start + 2 * EPOCH + 1)), "still bad"
    assert [*feed.tasks] == [2], "and tried in the next epoch"
    feed.finish(2)
    assert read(feed, "c", start + 2 * EPOCH + 1, 3 * EPOCH)
    assert (feed.core.window.lacking, feed.core.has_all) == (set(), True), "it is whole, and kept"


def test_a_block_that_lacks_samples_is_made_anew_also_for_a_consumer_that_asks_for_many_at_once():
    feed = kept()
    start = feed.join("c", asks=False)
    fill(feed, "c", start, 2)
    done = feed.ask("c", start + EPOCH, want=EPOCH)
    assert delivered(done) == {"c": (start + EPOCH, start + EPOCH + 1)}, "up to the block that is prepared again"
    assert [*feed.tasks] == [2]


def test_a_block_that_lacks_samples_is_made_anew_also_while_another_one_is_in_the_making():
    """Block 2 became unreadable, so it is prepared again anyway; block 3 also lacks a sample and follows."""
    feed = kept(credit=2)
    start = feed.join("c", asks=False)
    fill(feed, "c", start, 2, 3)
    feed.send(ev.UnreadablePart(2, 0, feed.core.window.blocks[2].parts[0].task))
    feed.ask("c", start + EPOCH)
    assert [*feed.tasks] == [2]
    assert kinds(feed.ask("c", start + EPOCH + 1), ev.DropBlock) == [ev.DropBlock(3, anew=True)]
    assert [*feed.tasks] == [2, 3]


def test_a_block_that_lacks_samples_stays_while_somebody_looks_at_it():
    feed = kept()
    start = feed.join("c", asks=False)
    feed.join("looks", asks=False)
    fill(feed, "c", start, 2)
    for block in range(start, start + 3):
        feed.ask("looks", block)
    session = feed.core.consumers.by_name["looks"].session
    read(feed, "c", start + EPOCH, 2)
    assert not feed.tasks
    feed.send(ev.Heartbeat("looks", session, released=start + 3, done=start + 3))
    assert [*feed.tasks] == [2]


def test_all_ranks_of_a_trial_get_a_block_with_the_same_samples_left_out():
    """One rank is at the beginning of its next epoch; the other has yet to receive the block in the previous one."""
    feed = kept()
    for rank in range(2):
        feed.session += 1
        feed.send(ev.Join(f"t[{rank}]", feed.session, 0, trial="t"))
    fill(feed, "t[0]", 0, 2)
    for block in range(2):
        feed.ask("t[1]", block)
    read(feed, "t[0]", EPOCH, 2)
    assert not feed.tasks
    for block in (2, 3):
        given = [i.blocks for i in feed.ask("t[1]", block) if isinstance(i, ev.Deliver)]
        assert given == [(block,)]
    assert [*feed.tasks] == [2]


def test_a_block_that_lacks_samples_and_that_nobody_had_yet_is_given_as_it_is():
    """It was prepared ahead, and is first delivered in a later epoch, whose samples are fixed from then on."""
    feed = kept()
    feed.join("c", start=0)
    feed.finish(0)
    feed.ask("c", 1)
    feed.finish(1)
    lack(feed, 2)
    feed.send(ev.Leave("c"))
    start = feed.join("later", asks=False)
    assert start == EPOCH
    given = read(feed, "later", start, EPOCH)
    assert given == list(range(start, start + EPOCH))
    assert (feed.core.window.lacking, feed.core.window.blocks[2].given_as) == ({2}, start + 2)
