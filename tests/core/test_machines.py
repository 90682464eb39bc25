"""Machines and their caches: given back, given up, dead, or too small for staged blocks."""

from supervised_feeds import Feed, full

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.homes import KEEP_HOME_S
from mbaas.core.cluster.supervised import CACHE_START_S, RETRY_S, WorkerPhase
from mbaas.core.cluster.supervisor import KEPT_DEAD, PROBE_S, VACATE_S
from mbaas.core.staging import events as staging
from mbaas.model.scaling import SETTLED_S


def test_a_cache_that_is_silent_while_the_coordinator_is_restarted_is_started_anew():
    feed = Feed(workers={"prep-0": ev.FoundWorker("a")}, caches={("a", 3): False}, version=7, is_restart=True)
    assert feed.only(ev.ProbeCache) == ev.ProbeCache("a", 3)
    feed.send(ev.CacheProbed("a", 3, answers=False))
    assert feed.only(ev.EndCache) == ev.EndCache("a", 3)
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    feed.wait(RETRY_S)
    assert feed.only(ev.StartCache).generation > 3, "the old one's name may still be taken"


def vacating(feed: Feed) -> str:
    """Make a feed on two machines vacate one of the two, and return that node."""
    feed.open("a", "b")
    feed.send(ev.Scale(1))
    (leaves,) = feed.told(staging.WorkerLeaves)
    node = feed.supervisor.workers[leaves.worker].node
    feed.move_homes()
    feed.send(ev.WorkerDone(leaves.worker))
    assert feed.only(ev.VacateNode).node == node
    return node


def test_a_machine_without_workers_is_free_when_the_others_have_what_it_kept():
    feed = Feed(own=2)
    node = vacating(feed)
    assert not feed.told(staging.NodeLeaves), "blocks staged there stay, because the machine does"
    feed.send(ev.NodeVacated(node))
    assert feed.only(ev.EndCache).node == node
    assert not feed.send(ev.NodeVacated(node)), "a repeated event"


def test_a_machine_whose_samples_come_slowly_stays_as_long_as_they_come():
    """Moving the samples takes 40 minutes, at 100 s for each answer."""
    feed = Feed(own=2)
    node = vacating(feed)
    for _ in range(24):
        assert not feed.wait(100.0)
        feed.send(ev.NodeVacated(node, samples=1000, left=5))
        assert feed.only(ev.VacateNode).node == node
        assert not feed.kinds(ev.EndCache)
    feed.send(ev.NodeVacated(node, samples=5, left=0))
    assert feed.only(ev.EndCache).node == node


def test_a_machine_of_whose_samples_none_comes_any_more_is_given_up():
    """For example, the storage that the other machines read from hangs, so they make no progress."""
    feed = Feed(own=2)
    node = vacating(feed)
    feed.send(ev.NodeVacated(node, samples=0, left=5))
    assert feed.only(ev.EndCache).node == node


def test_a_cache_of_which_nothing_is_heard_is_started_anew():
    feed = Feed()
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    first = feed.only(ev.StartCache)
    feed.wait(CACHE_START_S - 1)
    assert not feed.kinds(ev.EndCache)
    feed.wait(1.0)
    assert feed.only(ev.EndCache) == ev.EndCache("a", first.generation)
    feed.wait(RETRY_S)
    assert feed.only(ev.StartCache).generation > first.generation


def test_of_several_caches_on_a_machine_the_youngest_goes_on_and_the_others_are_ended():
    """Each older cache was given up, and the instruction to end it was lost with its coordinator."""
    caches = {("a", 3): True, ("b", 4): True, ("a", 10): False, ("a", 9): True}
    feed = Feed(workers={"prep-0": ev.FoundWorker("a")}, caches=caches, is_restart=True)
    assert {(end.node, end.generation) for end in feed.kinds(ev.EndCache)} == {("a", 3), ("a", 9)}
    assert {node: cache.generation for node, cache in feed.supervisor.caches.items()} == {"a": 10, "b": 4}
    assert feed.only(ev.ProbeCache) == ev.ProbeCache("a", 10), "that it is silent shows later"


