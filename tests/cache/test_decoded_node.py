"""Cache nodes on real Ray keep decoded samples, here three times the bytes of a file, without inspecting them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from watched_files import DEADLINE_S, Folder, eventually

from mbaas.cache.node import CacheNodeActor
from mbaas.cache.reader import CacheReader
from mbaas.cache.slab import NOTHING
from mbaas.cache.stats import CacheStats
from mbaas.model.forms import SampleCosts
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import (
    ENCODED,
    DecodedSizes,
    Holders,
    NodeWeight,
    PartRequest,
    PlacementHistory,
    PlacementUpdate,
    place_samples,
)
from mbaas.settings import Disk
from mbaas.wire.samples import DecodedSamples

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
pytestmark = pytest.mark.usefixtures("ray_clean")
MakeFolder = Callable[..., Folder]
GROWTH = 3
SAMPLES = 103
FORM = 7


class Worker:
    """Reads parts as a prep worker does, and hands in the samples requested."""

    def __init__(self, folder: Folder, node: Any, *, waits: bool = False) -> None:
        self.waits = waits  # for each hand-in
        self.order = SampleOrder(len(folder.dataset), seed=5, block_samples=16)
        self.contents, self.reader = folder.contents(), CacheReader(node)
        self.placements = PlacementHistory(self.order)
        self.handed_in: list[ray.ObjectRef[None]] = []

    def part(self, request: PartRequest) -> int:
        """Read a part and compare each sample with its file; return the number of samples that arrived decoded."""
        reply, encoded = self.reader.read(request)
        ids, decoded = self.placements.ids(request).tolist(), 0
        for i, view in zip(ids, encoded, strict=True):
            decoded += len(view) == GROWTH * len(self.contents[i])
            assert view.tobytes() in (self.contents[i], GROWTH * self.contents[i])
        assert reply.counts.decoded.samples == decoded
        asked = [ids[row] for row in reply.hand_in.tolist()]
        made = [np.frombuffer(GROWTH * self.contents[i], np.uint8) for i in asked]
        assert sum(map(len, made)) <= 2 * reply.hand_in_bytes
        for piece in np.array_split(np.arange(len(made)), 2) if made else ():  # one after the other
            some = [made[row] for row in piece.tolist()]
            lengths, packed = np.array([len(one) for one in some], np.int64), np.concatenate([NOTHING, *some])
            is_last = bool(len(piece) == 0 or piece[-1] == len(made) - 1)
            done = self.reader.hand_in(request, FORM, np.array(asked)[piece], lengths, packed, [], is_last=is_last)
            self.handed_in.append(done)
            if self.waits:
                self.settle()
        return decoded

    def epoch(self, number: int) -> int:
        blocks = self.order.blocks_per_epoch
        whole = range(number * blocks, (number + 1) * blocks)
        return sum(self.part(PartRequest(block, forms=(FORM,))) for block in whole)

    def settle(self) -> None:
        """Wait until the node has stored all hand-ins; until then it may read a sample from storage again."""
        ray.get(self.handed_in, timeout=DEADLINE_S)


@pytest.fixture
def start(ray_clean: None) -> Iterator[Callable[..., Any]]:
    """Start cache nodes that check their invariants after every event, and end them after the test."""
    nodes = []

    def start_node(folder: Folder, *, memory: float, **options: Any) -> Any:
        """Start a node with ``memory`` bytes per byte of the files."""
        order = SampleOrder(len(folder.dataset), seed=5, block_samples=16)
        total = folder.dataset.total_bytes
        costs = SampleCosts(
            encoded_bytes=total / SAMPLES,
            decoded_bytes=GROWTH * total / SAMPLES,
            encoded_s=10e-3,
            decoded_s=1e-3,
            storage_s=1e-4,
        )
        node = CacheNodeActor.options(max_restarts=-1).remote(
            folder.dataset,
            order,
            cache_bytes=int(total * memory),
            readahead_bytes=0,
            **{"decoded": DecodedSamples("tripled", FORM, costs, threads=1), **options},
        )
        nodes.append(node)
        return node

    yield start_node
    for node in nodes:
        ray.kill(node)


def stats_of(node: Any) -> CacheStats:
    stats: CacheStats = ray.get(node.stats.remote(), timeout=DEADLINE_S)
    return stats


@pytest.mark.parametrize("memory", [0.5, 1.0, 2.0, 3.5])
def test_decoded_samples_are_kept_as_far_as_the_plan_says_and_nothing_is_read_twice(
    memory: float, make_folder: MakeFolder, start: Any
) -> None:
    """With 2 bytes of memory per byte of the files, half of the samples are decoded: 3 x + 1 (1 - x) = 2.

    Late hand-ins would occupy memory beside the encoded copies, here a large part of it.
    """
    folder = make_folder(SAMPLES)
    node = start(folder, memory=memory)
    worker = Worker(folder, node, waits=True)
    assert worker.epoch(0) == 0
    decoded = worker.epoch(1)
    wanted = {0.5: 0.5 / 3, 1.0: 0.0, 2.0: 0.5, 3.5: 1.0}[memory]
    assert decoded == pytest.approx(wanted * SAMPLES, abs=0.08 * SAMPLES)
    assert worker.epoch(2) >= decoded
    stats = stats_of(node)
    assert stats.cached_bytes <= stats.budget_bytes
    if memory >= 1:
        assert folder.opened().total() == stats.cached_samples == SAMPLES


@pytest.mark.parametrize("is_decoded", [True, False])
def test_a_part_that_is_cached_decoded_is_requested_once_for_all_pipelines(
    is_decoded: bool, make_folder: MakeFolder, start: Any
) -> None:
    """Encoded samples are requested for each pipeline, because one of the pipelines may be asked to hand them in."""
    folder = make_folder(SAMPLES)
    node = start(folder, memory=3.5, **({} if is_decoded else {"decoded": None}))
    worker = Worker(folder, node, waits=True)
    assert [worker.epoch(0), worker.epoch(1)] == [0, SAMPLES if is_decoded else 0]

    def requested() -> int:
        """Read three blocks for three pipelines each; return the number of samples requested from the node."""
        before = stats_of(node).total.fetched.all.samples
        for block in (14, 15, 16):
            for pipeline in ("", "p", "q"):
                reply, rows = worker.reader.read(PartRequest(block, forms=(FORM,)), pipeline)
                contents = [folder.contents()[i] for i in worker.order.sample_ids(block)]
                assert [view.tobytes() for view in rows] == [(GROWTH if is_decoded else 1) * one for one in contents]
                assert reply.counts.local.samples == len(rows)
        return stats_of(node).total.fetched.all.samples - before

    assert requested() == (48 if is_decoded else 144)


def test_a_part_that_the_node_dropped_is_requested_again(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(SAMPLES)
    node = start(folder, memory=3.5)
    worker = Worker(folder, node, waits=True)
    for number in (0, 1):
        worker.epoch(number)
        worker.settle()
    first, second = (PartRequest(block, forms=(FORM,)) for block in (14, 15))
    assert worker.reader.read(first)[0].counts.decoded.samples == 16
    everything = np.arange(SAMPLES)
    lengths = GROWTH * folder.dataset.lengths(everything)
    handed = node.hand_over.remote(everything, np.ones(SAMPLES, np.bool_), lengths, form=FORM, lends=False)
    ray.get(handed, timeout=DEADLINE_S)
    assert worker.reader.read(first)[0].counts.decoded.samples == 16  # as an idle worker holds its slabs
    assert worker.reader.read(second)[0].dropped_slabs
    assert worker.reader.read(first)[0].counts.storage.samples == 16


def test_a_node_that_was_killed_has_nothing_decoded_and_fills_anew(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(SAMPLES)
    node = start(folder, memory=3.5)
    worker = Worker(folder, node)
    assert worker.epoch(0) == 0
    worker.settle()
    assert worker.epoch(1) == SAMPLES
    ray.kill(node, no_restart=False)
    epochs = itertools.count(2)
    assert worker.epoch(next(epochs)) < SAMPLES  # the node may serve some before it dies
    eventually(lambda: worker.epoch(next(epochs)) == SAMPLES, "a cache that is full again")


def test_a_disk_keeps_decoded_samples_over_a_restart(make_folder: MakeFolder, start: Any, tmp_path: Path) -> None:
    folder = make_folder(SAMPLES)
    node = start(folder, memory=0.0, disk=[Disk(path=str(tmp_path / "disk"), max_bytes=100_000_000)])
    worker = Worker(folder, node)

    def knows_its_disk() -> bool:
        return "decoded on disk" in " ".join(ray.get(node.flow.remote(0.0), timeout=DEADLINE_S).log)

    eventually(knows_its_disk, "a disk whose speed is known")
    worker.epoch(0)
    eventually(lambda: stats_of(node).decoded_on_disk.samples == SAMPLES, "all samples decoded on disk")
    opened = folder.opened().total()
    assert worker.epoch(1) == SAMPLES
    ray.kill(node, no_restart=False)
    assert worker.epoch(2) == SAMPLES
    assert folder.opened().total() == opened


@pytest.mark.parametrize(
    ("options", "growth_said", "decoded"),
    [
        pytest.param({}, None, SAMPLES, id="as-they-said"),
        pytest.param({}, 0, SAMPLES, id="decoded-since"),
        pytest.param({"decoded": None}, GROWTH, 0, id="decoded-no-more"),
    ],
)
def test_decoded_samples_move_with_their_homes(
    options: dict[str, Any], growth_said: int | None, decoded: int, make_folder: MakeFolder, start: Any
) -> None:
    """From two nodes, nearly all samples move to one. Nothing is read from storage, and decoded samples stay decoded.

    This also holds if the nodes' last reports named other forms than they hold.
    """
    folder = make_folder(SAMPLES)
    nodes = {name: start(folder, memory=4.0, node=name, **options) for name in "ab"}
    workers = {name: Worker(folder, node) for name, node in nodes.items()}

    def use(version: int, speed: float, holders: Holders | None) -> None:
        weights = [NodeWeight("a", 10**9, 1.0), NodeWeight("b", 10**9, speed)]
        placement = place_samples(weights, num_samples=SAMPLES, lengths=folder.dataset.lengths, version=version)
        update = PlacementUpdate(placement, holders, nodes)
        ray.get([node.update_placement.remote(update) for node in nodes.values()], timeout=DEADLINE_S)
        for worker in workers.values():
            worker.placements.add(placement)

    def epoch() -> int:
        placements = workers["a"].placements
        requests = [PartRequest(block, part, forms=(FORM,)) for block in range(7) for part in placements.parts(block)]
        return sum(workers[request.block_part.home].part(request) for request in requests)

    use(1, 1.0, None)
    epoch()
    for worker in workers.values():
        worker.settle()
    assert epoch() == decoded
    opened = folder.opened().total()
    index, sizes = np.full(SAMPLES, -1, np.int16), DecodedSizes.none(SAMPLES)
    for number, name in enumerate("ab"):
        held = ray.get(nodes[name].holdings.remote(), timeout=DEADLINE_S)
        index[held.sample_ids] = number
        if growth_said is None:
            assert held.decoded is not None
            sizes.put(held.sample_ids, held.decoded)
        else:
            said = growth_said * folder.dataset.lengths(held.sample_ids)
            sizes.put(held.sample_ids, DecodedSizes(np.where(said > 0, FORM, ENCODED), said))
    use(2, 30.0, Holders(("a", "b"), index, sizes))
    assert epoch() == decoded
    assert folder.opened().total() == opened
    assert stats_of(nodes["b"]).decoded.samples >= 0.9 * decoded
