"""When samples get new homes, and where."""

import pytest

from mbaas.core.homes import CACHE_PATIENCE_S, MOVE_S, Homes
from mbaas.core.story import Stories
from mbaas.core.supervised import CACHE_START_S, RETRY_S, CachePhase, SupervisedCache, SupervisedWorker, WorkerPhase


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
    assert (homes.placement.version, homes.version) == (0, 0)
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
