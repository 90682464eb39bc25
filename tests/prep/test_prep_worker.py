"""A prep worker is idle or works for one feed; a new engagement replaces everything of the previous one."""

from __future__ import annotations

import sys
import time

import pytest
import ray
from msgspec.structs import replace

from mbaas import transforms as T
from mbaas.cache.node import CacheNodeActor
from mbaas.dataset import synthetic
from mbaas.errors import StateError
from mbaas.prep.worker import PrepWorkerActor
from mbaas.ray_cluster import actor_names
from mbaas.samples.fields import memory
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import BlockPart, NodeWeight, PartRequest, PlacementUpdate, place_samples
from mbaas.wire.blocks import PrepConfig, WorkerBrief
from mbaas.wire.samples import BadSample
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

SAMPLES, BLOCK = 20, 8


@ray.remote(num_cpus=0)
class Nobody:
    """Stand-in for a feed's coordinator: the feed's worker lives as long as this actor."""

    def answer(self) -> None:
        """Return once the actor is up."""


@pytest.fixture(scope="module")
def dataset():
    return synthetic(SAMPLES)


@pytest.fixture(scope="module")
def order():
    return SampleOrder(SAMPLES, seed=3, block_samples=BLOCK)


@pytest.fixture(scope="module")
def cache(ray_session, dataset, order):
    """Cache node without other nodes, which keeps no state that tests could see."""
    made = CacheNodeActor.remote(dataset, order, cache_bytes=1 << 20, readahead_bytes=0)
    yield made
    ray.kill(made)


@pytest.fixture(scope="module")
def feed_name(ray_session):
    """A feed whose workers all share one stand-in for a coordinator."""
    name = "prep-worker"
    coordinator = Nobody.options(name=actor_names.actor_name(name), namespace=actor_names.NAMESPACE).remote()
    ray.get(coordinator.answer.remote())
    yield name
    ray.kill(coordinator)


@pytest.fixture
def worker(cache, ray_clean, feed_name):
    """Idle worker started by the feed ``feed_name``."""
    made = PrepWorkerActor.options(max_concurrency=2).remote(config(feed_name))
    yield made
    ray.kill(made)


def config(feed: str, function=lambda image, rng: image) -> PrepConfig:
    """Config with a Map at the end, whose function is a different object in every process."""
    pipeline = T.Pipeline([T.DecodeImage(), T.Map(function)])
    return PrepConfig(feed=feed, pipeline=pipeline, engine="cpu", seed=3, threads=1, on_bad_sample="raise", prep_s=60.0)


def engage(worker, dataset, order, feed: str, **options) -> None:
    spec = ray.get(worker.probe.remote(dataset, config(feed), 8)).spec
    ray.get(worker.engage.remote(dataset, WorkerBrief(config(feed, **options), order, spec)))


def place_on_its_node(worker, cache, dataset) -> BlockPart:
    """Place all samples on the worker's own node, and return the part that every block then has."""
    node = ray.get(worker.location.remote()).node
    placement = place_samples([NodeWeight(node, 1 << 20)], num_samples=SAMPLES, lengths=dataset.lengths, version=1)
    ray.get(cache.update_placement.remote(PlacementUpdate(placement, None, {})))
    ray.get(worker.update_placement.remote((placement,), {node: cache}))
    return BlockPart(node, 1)


def prepared_ids(worker, feed: str, request: PartRequest) -> list[int]:
    _, arrays = ray.get(worker.prepare.remote(feed, request, ()))
    return arrays["sample_id"].tolist()


def test_an_idle_worker_says_so(worker, feed_name):
    assert ray.get(worker.location.remote()).feed == feed_name
    with pytest.raises(StateError, match=f"a worker that feed '{feed_name}' started is idle"):
        ray.get(worker.prepare.remote(feed_name, PartRequest(0), ())[0])


