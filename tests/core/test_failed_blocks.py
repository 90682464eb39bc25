"""Which block, worker or node is blamed for deaths and errors, and when a failed block is tried again."""

from staging_feeds import Feed, delivered, kinds, prepared

from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import PUT_OFF_S, VERDICT_S
from mbaas.samples.placement import BlockPart


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


def test_a_bad_block_reaches_its_consumers_as_an_error_and_the_log_and_takes_no_bytes():
    feed = Feed(ahead=1)
    feed.join("a")
    feed.ask("a", 0)
    done = feed.send(ev.TaskEnded(feed.tasks.pop(0).task, "cannot prepare x.jpg: truncated"))
    assert delivered(done) == {"a": (0,)}
    assert kinds(done, ev.Note)[0].text == "cannot prepare x.jpg: truncated"
    assert feed.core.window.blocks[0].nbytes == 0


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


def test_a_worker_that_is_stuck_is_charged_to_its_block():
    feed = Feed(workers=1, max_deaths=1, prep_s=5.0)
    feed.join("ann")
    done = feed.wait(6.0)
    assert [i.worker for i in kinds(done, ev.ReplaceWorker)] == ["w0"]
    feed.wait(VERDICT_S)
    assert feed.core.window.blocks[0].error is not None
