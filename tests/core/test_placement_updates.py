"""Workers get each placement before they work with it, and homes move once."""

from supervised_feeds import Feed

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.homes import KEEP_HOME_S, MOVE_S
from mbaas.core.cluster.supervised import RETRY_S, WorkerPhase
from mbaas.core.cluster.supervisor import BRIEFING_S, BRIEFINGS
from mbaas.core.staging import events as staging


def test_a_worker_that_does_not_know_the_placement_is_told_and_not_blamed():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    feed.send(ev.WorkerBehind(name))
    (down,) = feed.told(staging.WorkerDown)
    assert (down.worker, down.blame) == (name, False)
    feed.send(ev.WorkerBriefed(name, feed.only(ev.BriefWorker).version))
    assert [event.worker for event in feed.told(staging.WorkerUp)] == [name]


def test_a_worker_that_cannot_be_told_is_replaced():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    feed.send(ev.WorkerBehind(name))
    for _ in range(BRIEFINGS):
        feed.send(ev.BriefingFailed(name, "it does not answer"))
    assert feed.only(ev.EndWorker).worker == name
    assert feed.kinds(ev.StartWorker)


def test_homes_stay_while_a_worker_may_come_back_and_move_when_it_does_not():
    feed = Feed(own=2)
    feed.open("a", "b")
    dead = next(worker for worker in feed.supervisor.workers.values() if worker.node == "a")
    feed.send(ev.WorkerDied(dead.name, "signal 9"))
    feed.send(ev.CacheProbed("a", feed.only(ev.ProbeCache).generation, answers=True))
    assert not feed.kinds(ev.MovePlacement)
    feed.wait(KEEP_HOME_S)
    assert feed.move_homes().weights.keys() == {"b"}
    assert feed.only(ev.VacateNode).node == "a"