def test_a_worker_that_is_engaged_anew_works_for_the_new_feed_only(worker, cache, dataset, order, feed_name):
    engage(worker, dataset, order, feed_name)
    part = place_on_its_node(worker, cache, dataset)
    assert prepared_ids(worker, feed_name, PartRequest(1, part)) == order.sample_ids(1).tolist()
    other = SampleOrder(SAMPLES, seed=4, block_samples=BLOCK)
    engage(worker, dataset, other, "another")
    assert ray.get(worker.location.remote()).feed == "another"
    with pytest.raises(StateError, match=f"of feed '{feed_name}' was requested from a worker of feed 'another'"):
        ray.get(worker.prepare.remote(feed_name, PartRequest(1, part), ())[0])
    with pytest.raises(StateError, match="version 1"):  # sent for another feed
        ray.get(worker.prepare.remote("another", PartRequest(1, part), ())[0])


def test_a_worker_that_is_engaged_for_the_same_again_keeps_what_it_knows(worker, cache, dataset, order, feed_name):
    engage(worker, dataset, order, feed_name)
    part = place_on_its_node(worker, cache, dataset)
    engage(worker, dataset, order, feed_name)
    assert prepared_ids(worker, feed_name, PartRequest(2, part)) == order.sample_ids(2).tolist()


def test_a_block_that_fails_by_a_bad_sample_sends_no_images(worker, cache, dataset, order, feed_name):
    """Images of any size share one memory, and even an empty slice would carry all its bytes."""

    def sometimes(image, rng):
        if rng.random() < 0.5:
            raise ValueError("no")
        return image

    def of_any_size(function) -> PrepConfig:
        pipeline = T.Pipeline([T.DecodeImage(max_pixels=100), T.Map(function)])
        return replace(config(feed_name), pipeline=pipeline)

    spec = ray.get(worker.probe.remote(dataset, of_any_size(lambda image, rng: image), 8)).spec
    ray.get(worker.engage.remote(dataset, WorkerBrief(of_any_size(sometimes), order, spec)))
    part = place_on_its_node(worker, cache, dataset)
    meta, arrays = worker.prepare.remote(feed_name, PartRequest(0, part), ())
    (bad,) = ray.get(meta).bad
    assert bad.reason.endswith("sometimes raised ValueError: no")
    assert [len(array) for array in memory(ray.get(arrays)["image"])] == [0, 1, 0]


def test_a_worker_that_is_busy_with_two_blocks_says_at_once_that_it_lives(
    worker, cache, dataset, order, feed_name, tmp_path
):
    begun, gate = tmp_path / "begun", tmp_path / "gate"

    def held(image, rng):
        begun.touch()
        while not gate.exists():
            time.sleep(0.01)
        return image

    engage(worker, dataset, order, feed_name, function=held)
    part = place_on_its_node(worker, cache, dataset)
    asked = [worker.prepare.remote(feed_name, PartRequest(block, part), ()) for block in (0, 1)]
    wait_until(begun.exists, "the worker has a block in hand")
    try:
        assert ray.get(worker.location.remote(), timeout=10).feed == feed_name
        place_on_its_node(worker, cache, dataset)
        assert not ray.wait([refs[0] for refs in asked], timeout=0)[0], "both tasks are unfinished"
    finally:
        gate.touch()
    assert [meta.block for meta in ray.get([refs[0] for refs in asked], timeout=30)] == [0, 1]


def test_a_sample_that_was_bad_before_stays_out_and_keeps_its_reason(worker, cache, dataset, order, feed_name):
    """The sample is readable now, but consumers received the block without it."""
    engage(worker, dataset, order, feed_name)
    part = place_on_its_node(worker, cache, dataset)
    bad = BadSample(int(order.sample_ids(1)[3]), "x.jpg", "reading failed: [Errno 5] Input/output error")
    elsewhere = BadSample(int(order.sample_ids(0)[0]), "y.jpg", "of another part of the block")
    meta = ray.get(worker.prepare.remote(feed_name, PartRequest(1, part), (bad, elsewhere))[0])
    assert [(sample.sample_id, sample.reason) for sample in meta.bad] == [(bad.sample_id, bad.reason)]
