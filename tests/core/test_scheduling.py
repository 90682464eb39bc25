"""Each part is prepared on the node that holds its samples, and other nodes take over only when necessary."""

from __future__ import annotations

import time
from collections import Counter

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.tasks import TaskTable
from mbaas.core.staging.transitions import PartState
from mbaas.core.story import Stories
from mbaas.samples.placement import BlockPart


class Feed:
    """Core whose blocks have a part on each node of ``placement``, or on the nodes that a dict gives for their number.

    ``workers`` are (name, credit, node).
    """

    def __init__(self, *placement, workers=(), ahead=3, budget_blocks=8):
        limits = StagingLimits(budget_bytes=10 * budget_blocks, ahead_blocks=ahead)
        of = placement[0].__getitem__ if isinstance(placement[0], dict) else lambda block: placement
        self.core = StagingState(
            limits, 4, lambda block: 10, lambda block, _: [BlockPart(home, 1) for home in of(block)]
        )
        self.orders = []
        for worker in workers:
            self.send(ev.WorkerUp(*worker))
        self.send(ev.Join("me", 1))
        self.ask(0)

    def send(self, event):
        done = self.core.handle(event, 0.0)
        self.core.validate()
        self.orders += [i for i in done if isinstance(i, ev.Prepare)]
        return done

    def ask(self, cursor):
        return self.send(ev.Ask("me", 1, cursor=cursor, released=cursor, done=cursor))

    def finish(self, order):
        self.orders.remove(order)
        return self.send(ev.TaskEnded(order.task))

    def given_to(self, worker):
        return [(order.block, order.block_part.home) for order in self.orders if order.worker == worker]


def test_each_worker_makes_the_parts_of_its_own_node():
    feed = Feed("a", "b", workers=[("wa", 2, "a"), ("wb", 2, "b")])
    assert feed.given_to("wa") == [(0, "a"), (1, "a")]
    assert feed.given_to("wb") == [(0, "b"), (1, "b")]


def test_every_worker_of_a_node_has_something_before_one_has_its_second_task():
    feed = Feed("a", ahead=3, workers=[("w0", 2, "a"), ("w1", 2, "a")])
    assert [feed.given_to(name) for name in ("w0", "w1")] == [[(0, "a"), (2, "a")], [(1, "a")]]


def test_a_block_is_handed_out_when_all_its_parts_are_there():
    feed = Feed("a", "b", workers=[("wa", 1, "a"), ("wb", 1, "b")])
    first, second = feed.orders[:2]
    assert not any(isinstance(i, ev.Deliver) for i in feed.finish(first))
    assert any(isinstance(i, ev.Deliver) and i.blocks == (0,) for i in feed.finish(second))


def test_a_faster_node_runs_ahead_before_it_takes_anything_over():
    feed = Feed("a", "b", ahead=3, workers=[("slow", 1, "a"), ("fast", 1, "b")])
    for block in range(3):
        assert feed.given_to("fast") == [(block, "b")]
        feed.finish(next(order for order in feed.orders if order.worker == "fast"))
    assert feed.given_to("slow") == [(0, "a")]
    assert feed.given_to("fast") == [(1, "a")], "the window ends: the most urgent part not yet begun"


def test_the_part_is_taken_over_that_is_needed_soonest():
    """The only worker of node a prepares block 0; one consumer is at block 0 and another at block 20."""
    feed = Feed("a", workers=[("home", 1, "a")])
    feed.send(ev.Join("far", 2, 20))
    feed.send(ev.Ask("far", 2, cursor=20, released=20, done=20))
    feed.send(ev.WorkerUp("idle", 1, "b"))
    assert feed.given_to("home") == [(0, "a")]
    assert feed.given_to("idle") == [(20, "a")]


def test_nothing_is_taken_over_while_the_home_has_credit_left():
    feed = Feed("a", ahead=2, workers=[("home", 2, "a"), ("idle", 2, "b")])
    assert feed.given_to("home") == [(0, "a"), (1, "a")]
    assert feed.given_to("idle") == []


def test_a_node_makes_its_part_of_a_block_that_another_one_was_the_first_to_need():
    """b starts block 1 right after its part of block 0, and a had no task until then."""
    feed = Feed({0: "b", 1: "ab"}, ahead=2, workers=[("wa", 1, "a"), ("wb", 2, "b")])
    assert feed.given_to("wb") == [(0, "b"), (1, "b")]
    assert feed.given_to("wa") == [(1, "a")]


def test_parts_of_a_node_without_workers_are_anybodys():
    feed = Feed("a", "gone", workers=[("wa", 3, "a")])
    assert feed.given_to("wa") == [(0, "a"), (0, "gone"), (1, "a")]