def test_a_move_that_was_given_up_is_not_used_when_it_is_done_after_all():
    feed = Feed()
    start = feed.only(ev.StartWorker)
    feed.send(ev.WorkerStarted(start.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    late = feed.only(ev.MovePlacement)
    feed.wait(MOVE_S)
    feed.wait(RETRY_S)
    second = feed.only(ev.MovePlacement)
    assert not feed.send(ev.PlacementMoved(late.version, late.workers))
    feed.send(ev.PlacementMoved(second.version, second.workers))
    assert feed.only(ev.UsePlacement).version == second.version


def test_workers_that_are_measured_to_be_slower_get_fewer_samples():
    feed = Feed(own=2)
    feed.open("a", "b")
    names = {worker.node: name for name, worker in feed.supervisor.workers.items()}
    moves, told = [], []
    for second in range(1, 90):
        done = {names["a"]: (100.0 * second, float(second)), names["b"]: (10.0 * second, float(second))}
        feed.now += 1.0
        feed.send(ev.WorkMeasured(done))
        moves += feed.kinds(ev.MovePlacement)
        told += [note.text for note in feed.kinds(ev.Note)]
    assert moves
    assert moves[0].weights["a"] > 2 * moves[0].weights["b"]
    assert told == ["node b has 50 % of the samples and 9.1 % of the speed"]


def test_a_worker_that_was_not_told_of_a_move_is_behind_and_is_told_again():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    feed.move_homes()
    feed.send(ev.WorkerStarted(second.worker, "b"))
    feed.send(ev.CacheStarted("b", feed.only(ev.StartCache).generation))
    move = feed.only(ev.MovePlacement)
    feed.send(ev.PlacementMoved(move.version, frozenset({second.worker})))
    assert [(down.worker, down.blame) for down in feed.told(staging.WorkerDown)] == [(first.worker, False)]
    assert [up.worker for up in feed.told(staging.WorkerUp)] == [second.worker]
    assert feed.only(ev.BriefWorker) == ev.BriefWorker(first.worker, move.version)
    assert not feed.send(ev.WorkerBehind("nobody"))
    assert not feed.send(ev.BriefingFailed("nobody", "it is gone"))
    assert not feed.send(ev.WorkerBehind(first.worker)), "it does not work now"


def test_briefings_that_fail_are_counted_anew_after_one_that_did_not():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    for _ in range(2):
        feed.send(ev.WorkerBehind(name))
        for _ in range(BRIEFINGS - 1):
            feed.send(ev.BriefingFailed(name, "it does not answer"))
        feed.send(ev.WorkerBriefed(name, feed.supervisor.homes.current.version))
    assert feed.supervisor.workers[name].phase is WorkerPhase.WORKING
    feed.send(ev.WorkerBehind(name))
    for _ in range(BRIEFINGS - 1):
        feed.send(ev.BriefingFailed(name, "it does not answer"))
    assert name in feed.supervisor.workers
    feed.send(ev.BriefingFailed(name, "it does not answer"))
    assert name not in feed.supervisor.workers


def test_a_worker_that_comes_from_another_feed_is_given_up_when_nothing_is_heard_of_it():
    feed = Feed()
    feed.open("a")
    feed.send(ev.Offered("key", "other"))
    name = feed.only(ev.TakeIn).worker
    assert feed.wait(BRIEFING_S - 1) == [
        ev.Note(f"the feed waits: {name} is on the way from another feed (for 29 s so far)")
    ]
    feed.wait(1.0)
    assert feed.only(ev.EndWorker).worker == name


def test_a_worker_that_does_not_answer_is_told_again_and_so_is_one_that_could_not_be_told():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    version = feed.supervisor.homes.current.version
    feed.send(ev.WorkerBehind(name))
    assert feed.wait(BRIEFING_S - 1) == [
        ev.Note(f"the feed waits: {name} is being told which nodes cache and prepare which samples (for 29 s so far)")
    ]
    assert feed.wait(1.0) == [ev.BriefWorker(name, version)]
    assert feed.send(ev.BriefingFailed(name, "it does not answer")) == [ev.BriefWorker(name, version)]


def test_a_worker_that_hears_of_a_placement_with_its_caches_is_not_told_of_the_one_before():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    feed.move_homes()
    feed.send(ev.WorkerStarted(second.worker, "b"))
    feed.send(ev.CacheStarted("b", feed.only(ev.StartCache).generation))
    assert feed.only(ev.MovePlacement).workers == {first.worker, second.worker}
    assert not feed.send(ev.WorkerBehind(first.worker))[1:], "MovePlacement already reaches it"


def test_a_worker_that_was_told_an_older_placement_is_told_the_newest_before_it_works():
    feed = Feed(own=3)
    first, second, late = (start.worker for start in feed.kinds(ev.StartWorker))
    feed.send(ev.WorkerStarted(first, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    old = feed.move_homes().version
    feed.send(ev.WorkerStarted(second, "b"))
    cache = feed.only(ev.StartCache)
    feed.send(ev.CacheStarted("b", cache.generation))
    move = feed.only(ev.MovePlacement)
    feed.send(ev.WorkerStarted(late, "a"))
    assert feed.only(ev.BriefWorker) == ev.BriefWorker(late, old), "the move does not include this worker"
    feed.send(ev.PlacementMoved(move.version, move.workers))
    feed.send(ev.WorkerBriefed(late, old))
    assert not feed.told(staging.WorkerUp)
    assert feed.only(ev.BriefWorker) == ev.BriefWorker(late, move.version)
    feed.send(ev.WorkerBriefed(late, move.version))
    assert [up.worker for up in feed.told(staging.WorkerUp)] == [late]
    feed.send(ev.WorkerBehind(late))
    feed.send(ev.WorkerBriefed(late, old))
    assert not feed.told(staging.WorkerUp), "a late report: it may lack any placement"


def test_a_move_that_failed_is_tried_again_after_a_pause():
    feed = Feed()
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    first = feed.only(ev.MovePlacement)
    assert not feed.send(ev.PlacementFailed(first.version - 1, "late")), "that is another one"
    feed.send(ev.PlacementFailed(first.version, "no answer"))
    assert feed.only(ev.Note).text == "placement update failed, retrying: no answer"
    assert not feed.wait(RETRY_S / 2)
    assert feed.wait(RETRY_S / 2)[0].version == first.version + 1


def test_who_has_which_part_of_the_samples_is_told():
    """Node names are cut to 8 characters; Ray's have 56."""
    feed = Feed(own=3)
    for start, node in zip(feed.kinds(ev.StartWorker), ("0123456789", "0123456789", "fedcba9876"), strict=True):
        feed.send(ev.WorkerStarted(start.worker, node))
    for cache in list(feed.supervisor.caches.values()):
        feed.send(ev.CacheStarted(cache.node, cache.generation))
    assert not feed.kinds(ev.Note)
    feed.move_homes()
    assert feed.only(ev.Note).text == (
        "samples are cached and prepared on 2 nodes: 01234567 (2 prep workers, 67 %), fedcba98 (1 prep worker, 33 %)"
    )