def test_a_cache_that_does_not_start_is_tried_again_after_a_pause():
    feed = Feed()
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    first = feed.only(ev.StartCache)
    feed.send(ev.CacheFailed("a", first.generation, "no memory"))
    assert feed.only(ev.EndCache) == ev.EndCache("a", first.generation)
    assert "the cache of node a did not start, it is tried again: no memory" in feed.only(ev.Note).text
    feed.wait(RETRY_S / 2)
    assert not feed.kinds(ev.StartCache)
    feed.wait(RETRY_S / 2)
    second = feed.only(ev.StartCache)
    feed.send(ev.CacheStarted("a", first.generation))
    assert feed.said == [ev.EndCache("a", first.generation)], "it started too late: it has been replaced"
    assert not feed.send(ev.CacheFailed("a", first.generation, "late"))
    feed.send(ev.CacheStarted("a", second.generation))
    assert not feed.send(ev.CacheFailed("a", second.generation, "late")), "it is up"


def test_a_machine_to_which_a_worker_comes_back_is_not_given_up():
    feed = Feed(own=2)
    node = vacating(feed)
    feed.send(ev.Scale(2))
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, node))
    assert feed.only(ev.MovePlacement).weights.keys() == {"a", "b"}
    assert not feed.send(ev.NodeVacated(node))


def test_a_machine_whose_cache_says_nothing_after_a_worker_died_is_given_up_with_all_that_runs_there():
    feed = Feed(own=2)
    feed.open("a", "a")
    dead, other = feed.supervisor.workers
    feed.send(ev.WorkerDied(dead, "signal 9"))
    feed.now += PROBE_S - 1
    assert not feed.kinds(ev.EndCache)
    feed.wait(0.0)
    assert not feed.kinds(ev.EndCache)
    feed.wait(1.0)
    assert feed.only(ev.EndCache).node == "a"
    assert other in [end.worker for end in feed.kinds(ev.EndWorker)]
    assert [down.blame for down in feed.told(staging.WorkerDown)] == [False]


def test_a_machine_that_dies_takes_only_its_own_workers_along():
    feed = Feed(own=2)
    feed.open("a", "b")
    dead = next(name for name, worker in feed.supervisor.workers.items() if worker.node == "a")
    feed.send(ev.NodesDead(frozenset("a")))
    assert [down.worker for down in feed.told(staging.WorkerDown)] == [dead]


def test_the_last_thousand_machines_that_died_are_known():
    """A worker may still answer late from a dead machine."""
    feed = Feed()
    (start,) = feed.kinds(ev.StartWorker)
    for number in range(KEPT_DEAD + 2):
        feed.send(ev.NodesDead(frozenset({f"n{number}"})))
    assert [*feed.supervisor.dead] == [f"n{number}" for number in range(2, KEPT_DEAD + 2)]
    feed.send(ev.WorkerStarted(start.worker, "n2"))
    assert feed.only(ev.EndWorker).worker == start.worker


def test_until_when_no_cache_is_opened_is_forgotten_when_it_is_over():
    feed = Feed()
    for number in range(5):
        feed.now += RETRY_S
        feed.open(f"n{number}")
        feed.send(ev.NodesDead(frozenset({f"n{number}"})))
        assert [*feed.supervisor._open_after] == [f"n{number}"]


def test_a_machine_that_is_not_needed_is_given_up_also_when_the_others_never_say_that_they_have_what_it_kept():
    feed = Feed(own=2)
    node = vacating(feed)
    assert not feed.wait(VACATE_S - 1)
    feed.wait(1.0)
    assert feed.only(ev.EndCache).node == node


class Crowded(Feed):
    """Feed with a staging budget of 40 bytes."""

    def __init__(self, own=1, **begin):
        super().__init__(own, staging_bytes=40, **begin)

    def come(self, node, room_bytes):
        """Bring up an awaited worker and a cache on a node; return the worker's name."""
        name = next(name for name, each in self.supervisor.workers.items() if each.phase is WorkerPhase.STARTING)
        self.send(ev.WorkerStarted(name, node))
        self.send(ev.CacheStarted(node, self.only(ev.StartCache).generation, room_bytes))
        return name