def test_a_node_that_dies_loses_what_lay_there_and_it_is_made_again():
    feed = Feed("a", "b", workers=[("wa", 1, "a"), ("wb", 1, "b")])
    for order in list(feed.orders):
        feed.finish(order)
    assert feed.core.window.blocks[0].is_ready
    feed.send(ev.NodeDown("b", "killed"))
    states = [part.state for part in feed.core.window.blocks[0].parts]
    assert PartState.READY in states
    assert PartState.READY not in states[1:], "b's part is lost"
    feed.orders = [order for order in feed.orders if order.worker == "wa"]
    feed.ask(0)
    while not feed.core.window.is_ready(0):
        feed.finish(feed.orders[0])
    assert feed.core.window.blocks[0].parts[1].node == "a"


def test_the_death_of_a_node_is_not_blamed_on_the_blocks_that_were_made_there():
    feed = Feed("a")
    for death in range(5):
        feed.send(ev.WorkerUp(f"w{death}", 1, "a"))
        feed.send(ev.NodeDown("a", "killed"))
    assert feed.core.failed is None


def test_a_part_that_a_consumer_cannot_read_is_made_again_once():
    feed = Feed("a", workers=[("wa", 1, "a")])
    first = feed.orders[0]
    feed.finish(first)
    feed.send(ev.UnreadablePart(0, 0, first.task))
    feed.ask(0)
    while not feed.core.window.is_ready(0):
        feed.finish(feed.orders[0])
    again = feed.core.window.blocks[0].parts[0].task
    assert again != first.task
    feed.send(ev.UnreadablePart(0, 0, first.task))
    assert feed.core.window.is_ready(0), "a late report of the first loss"


def test_a_worker_that_leaves_finishes_and_gets_nothing_new():
    feed = Feed("a", workers=[("stays", 1, "b"), ("goes", 2, "a")])
    before = feed.given_to("goes")
    feed.send(ev.WorkerLeaves("goes"))
    assert feed.given_to("goes") == before
    mine = [order for order in feed.orders if order.worker == "goes"]
    done = [feed.finish(order) for order in mine]
    assert [ev.ReleaseWorker("goes") in instructions for instructions in done] == [False] * (len(mine) - 1) + [True]
    assert feed.given_to("stays"), "its parts are free for other workers"


def test_an_event_of_a_large_feed_takes_milliseconds():
    """64 nodes with 8 mostly idle workers each: 7 ms. Checking each worker in turn took 9 s."""
    nodes = [f"n{i}" for i in range(64)]
    feed = Feed(*nodes, ahead=18, workers=[(f"{node}.{i}", 2, node) for node in nodes for i in range(8)])
    for order in [order for order in feed.orders if order.block == 0]:
        feed.finish(order)
    began = time.thread_time()
    feed.core.handle(ev.Ask("me", 1, cursor=1, released=1, done=1), 0.0)
    assert time.thread_time() - began < 1.0
    assert Counter(order.block for order in feed.orders) == dict.fromkeys(range(1, 8), 64), "a part for each node"


def test_a_death_is_charged_to_the_block_that_was_being_made_and_forgiven_when_the_node_died():
    tasks = TaskTable(Stories())
    for name, node in (("w0", "a"), ("w1", "b")):
        tasks.worker_up(name, 2, node)
        for block in (1, 2):
            tasks.assign(tasks.workers[name], block, 0, 0.0)
    assert tasks.makers(1) == ["w0", "w1"]
    tasks.charge(tasks.worker_down("w0")[0], "a", "killed", 1.0)
    assert tasks.makers(2) == ["w1"]
    tasks.charge(tasks.worker_down("w1")[0], "b", "killed", 2.0)
    assert tasks.deaths == {1: [(0, "a", "killed", 1.0), (0, "b", "killed", 2.0)]}
    assert tasks.forgive("c") == [], "no worker died there"
    assert tasks.forgive("a") == [1]
    assert tasks.deaths == {1: [(0, "b", "killed", 2.0)]}
    assert tasks.forgive("b") == [1]
    assert (tasks.deaths, tasks.forgive("b")) == ({}, [])


def test_what_is_told_of_a_worker_that_is_gone_or_leaves_already_changes_nothing():
    """The same death may be reported twice."""
    tasks = TaskTable(Stories())
    tasks.worker_up("w0", 1, "a")
    task = tasks.assign(tasks.workers["w0"], 3, 0, 0.0)
    tasks.worker_leaves("w0")
    tasks.worker_leaves("w0")
    assert tasks.workers["w0"].leaving
    assert tasks.worker_down("w0") == [task]
    tasks.worker_leaves("w0")
    assert tasks.worker_down("w0") == []
    assert tasks.finish(task.number, 1.0) is None


def test_idle_is_who_may_get_a_task_and_has_none():
    tasks = TaskTable(Stories())
    tasks.worker_up("leaves", 1, "a")
    tasks.worker_leaves("leaves")
    tasks.worker_up("has one", 2, "a")
    tasks.assign(tasks.workers["has one"], 0, 0, 0.0)
    assert tasks.idle() is None
    tasks.worker_up("free", 1, "b")
    assert tasks.idle() is tasks.workers["free"]


