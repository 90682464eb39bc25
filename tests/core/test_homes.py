"""Samples move to new home nodes at the right time and in the right shares."""

import itertools

import pytest

from mbaas.core.cluster.homes import CACHE_PATIENCE_S, HOLD_S, KEEP_HOME_S, MOVE_S, Homes
from mbaas.core.cluster.supervised import (
    CACHE_START_S,
    RETRY_S,
    CachePhase,
    SupervisedCache,
    SupervisedWorker,
    WorkerPhase,
)
from mbaas.core.story import Stories


@pytest.fixture
def workers():
    return {}


@pytest.fixture
def caches():
    return {}


@pytest.fixture
def homes(workers, caches):
    return Homes(workers, caches)


def worker(table, name, node, phase=WorkerPhase.WORKING):
    table[name] = SupervisedWorker(name, Stories().begin("worker", name), node=node, phase=phase)


def cache(table, node, phase=CachePhase.UP, since=0.0):
    table[node] = SupervisedCache(node, 1, since, Stories().begin("cache node", node), phase)


def use_next(homes, now):
    move = homes.next_move(now)
    assert move is not None
    assert homes.use(move.version)
    return move


def test_nothing_has_a_home_before_a_machine_has_a_worker_and_a_cache(homes, workers, caches):
    assert (homes.current.version, homes.version) == (0, 0)
    worker(workers, "w0", "a")
    assert homes.next_move(1.0) is None
    cache(caches, "b")
    assert homes.next_move(1.0) is None
    cache(caches, "a")
    assert homes.next_move(1.0).weights == {"a": 1.0}


def test_the_first_placement_waits_long_for_caches_that_start_and_later_ones_do_not(homes, workers, caches):
    for node in "ab":
        worker(workers, f"w{node}", node)
    cache(caches, "a")
    cache(caches, "b", CachePhase.STARTING)
    assert homes.next_move(CACHE_START_S - 1) is None
    assert use_next(homes, CACHE_START_S).weights.keys() == {"a"}
    worker(workers, "wc", "c")
    cache(caches, "c")
    cache(caches, "b", CachePhase.STARTING, since=100.0)
    assert homes.next_move(100.0 + CACHE_PATIENCE_S - 1) is None
    assert use_next(homes, 100.0 + CACHE_PATIENCE_S).weights.keys() == {"a", "c"}


def test_one_move_is_made_at_a_time_and_another_follows_a_pause_after_one_that_failed(homes, workers, caches):
    worker(workers, "w0", "a")
    cache(caches, "a")
    first = homes.next_move(0.0)
    assert homes.is_moving(first.version)
    assert not homes.is_moving(first.version + 1)
    assert homes.next_move(1.0) is None
    assert not homes.use(first.version + 1)
    homes.give_up(1.0)
    assert not homes.is_moving(first.version)
    assert homes.next_move(1.0 + RETRY_S / 2) is None
    assert homes.next_move(1.0 + RETRY_S).version == first.version + 1


def test_shares_follow_the_number_of_workers_and_what_they_were_measured_to_do(homes, workers, caches):
    for number in range(3):
        worker(workers, f"w{number}", "a" if number else "b")
    cache(caches, "a")
    cache(caches, "b")
    move = use_next(homes, 0.0)
    assert move.weights["a"] == 2 * move.weights["b"]
    assert move.workers == {"w0", "w1", "w2"}
    done = dict.fromkeys(workers, (0.0, 0.0))
    for second in range(60):
        done = {name: (samples + (10.0 if name == "w0" else 1.0), s + 1.0) for name, (samples, s) in done.items()}
        homes.measured(done, float(second))
    faster = homes.next_move(60.0)
    assert faster.weights["b"] > faster.weights["a"], "b's worker makes ten times as many as each of a's"
    assert faster.reason


def test_without_any_worker_homes_stay(homes, workers, caches):
    worker(workers, "w0", "a")
    cache(caches, "a")
    use_next(homes, 0.0)
    workers.clear()
    assert homes.next_move(100.0) is None
    assert homes.used == {"a"}


