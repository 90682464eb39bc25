"""Feeds are served, found and stopped, and `serve` and `join` refuse invalid options."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import pytest
import ray
from msgspec.structs import replace
from service_feeds import STAGING_BYTES, augmented

import mbaas
from mbaas import transforms as T
from mbaas.coordinator import recovery, registry
from mbaas.coordinator.control import FeedControl
from mbaas.dataset import synthetic
from mbaas.memory.budgets import MemoryClaim
from mbaas.ray_cluster import actor_names
from mbaas.tools.chaos.participants import kill, pause, resume
from support.processes import coordinator_pid
from support.trials import record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

DATA = synthetic(100, height=32, width=32)


def test_a_name_is_served_once(plain, photos_data):
    own = rf"'plain' is already running, served by .* \(process {os.getpid()}\) of user .* on .*, since 20\d\d-.*"
    ends = r"end that feed first: `mbaas stop plain`, or replace=True in Python"
    with pytest.raises(mbaas.FeedExistsError, match=own + ends):
        mbaas.serve("plain", photos_data, augmented(), batch_size=64)


def test_ones_own_feed_can_be_replaced_and_no_other(monkeypatch, feed_name):
    def serve(**options):
        return mbaas.serve(
            feed_name, DATA, augmented(), batch_size=20, prep_workers=1, staging_bytes=2_000_000, **options
        )

    serve()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("getpass.getuser", lambda: "somebody")
        for options in ({}, {"replace": True}):
            with pytest.raises(mbaas.FeedExistsError, match=r"of user .* use another name, or have that feed stopped"):
                serve(**options)
    with serve(replace=True, seed=1) as again, mbaas.join(feed_name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(100)) == []
    with serve(replace=True):  # without a running feed it changes nothing
        pass
    assert again.name not in actor_names.feed_names()


def test_joining_an_unknown_feed_names_those_that_run(plain):
    for call in (mbaas.join, mbaas.connect, mbaas.stop):
        with pytest.raises(mbaas.FeedNotFoundError, match=r"no feed 'train' runs on this cluster; running: .*'plain'"):
            call("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, r"batch_size must be .* got 2.5"),
        (
            {"batch_size": 1000, "staging_bytes": 100_000},
            r"staging_bytes must hold at least 3 .*\(926 kB\), got 100 kB",
        ),
        (
            {"cache_bytes": 1 << 40},
            r"cache_bytes \(1.1 TB\) and staging_bytes .* must together stay within",
        ),
        ({"cache_bytes": -1}, r"cache_bytes must be a size such as .* got -1"),
        ({"prep_workers": 0}, r"prep_workers must be at least 1, got 0"),
        ({"engine": "gpu"}, r"engine must be one of 'auto', 'cpu', 'dali', got 'gpu'"),
        ({"on_bad_sample": "ignore"}, r"on_bad_sample must be one of 'raise', 'skip', got 'ignore'"),
        ({"seed": -1}, r"seed must be .* got -1"),
        ({"timeouts": 30.0}, r"timeouts must be Timeouts\(...\), got 30.0"),
        ({"lease_s": 30.0}, r"unknown option 'lease_s' of serve; it is 'timeouts=mbaas.Timeouts\(lease_s=...\)'"),
        ({"batchsize": 1}, r"unknown option 'batchsize' of serve; did you mean 'batch_size'\?"),
        ({"name": "a/b"}, r"a feed's name must be .* got 'a/b'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_an_option_that_cannot_work_is_refused_with_both_values(feed_name, options, message):
    wanted = {"name": feed_name, "batch_size": 10, "prep_workers": 1, **options}
    name = wanted.pop("name")
    with pytest.raises(mbaas.ConfigError, match=message):
        mbaas.serve(name, DATA, augmented(), **wanted)


@pytest.mark.parametrize(("data", "pipeline"), [(["a.jpg"], augmented()), (DATA, [T.DecodeImage()])])
def test_a_wrong_kind_of_thing_is_refused_with_its_type(feed_name, data, pipeline):
    with pytest.raises(mbaas.ConfigError, match="got list"):
        mbaas.serve(feed_name, data, pipeline, batch_size=10)


def test_more_workers_than_cpus_are_refused_at_once(feed_name):
    with pytest.raises(mbaas.ResourceError, match="asks for 9 prep workers of 1 CPU each, the cluster has 8 CPUs"):
        mbaas.serve(feed_name, DATA, augmented(), batch_size=10, prep_workers=9)


def test_defaults_leave_other_feeds_what_they_have_and_trials_a_cpu(plain, feed_name):
    """`plain` has 2 of 8 CPUs, and one is for a trial. Half of the other 5 is 3, rounded up, but the limit is 2.

    For the second feed half of 3 is 2, rounded up, and 2 CPUs stay free.
    """
    assert plain.status().claims.cpus == 2
    options = {"batch_size": 10, "cache_bytes": 0, "staging_bytes": STAGING_BYTES}
    with (
        mbaas.serve(feed_name, DATA, augmented(), scaling=mbaas.Scaling(max_prep_workers=2), **options) as bounded,
        mbaas.serve(f"{feed_name}-2", DATA, augmented(), **options) as second,
    ):
        for feed in (bounded, second):
            assert (len(feed.status().workers), feed.status().claims.cpus) == (2, 2.0)
        assert bounded.status().claims.memory == MemoryClaim(0, STAGING_BYTES)


def test_a_default_cache_has_the_measured_size_of_decoded_samples(feed_name, photos_data):
    """The rest of the memory is left for the next feed. A restarted coordinator keeps the size."""
    decoded_bytes = len(photos_data) * 32 * 32 * 3
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    options = {"batch_size": 64, "staging_bytes": STAGING_BYTES, "prep_workers": 1}
    with mbaas.serve(feed_name, photos_data, pipeline, **options) as feed:
        claimed = registry.claims_of(feed.name).memory.cache_bytes
        assert decoded_bytes < claimed < 5 * decoded_bytes
        kill(coordinator_pid(feed_name))
        status = feed.status()
        assert (status.cache_bytes, status.claims.memory.cache_bytes) == (claimed, claimed)
        assert registry.claims_of(feed.name).memory.cache_bytes == claimed


def cpus_served(feed_name, **options):
    """Serve and stop a feed. Return the CPUs that its workers reserved."""
    options = {"batch_size": 10, "cache_bytes": 0, "staging_bytes": STAGING_BYTES, **options}
    with mbaas.serve(feed_name, DATA, augmented(), **options) as feed:
        assert registry.claims_of(feed.name) == feed.status().claims
        return registry.claims_of(feed.name).cpus


@pytest.mark.chaos
@pytest.mark.parametrize("trouble", [pause, kill], ids=["stands still", "is restarting"])
def test_a_feed_whose_coordinator_is_in_trouble_is_left_what_it_has(plain, feed_name, trouble):
    """Its coordinator is not called. It has 3 of 8 CPUs, `plain` 2 and a trial 1. Half of the other 2 is 1."""
    options = {"batch_size": 10, "cache_bytes": 0, "staging_bytes": STAGING_BYTES, "prep_workers": 3}
    with mbaas.serve(f"{feed_name}-first", DATA, augmented(), **options):
        pid = coordinator_pid(f"{feed_name}-first")
        trouble(pid)
        try:
            assert cpus_served(feed_name) == 1.0
        finally:
            resume(pid)


def test_feeds_that_are_served_at_the_same_moment_share_the_cluster(plain, feed_name, monkeypatch):
    """`plain` has 2 of 8 CPUs. One feed takes half of 5, rounded up, and the other half of 2.

    A program that has read the claims waits a second for the other one to read the same claims, which must not happen.
    """
    served, both_read, in_order = [], threading.Barrier(2), registry.in_order
    options = {"batch_size": 10, "cache_bytes": 0, "staging_bytes": STAGING_BYTES}

    def read():
        found = in_order()
        with contextlib.suppress(threading.BrokenBarrierError):
            both_read.wait(1.0)
        return found

    def serve(number):
        served.append(mbaas.serve(f"{feed_name}-{number}", DATA, augmented(), **options))

    monkeypatch.setattr(registry, "in_order", read)
    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    try:
        assert sorted(
            registry.claims_of(feed.name).cpus for feed in mbaas.feeds() if feed.name.startswith(feed_name)
        ) == [1.0, 3.0]
    finally:
        for feed in served:
            feed.stop()
    assert not any(feed.name.startswith(feed_name) for feed in mbaas.feeds())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "jax"}, r"format must be one of 'torch', 'numpy', got 'jax'"),
        (
            {"format": "numpy", "device": "cpu"},
            r"device needs format='torch'; got format='numpy' and device='cpu'",
        ),
        ({"device": "warp"}, r"device must name a torch device such as 'cuda:0', got 'warp'"),
        ({"device": True}, r"device must name a torch device such as 'cuda:0', got True"),
        ({"batch_size": True}, r"batch_size must be a whole number of at least world_size \(1\), got True"),
        ({"batch_size": 0}, r"batch_size must be a whole number of at least world_size \(1\), got 0"),
        (
            {"rank": 2, "world_size": 2},
            r"rank must be in \[0, world_size - 1\], world_size was 2 and rank was 2",
        ),
        (
            {"rank": 1},
            r"rank and world_size must both be whole numbers, or both be left out, got rank=1 and world_size=None",
        ),
        ({"world_size": 2}, r"both be left out, got rank=None and world_size=2"),
        ({"rank": 0, "world_size": 2.0}, r"got rank=0 and world_size=2.0"),
        ({"rank": -1, "world_size": 2}, r"world_size was 2 and rank was -1"),
        ({"rank": 0, "world_size": 0}, r"world_size was 0 and rank was 0"),
        ({"rank": 1, "world_size": 2, "consumer": None}, r"the same for all 2, got consumer=None for rank 1"),
        ({"batch_size": 2, "rank": 0, "world_size": 3}, r"at least world_size \(3\), got 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_join_that_cannot_work_is_refused_with_both_values_and_leaves_no_member(plain, options, message):
    with pytest.raises(mbaas.ConfigError, match=message):
        mbaas.join(plain.name, **{"consumer": "me", **options})
    assert plain.status().consumers == ()


def test_places_are_held_for_successors_and_released(plain):
    """Three announced consumers do not come. Their reservations are open to any consumer until they are released."""
    names = ["a", "b", "c"]
    mbaas.announce(plain.name, names)
    assert {(m.name, m.state, m.is_unassigned) for m in plain.status().consumers} == {
        (name, "reserved", False) for name in names
    }
    control = FeedControl.of(plain.name)
    for name in names:
        control.remove(name, successors=5)
    assert [(m.state, m.is_unassigned) for m in plain.status().consumers] == [("reserved", True)] * 3
    control.release_reservations(2)
    assert [(m.state, m.is_unassigned) for m in plain.status().consumers] == [("reserved", True)]
    control.release_reservations(2)
    assert plain.status().consumers == ()


def test_a_trial_that_waits_hears_promptly_that_its_feed_was_stopped(feed_name):
    """The trial waits for an announced consumer that does not come."""
    options = {
        "batch_size": 10,
        "prep_workers": 1,
        "staging_bytes": STAGING_BYTES,
        "staging": mbaas.Staging(ahead_blocks=2),
    }
    feed = mbaas.serve(feed_name, DATA, augmented(), **options)
    mbaas.announce(feed.name, ["late"])
    loader = mbaas.join(feed_name, consumer="me", format="numpy")
    told = []

    def train():
        try:
            for _ in loader:
                pass
        except mbaas.FeedFailedError as error:
            told.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    wait_until(lambda: any(m.waits_for for m in feed.status().consumers), "the trial waits")
    feed.stop()
    thread.join(5.0)
    assert not thread.is_alive()
    assert len(told) == 1
    loader.close()
    feed.stop()
    with pytest.raises(mbaas.FeedNotFoundError):
        mbaas.connect(feed_name)
    with pytest.raises(mbaas.FeedFailedError, match="was stopped"):
        feed.status()


def test_a_feed_that_was_stopped_stops_no_later_one_of_its_name(ray_clean, feed_name):
    options = {"batch_size": 10, "prep_workers": 1, "staging_bytes": STAGING_BYTES}
    first = mbaas.serve(feed_name, DATA, augmented(), **options)
    first.stop()
    with mbaas.serve(feed_name, DATA, augmented(), **options) as second:
        first.stop()
        with mbaas.join(feed_name, consumer="me", format="numpy") as loader:
            for _ in loader:
                pass
            assert loader.ledger.exact
        assert second.status().failed is None


def test_the_time_to_the_first_minibatch_is_told(plain):
    assert 0 < plain.status().start_s < plain.status().uptime_s
    with mbaas.join("plain", consumer="new", format="numpy") as loader:
        assert loader.report().time_to_first_batch_s == 0
        for number, _ in enumerate(loader):
            if number == 0:
                first_s = loader.report().time_to_first_batch_s
                assert 0 < first_s < 30
        loader.flush()
        assert loader.report().time_to_first_batch_s == first_s, "later ones do not count"
        (told,) = [member.report for member in plain.status().consumers if member.name == "new"]
        assert told.time_to_first_batch_s == first_s


def test_a_feed_that_is_served_again_has_the_blocks_that_were_kept(feed_name):
    """A killed program leaves its layout in the store. Otherwise a new feed of this data would have other blocks."""
    options = {"batch_size": 10, "prep_workers": 1, "staging_bytes": STAGING_BYTES}
    with mbaas.serve(feed_name, DATA, augmented(), **options) as feed:
        layout, dataset = recovery.recall(feed_name)
        assert feed.status().block_samples == layout.order.block_samples != 10
    kept = replace(layout, order=replace(layout.order, block_samples=10))
    recovery.remember(feed_name, kept, dataset)
    with mbaas.serve(feed_name, DATA, augmented(), **options) as feed:
        assert feed.status().block_samples == 10


def test_to_store_a_dataset_imports_nothing_large(tmp_path):
    """Ray's serialization of Arrow tables imports pandas, which would add half a second to each feed's start."""

    class Keeper:  # defined here to be pickled by value: the actor cannot import this module
        def keep(self, dataset):
            large = "pandas", "torch"
            for name in large:  # forked workers have imported them; an import statement would do so again
                sys.modules.pop(name, None)
            ray.put(dataset)
            return [name for name in large if name in sys.modules]

    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.jpg").write_bytes(b"1")
    keeper = ray.remote(Keeper).options(num_cpus=0).remote()
    assert ray.get(keeper.keep.remote(mbaas.read_images(tmp_path)), timeout=60) == []
    ray.kill(keeper)