def test_a_node_counts_until_all_of_its_workers_leave():
    tasks = TaskTable(Stories())
    for name, node in (("w0", "b"), ("w1", "a"), ("w2", "a")):
        tasks.worker_up(name, 1, node)
    tasks.worker_leaves("w1")
    assert tasks.nodes() == ["b", "a"]
    tasks.worker_leaves("w2")
    assert tasks.nodes() == ["b"]


def test_the_least_busy_worker_of_a_node_comes_first():
    tasks = TaskTable(Stories())
    for number in range(3):
        tasks.worker_up(f"w{number}", 2, "a")
    assert [worker.name for worker in tasks.with_credit("a")] == ["w0", "w1", "w2"]
    for name in ("w1", "w0", "w0"):
        tasks.assign(tasks.workers[name], 0, 0, 0.0)
    assert [worker.name for worker in tasks.with_credit("a")] == ["w2", "w1"], "w0 has all that it may have"


def test_a_part_that_somebody_survived_is_not_to_blame():
    """Another part of its block may still be to blame."""
    tasks = TaskTable(Stories())
    for name in ("dies", "dies, too", "survives", "makes another"):
        tasks.worker_up(name, 1, "a")
    tasks.assign(tasks.workers["makes another"], 2, 0, 0.0)
    for part, name in enumerate(("dies", "dies, too")):
        tasks.assign(tasks.workers[name], 1, part, 0.0)
        tasks.charge(tasks.worker_down(name)[0], "a", "killed", 1.0)
    for part in range(2):
        assert [death.part for death in tasks.deaths[1]] == [*range(part, 2)]
        again = tasks.assign(tasks.workers["survives"], 1, part, 2.0)
        assert tasks.makers(1) == ["survives"]
        tasks.finish(again.number, 3.0)
    assert (tasks.makers(1), tasks.deaths) == ([], {})


def test_the_stories_of_workers_that_are_gone_are_bounded():
    stories = Stories(past=1)
    tasks = TaskTable(stories)
    for name in ("first", "last"):
        tasks.worker_up(name, 1, "a")
        tasks.worker_down(name)
    assert stories.names() == ["last"]


def test_a_tasks_time_begins_when_it_is_the_first_of_its_worker():
    tasks = TaskTable(Stories())
    tasks.worker_up("w", 2, "a")
    worker = tasks.workers["w"]
    first = tasks.assign(worker, 0, 0, 3.0)
    tasks.assign(worker, 1, 0, 5.0)
    assert tasks.overdue(8.0, 5.0) == []
    assert tasks.overdue(8.1, 5.0) == [worker]
    tasks.finish(first.number, 8.0)
    assert tasks.overdue(13.0, 5.0) == []
    assert tasks.overdue(13.1, 5.0) == [worker]


def test_only_errors_in_a_row_count_against_a_worker():
    tasks = TaskTable(Stories())
    tasks.worker_up("w", 3, "a")
    worker = tasks.workers["w"]
    for ended, failures in ((tasks.fail, 1), (tasks.fail, 2), (tasks.finish, 0), (tasks.fail, 1)):
        ended(tasks.assign(worker, 0, 0, 0.0).number, 1.0)
        assert worker.failures == failures


def test_of_two_cohorts_the_one_that_waits_longer_is_served_first_whoever_joined_first():
    core = StagingState(StagingLimits(budget_bytes=100, ahead_blocks=1), 4, lambda block: 10)
    core.handle(ev.Join("early", 1, 40), 0.0)
    core.handle(ev.Join("late", 2, 80), 1.0)
    for now, name, session, cursor in ((2.0, "late", 2, 80), (3.0, "early", 1, 40)):
        core.handle(ev.Ask(name, session, cursor=cursor, released=cursor, done=cursor), now)
    said = core.handle(ev.WorkerUp("w", 1, "a"), 4.0)
    assert [each.block for each in said if isinstance(each, ev.Prepare)] == [80]


def test_a_word_without_a_number_is_not_taken_for_one_that_came_twice():
    """A consumer that goes back has released the later blocks that it was given."""
    core = StagingState(StagingLimits(budget_bytes=100, ahead_blocks=3), 4, lambda block: 10)
    core.handle(ev.WorkerUp("w", 3, "a"), 0.0)
    core.handle(ev.Join("me", 1), 0.0)
    said = core.handle(ev.Ask("me", 1, cursor=0, released=0, done=0, want=1), 0.0)
    for order in [each for each in said if isinstance(each, ev.Prepare)]:
        core.handle(ev.TaskEnded(order.task), 0.0)
    core.handle(ev.Ask("me", 1, cursor=1, released=0, done=0, want=2), 0.0)
    me = core.consumers.by_name["me"]
    assert (me.cursor, me.holds(2)) == (3, True)
    core.handle(ev.Ask("me", 1, cursor=1, released=0, done=0, want=1), 0.0)
    assert (me.cursor, me.holds(1), me.holds(2)) == (2, True, False)