def test_a_machine_without_room_for_what_is_staged_gets_no_parts_while_another_has_it():
    feed = Crowded(own=2)
    feed.come("roomy", 40)
    assert feed.move_homes().weights.keys() == {"roomy"}
    small = feed.come("small", 39)
    (note,) = feed.kinds(ev.Note)
    assert "object store has room for 39 B of prepared samples, and up to 40 B may be staged" in note.text
    assert not feed.kinds(ev.MovePlacement)
    feed.wait(KEEP_HOME_S)
    assert not feed.said, "its worker gets no messages and no work, and the feed does not wait for it"
    assert feed.supervisor.workers[small].phase is WorkerPhase.BRIEFING
    assert feed.supervisor.told_waits(feed.now) == ()
    feed.send(ev.Scale(1))
    assert feed.only(ev.EndWorker).worker == small, "it can be spared best"


def test_machines_without_room_do_until_one_with_room_comes():
    feed = Crowded(own=2)
    first = feed.come("small", 39)
    assert feed.move_homes().weights.keys() == {"small"}
    assert feed.supervisor.workers[first].phase is WorkerPhase.WORKING, "better than standing still"
    second = feed.come("roomy", 40)
    assert feed.move_homes().weights.keys() == {"roomy"}
    (down,) = feed.told(staging.WorkerDown)
    assert (down.worker, down.blame) == (first, False)
    assert [up.worker for up in feed.told(staging.WorkerUp)] == [second]
    feed.send(ev.NodesDead(frozenset({"roomy"})))
    assert feed.move_homes().weights.keys() == {"small"}
    feed.send(ev.WorkerBriefed(first, feed.supervisor.homes.current.version))
    assert feed.supervisor.workers[first].phase is WorkerPhase.WORKING


def test_room_is_known_of_caches_that_are_there_when_the_coordinator_begins():
    found = {f"prep-{n}": ev.FoundWorker(node) for n, node in enumerate(("roomy", "small"))}
    caches = {("roomy", 1): True, ("small", 2): True}
    feed = Crowded(2, workers=found, caches=caches, version=7, is_restart=True, rooms={"roomy": 40, "small": 39})
    assert feed.move_homes().weights.keys() == {"roomy"}


def leave(feed):
    """Complete the departure of leaving workers; return their nodes."""
    leaving = [told.worker for told in feed.told(staging.WorkerLeaves)]
    nodes = [feed.supervisor.workers[name].node for name in leaving]
    for name in leaving:
        feed.send(ev.WorkerDone(name))
    return nodes


def test_a_machine_is_given_back_when_the_others_have_room_for_what_it_keeps():
    """First all three caches are full. Then a caches 50 bytes, and b and c have 50 + 20 bytes free."""
    feed = Feed(own=3)
    feed.open("a", "b", "c")
    feed.send(full("a", "b", "c"))
    feed.send(ev.Scale(2))
    assert leave(feed) == []
    (note,) = feed.kinds(ev.Note)
    assert "keeping 1 idle prep worker: no other node has room" in note.text
    feed.send(full("a", "b", "c"))
    assert not feed.kinds(ev.Note), "it is reported once"
    feed.send(ev.CachesMeasured({"a": (50, 100), "b": (50, 100), "c": (80, 100)}))
    feed.wait(SETTLED_S)
    move = feed.only(ev.MovePlacement)
    assert leave(feed) == ["a"]
    feed.send(ev.PlacementMoved(move.version, move.workers))
    assert feed.only(ev.VacateNode).node == "a", "its samples move before it is released"
    assert feed.supervisor.wanted == feed.supervisor.staying == 2


def test_machines_that_keep_what_nobody_has_room_for_give_all_workers_but_one():
    feed = Feed(own=5)
    feed.open("a", "a", "a", "b", "b")
    feed.send(full("a", "b"))
    feed.send(ev.Scale(1))
    assert leave(feed) == ["a", "b", "a"]
    assert feed.supervisor.staying == 2
    feed.send(ev.Scale(4))
    assert len(feed.kinds(ev.StartWorker)) == 2, "the worker that was kept is one of the four"


def test_while_caches_fill_no_machine_is_given_back():
    """A cache with room now may need that room for samples that it has yet to cache."""
    feed = Feed(own=2)
    feed.open("a", "b")
    for part in range(4):
        feed.send(ev.CachesMeasured({"a": (10 * part, 100), "b": (10 * part, 100)}))
        feed.send(ev.Scale(1))
        assert leave(feed) == []
        feed.wait(SETTLED_S / 2)
    feed.wait(SETTLED_S / 2)
    assert leave(feed) == ["a"]
