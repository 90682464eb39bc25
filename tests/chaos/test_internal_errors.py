"""After a bug in mbaas itself, consumers miss nothing, and each bug is reported with a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.calls import encoding
from mbaas.coordinator.background import BROKEN
from mbaas.coordinator.control import FeedControl
from mbaas.dataset import synthetic
from mbaas.errors import PrepFailedError
from mbaas.ray_cluster import actor_names
from mbaas.tools.chaos.participants import alive
from mbaas.wire.consumers import ConsumerReport, Leave
from support.feeds import in_coordinator
from support.processes import cache_node_pids, coordinator_pid, prep_worker_pids
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.meets_bugs]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the coordinator cannot import it

SAMPLES = 2011


def inside(feed: mbaas.Feed, change: Any, actor: str = "") -> Any:
    """Run a function in the process of a feed's coordinator, or of another actor, to change or inspect its state."""
    if not actor:
        return in_coordinator(feed.name, change)
    return ray.get(ray.get_actor(actor, actor_names.NAMESPACE).__ray_call__.remote(change), timeout=30)


def logged(pid: int) -> str:
    """Log of a Ray worker process."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    return "".join(log.read_text() for log in session.glob(f"logs/worker-*-{pid}.err"))


def break_staging(coordinator: Any) -> None:
    coordinator._running.service.core.window.used_bytes += 1


def break_supervisor(coordinator: Any) -> None:
    for worker in coordinator._running.supervision.state.workers.values():
        worker.version = 0


@pytest.mark.parametrize("change", [break_staging, break_supervisor])
def test_a_coordinator_that_contradicts_itself_starts_anew_and_nothing_is_missed(serve_small, ray_clean, change):
    with serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=2) as feed:
        pid = coordinator_pid(feed.name)
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            recorder = Recorder()
            for number, batch in enumerate(loader, 1):
                recorder.add(batch)
                if number == 8:
                    # The coordinator may notice, and end, before it answers. Its end is checked below.
                    with suppress(ray.exceptions.RayActorError):
                        inside(feed, change)
                    # Now, not after the epoch: the rest of the epoch is shorter than the interval between two checks.
                    wait_until(lambda: not alive(pid), "the coordinator has ended")
            del batch
            assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert coordinator_pid(feed.name) != pid
        log = logged(pid)
        assert log.count(BROKEN) == log.count("mbaas.core.story.InvariantError: ") == 1
        assert ", in crash_if_broken" in log
        assert "the story of " in log
        assert any("the coordinator was restarted" in note for note in feed.status().notes)
        assert feed.status().restarts == 1


@pytest.fixture(scope="module")
def feed(ray_session: None) -> Iterator[mbaas.Feed]:
    """One worker, blocks of 20; each test repairs its damage."""
    options = {"batch_size": 20, "staging_bytes": 12 * 20 * (8 * 8 * 3 + 16)}
    options["timeouts"] = mbaas.Timeouts(patience_s=2.0)
    with mbaas.serve("bugs", synthetic(SAMPLES), T.Pipeline([T.DecodeImage()]), prep_workers=1, **options) as served:
        yield served


@contextmanager
def broken(feed: mbaas.Feed, method: str, raises: Callable[[Any], Any], actor: str = "") -> Iterator[None]:
    """Replace a method of an actor for a while, and check that its processes stay the same."""

    def pids() -> list[int]:
        return [coordinator_pid(feed.name), *prep_worker_pids(feed.name)]

    before = pids()
    inside(feed, lambda self: setattr(self, method, raises(self)), actor)
    try:
        yield
    finally:  # otherwise later tests would hit the same bug
        inside(feed, lambda self: delattr(self, method), actor)
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
    assert pids() == before


def test_an_error_in_the_coordinators_loop_is_told_and_the_loop_goes_on(feed: mbaas.Feed) -> None:
    def look(_: Any) -> None:
        raise RuntimeError("provoked in the loop")

    before = feed.status().internal_errors
    with broken(feed, "_look", lambda _: look):
        wait_until(lambda: feed.status().internal_errors >= before + 2, "the loop has gone on after the first error")
        told = sum("RuntimeError: provoked in the loop" in note for note in feed.status().notes)
        assert told == 1, "an error in every round is reported once"
        log = logged(coordinator_pid(feed.name))
        assert log.count("RuntimeError: provoked in the loop") == log.count(", in look\n") == 1


@pytest.mark.parametrize("part", ["service.core._follow_up", "service._delivered", "supervision.state._brief"])
def test_an_error_while_something_is_decided_costs_no_sample(feed: mbaas.Feed, part: str) -> None:
    """The error occurs once, mid-epoch. Decisions made before it are carried out, and later events repair the rest.

    A core that missed the consequences of an event may be inconsistent; its coordinator then restarts.
    """
    owner, _, name = f"_running.{part}".rpartition(".")

    def break_once(coordinator: Any) -> None:
        thing = attrgetter(owner)(coordinator)

        def broken(*_: Any, **__: Any) -> None:
            delattr(thing, name)
            raise RuntimeError(f"provoked in {name}")

        setattr(thing, name, broken)

    before, pid = feed.status().internal_errors, coordinator_pid(feed.name)
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        recorder = Recorder()
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            if number == 20:
                with suppress(ray.exceptions.RayActorError):
                    inside(feed, break_once)
        del batch
        assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
    if name == "_follow_up":
        # The contradiction may show only in the next epoch, and would restart the coordinator in the next test.
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
        assert "RuntimeError: provoked in _follow_up" in logged(pid)
        assert (coordinator_pid(feed.name) != pid) == (BROKEN in logged(pid)), "it depends on what should have followed"
    else:
        # The supervisor may have its next event, a tick, only after the rest of the epoch.
        wait_until(lambda: feed.status().internal_errors > before, "the error has occurred")
        assert coordinator_pid(feed.name) == pid


def test_an_error_in_a_call_comes_to_its_caller_and_is_told_and_the_feed_goes_on(feed: mbaas.Feed) -> None:
    """Only the caller sees errors that mbaas raises on purpose."""

    def take_report(*_: Any) -> None:
        raise RuntimeError("provoked in a call")

    before = feed.status().internal_errors
    coordinator = ray.get_actor(actor_names.actor_name(feed.name), actor_names.NAMESPACE)
    with broken(feed, "_take_report", lambda _: take_report):
        for _ in range(2):
            leave = coordinator.leave.remote(encoding.encode(Leave("nobody")), encoding.encode(ConsumerReport()))
            with pytest.raises(RuntimeError, match="provoked in a call"):
                ray.get(leave, timeout=30)
        with pytest.raises(mbaas.ConfigError, match='such as "trial-3" or "block 17", got 17'):
            FeedControl.of(feed.name).story(17)  # type: ignore[arg-type]
        status, log = feed.status(), logged(coordinator_pid(feed.name))
    assert status.internal_errors == before + 2
    assert sum("in the call 'leave'" in note and "provoked in a call" in note for note in status.notes) == 1
    assert log.count("RuntimeError: provoked in a call") == log.count(", in take_report\n") == 1
    assert "ConfigError" not in log


def test_ledgers_that_met_an_internal_error_are_handed_in_with_the_next_sign_of_life(feed: mbaas.Feed) -> None:
    def take_report(*_: Any) -> None:
        raise RuntimeError("provoked over a report")

    with mbaas.join(feed.name, consumer="patient", format="numpy") as loader:
        loader._heartbeat.end()
        with broken(feed, "_take_report", lambda _: take_report):
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
            with pytest.raises(RuntimeError, match="provoked over a report"):
                loader.flush()
        loader.flush()
        loader.flush()
        assert feed.ledger()["consumer"].to_pylist().count("patient") == 1


def test_a_block_over_which_a_worker_meets_a_bug_is_bad_after_three_tries_and_the_worker_stays(feed) -> None:
    block = 6

    def breaking(worker: Any) -> Callable[..., Any]:
        whole = worker._prepare

        def prepare(work: Any, request: Any, *rest: Any) -> Any:
            if request.block % work.brief.order.blocks_per_epoch == block:
                raise LookupError(f"provoked over block {block}")
            return whole(work, request, *rest)

        return prepare

    before = feed.status().internal_errors
    with broken(feed, "_prepare", breaking, f"prep:{feed.name}:prep-0"):
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            with pytest.raises(PrepFailedError, match=r"3 tries to prepare it ended in an error; .* provoked over"):
                record_epoch(loader)
        wait_until(lambda: feed.status().internal_errors == before + 3, "the error was reported three times")
        assert logged(coordinator_pid(feed.name)).count(f"LookupError: provoked over block {block}") == 1
        assert any(f"LookupError: provoked over block {block}" in note for note in feed.status().notes)


def test_a_bug_of_a_cache_node_is_in_its_own_log_and_the_feed_goes_on(ray_session: None) -> None:
    """A caller that waits for the cache node's read gets the error. Nothing waits for read-ahead."""

    def fill_from_nearer(*_: Any) -> None:
        raise LookupError("provoked over a slab")

    # An epoch has just over two blocks, and two are prepared ahead: no block of the next epoch fails meanwhile.
    memory = {"cache_bytes": 0, "staging_bytes": 8 * 1000 * 200, "staging": mbaas.Staging(ahead_blocks=2)}
    options: dict[str, Any] = {"batch_size": 20, "prep_workers": 1, **memory}
    with mbaas.serve("reads", synthetic(SAMPLES), T.Pipeline([T.DecodeImage()]), **options) as feed:
        wait_until(lambda: cache_node_pids(feed.name), "the cache node is up")
        (pid,), (name,) = cache_node_pids(feed.name), actor_names.children(feed.name, "cache")
        actor = f"cache:{feed.name}:{name}"
        inside(feed, lambda self: setattr(self, "_fill_from_nearer", fill_from_nearer), actor)
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            with pytest.raises(PrepFailedError, match="provoked over a slab"):
                record_epoch(loader)
            wait_until(lambda: logged(pid).count("LookupError: provoked over a slab") == 1, "it is in the log, once")
            inside(feed, lambda self: delattr(self, "_fill_from_nearer"), actor)
            loader.load_state_dict(loader.state_dict())
            assert sum(len(batch["sample_id"]) for batch in loader) == SAMPLES
        assert cache_node_pids(feed.name) == [pid]