def test_a_move_has_its_time(homes, workers, caches):
    worker(workers, "w0", "a")
    cache(caches, "a")
    assert not homes.is_overdue(1e9), "there is none"
    homes.next_move(5.0)
    assert not homes.is_overdue(5.0 + MOVE_S - 1)
    assert homes.is_overdue(5.0 + MOVE_S)


def test_a_machine_that_lost_its_workers_keeps_its_samples_for_a_minute_while_one_is_awaited(homes, workers, caches):
    """Lost at 50 s: at 109 s it still has its share, even if homes move for another reason; at 110 s it does not."""
    for node in "ab":
        worker(workers, f"w{node}", node)
        cache(caches, node)
    before = use_next(homes, 0.0)
    del workers["wb"]
    worker(workers, "awaited", "", WorkerPhase.STARTING)
    assert homes.next_move(50.0) is None
    worker(workers, "wc", "c")
    cache(caches, "c")
    assert use_next(homes, 50.0 + KEEP_HOME_S - 1).weights == {"a": 1.0, "b": before.weights["b"], "c": 1.0}
    assert use_next(homes, 50.0 + KEEP_HOME_S).weights == {"a": 1.0, "c": 1.0}


def test_only_workers_that_stay_are_told_of_a_move(homes, workers, caches):
    worker(workers, "works", "a")
    worker(workers, "waits to be told", "a", WorkerPhase.BRIEFING)
    worker(workers, "leaves", "a", WorkerPhase.LEAVING)
    worker(workers, "starts", "", WorkerPhase.STARTING)
    cache(caches, "a")
    assert homes.next_move(0.0).workers == {"works", "waits to be told"}


def test_what_a_worker_did_before_it_was_first_measured_counts(homes, workers, caches):
    """20 samples in 2 s, and 10 in 2 s by a worker that the first measurement lacks: 10 and 5 a second."""
    for node in "ab":
        worker(workers, f"w{node}", node)
        cache(caches, node)
    use_next(homes, 0.0)
    homes.measured({"wa": (0.0, 0.0)}, 1.0)
    homes.measured({"wa": (20.0, 2.0), "wb": (10.0, 2.0)}, 4.0)
    worker(workers, "wc", "c")
    cache(caches, "c")
    assert homes.next_move(5.0).weights == {"a": 10.0, "b": 5.0, "c": 7.5}


def test_after_each_move_for_speeds_the_pause_before_the_next_doubles(homes, workers, caches):
    """One worker is ten times as fast as the other, and they swap after each move, so shares never fit."""
    for node in "ab":
        worker(workers, f"w{node}", node)
        cache(caches, node)
    use_next(homes, 0.0)
    done, moves, is_a_faster = {"wa": (0.0, 0.0), "wb": (0.0, 0.0)}, [], True
    for second in range(1, 250):
        speeds = {"wa": 10.0 if is_a_faster else 1.0, "wb": 1.0 if is_a_faster else 10.0}
        done = {name: (samples + speeds[name], busy_s + 1.0) for name, (samples, busy_s) in done.items()}
        homes.measured(done, float(second))
        move = homes.next_move(float(second))
        if move is not None:
            homes.use(move.version)
            assert "of the speed" in move.reason
            assert homes.next_move(float(second)) is None, "one move is enough"
            moves.append(second)
            is_a_faster = not is_a_faster
    pauses = [after - before for before, after in itertools.pairwise(moves)]
    assert len(pauses) >= 3
    assert all(pause >= HOLD_S * 2**n for n, pause in enumerate(pauses)), pauses


def test_time_may_begin_anywhere(homes, workers, caches):
    """A clock only moves forward; its origin is arbitrary."""
    worker(workers, "w0", "a")
    cache(caches, "a", since=-1000.0)
    assert homes.next_move(-900.0) is not None


@pytest.mark.parametrize(
    ("phase", "lacks"), [(WorkerPhase.BRIEFING, True), (WorkerPhase.LEAVING, False), (WorkerPhase.GONE, False)]
)
def test_a_machine_whose_worker_goes_needs_no_homes(homes, workers, caches, phase, lacks):
    for node in "ab":
        cache(caches, node)
    worker(workers, "wa", "a")
    use_next(homes, 1.0)
    assert not homes.lacks_homes()
    worker(workers, "wb", "b", phase)
    assert homes.lacks_homes() is lacks
