"""A cache node on real Ray serves exactly the bytes of files that record each opening."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from watched_files import DEADLINE_S, Folder, eventually

from mbaas.cache.node import CacheNodeActor
from mbaas.cache.planner import COMPACTED_SHARE
from mbaas.cache.reader import CacheReader, FetchReply, SlabViews
from mbaas.cache.slab import TemporaryReason
from mbaas.cache.stats import CacheStats
from mbaas.errors import ConfigError, PlacementGoneError, WaitTimeoutError
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import (
    ENCODED,
    BlockPart,
    Holders,
    MovedIn,
    NodeWeight,
    PartRequest,
    Placement,
    PlacementHistory,
    PlacementUpdate,
    place_samples,
)
from mbaas.settings import Disk
from support.leaks import store_use
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
pytestmark = pytest.mark.usefixtures("ray_clean")
MakeFolder = Callable[..., Folder]
BLOCK = 16


@pytest.fixture
def start(ray_clean: None) -> Iterator[Callable[..., Any]]:
    """Start cache nodes that check their invariants after every event, and end them after the test."""
    nodes = []

    def start_node(folder: Folder, *, share: float = 1.0, **options: Any) -> Any:
        order = SampleOrder(len(folder.dataset), seed=5, block_samples=options.pop("block_samples", BLOCK))
        budget = int(folder.dataset.total_bytes * share)
        settings = {"cache_bytes": budget, "readahead_bytes": 0, "threads": 3} | options
        node = CacheNodeActor.options(max_restarts=-1).remote(folder.dataset, order, **settings)
        nodes.append(node)
        return node

    yield start_node
    for node in nodes:
        ray.kill(node)


def order_of(folder: Folder, block_samples: int = BLOCK) -> SampleOrder:
    return SampleOrder(len(folder.dataset), seed=5, block_samples=block_samples)


def stats_of(node: Any) -> CacheStats:
    stats: CacheStats = ray.get(node.stats.remote(), timeout=DEADLINE_S)
    return stats


def read_epoch(folder: Folder, reader: CacheReader, epoch: int) -> list[FetchReply]:
    """Read an epoch and compare every sample with its file."""
    order, contents, answers = order_of(folder), folder.contents(), []
    for block in range(epoch * order.blocks_per_epoch, (epoch + 1) * order.blocks_per_epoch):
        fetched, raw = reader.read(PartRequest(block))
        assert [view.tobytes() for view in raw] == [contents[i] for i in order.sample_ids(block)]
        answers.append(fetched)
    return answers


@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_hits_are_exactly_the_cached_samples(share: float, make_folder: MakeFolder, start: Any) -> None:
    """103 samples in blocks of 16, D = 103. Epoch 0 opens D files, each later one D - cached, none twice."""
    folder = make_folder(103)
    node = start(folder, share=share)
    reader = CacheReader(node)
    assert sum(f.counts.local.samples for f in read_epoch(folder, reader, 0)) == 0
    assert folder.opened().total() == 103
    cached = stats_of(node).cached_samples
    assert {0.0: cached == 0, 0.35: 20 < cached < 60, 1.0: cached == 103}[share], cached
    for epoch in (1, 2):
        before = folder.opened()
        answers = read_epoch(folder, reader, epoch)
        assert sum(f.counts.local.samples for f in answers) == cached
        opened = folder.opened() - before
        assert opened.total() == 103 - cached == sum(f.counts.storage.samples for f in answers)
        assert max(opened.values(), default=1) == 1
    stats = stats_of(node)
    assert [stats.epochs[e].reads.samples for e in range(3)] == [103, 103 - cached, 103 - cached]
    assert [stats.epochs[e].fetched.local.samples for e in range(3)] == [0, cached, cached]
    assert (
        stats.total.reads.nbytes
        == folder.dataset.total_bytes + 2 * sum(folder.dataset.lengths(np.arange(103))) - 2 * stats.cached_bytes
    )
    assert stats.cached_bytes <= stats.budget_bytes
    assert stats.cached_slabs <= 7
    assert stats.peak_transient_bytes <= BLOCK * 4000, "blocks were requested one at a time"
    assert stats.fetching_bytes == stats.readahead_bytes == 0


def test_slabs_that_are_let_go_are_told_to_those_who_have_them_and_to_nobody_else(
    make_folder: MakeFolder, start: Any
) -> None:
    """Otherwise a node would send longer lists with every move."""
    folder = make_folder(103)
    node = start(folder)
    reader = CacheReader(node)
    read_epoch(folder, reader, 0)
    everything = np.arange(103)
    for epoch in (1, 2, 3):
        held = stats_of(node).cached_slabs
        lengths = folder.dataset.lengths(everything)
        handed = node.hand_over.remote(everything, np.ones(103, np.bool_), lengths, form=ENCODED, lends=False)
        ray.get(handed, timeout=DEADLINE_S)
        answers = read_epoch(folder, reader, epoch)
        assert [len(answer.dropped_slabs) for answer in answers] == [held, *[0] * (len(answers) - 1)]
        newcomer = CacheReader(node)
        assert not any(answer.dropped_slabs for answer in read_epoch(folder, newcomer, epoch))


def test_samples_are_given_in_the_form_that_is_asked_for_or_stay(make_folder: MakeFolder, start: Any) -> None:
    """The bytes do not decide: a decoded sample may be as large as its file."""
    folder = make_folder(103)
    node = start(folder)
    read_epoch(folder, CacheReader(node), 0)
    asked = np.arange(103), np.ones(103, np.bool_), folder.dataset.lengths(np.arange(103))
    for form, kept in ((7, 103), (ENCODED, 0)):
        given = ray.get(node.hand_over.remote(*asked, form=form, lends=False), timeout=DEADLINE_S)
        assert given.included.all() == given.included.any() == (form == ENCODED)
        assert {row: (each.form, each.nbytes) for row, each in given.other.items()} == (
            {} if form == ENCODED else dict.fromkeys(range(103), (ENCODED, 0))
        )
        assert stats_of(node).cached_samples == kept


def placed(folder: Folder, version: int, speed: float) -> Placement:
    """Homes on nodes "a" and "b", where "b" has the given speed and "a" has 1."""
    weights = [NodeWeight("a", 10**9, 1.0), NodeWeight("b", 10**9, speed)]
    return place_samples(weights, num_samples=103, lengths=folder.dataset.lengths, version=version)


def tell(nodes: dict[str, Any], placement: Placement, before: Placement | None = None) -> None:
    """Send all nodes a placement; each keeps the samples of its earlier homes."""
    kept = None if before is None else Holders(("a", "b"), before.of(np.arange(103)).astype(np.int16))
    update = PlacementUpdate(placement, kept, nodes)
    ray.get([node.update_placement.remote(update) for node in nodes.values()], timeout=DEADLINE_S)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_part_that_was_cut_before_samples_moved_is_read_from_where_they_are_now(
    at_once: bool, make_folder: MakeFolder, start: Any
) -> None:
    """The part is still prepared at its earlier home, even during the move. Nothing is read from storage twice."""
    folder = make_folder(103)
    order, contents = order_of(folder), folder.contents()
    nodes = {name: start(folder, node=name) for name in "ab"}
    readers = {name: CacheReader(node) for name, node in nodes.items()}

    def read(placements: PlacementHistory, version: int) -> list[FetchReply]:
        answers = []
        for block in range(order.blocks_per_epoch):
            for part in placements.parts(block):
                request = PartRequest(block, part._replace(version=version))
                fetched, raw = readers[part.home].read(request)
                assert [view.tobytes() for view in raw] == [contents[i] for i in placements.ids(request)]
                answers.append(fetched)
        return answers

    placements = PlacementHistory(order)
    before, after = placed(folder, 1, 1.0), placed(folder, 2, 4.0)
    tell(nodes, before)
    placements.add(before)
    read(placements, 1)
    tell(nodes, after, before)
    moved = int(((before.of(np.arange(103)) == 0) & (after.of(np.arange(103)) == 1)).sum())
    assert moved > 10
    assert ray.get(nodes["b"].move_in.remote(0.0), timeout=DEADLINE_S) == MovedIn(0, moved), "there was no time"
    moving = nodes["b"].move_in.remote(DEADLINE_S)
    if not at_once:
        assert ray.get(moving, timeout=DEADLINE_S) == MovedIn(moved)
    for fetched in read(placements, 1):
        assert fetched.counts.storage.samples == 0
    ray.get(moving, timeout=DEADLINE_S)
    assert stats_of(nodes["b"]).cached_samples == int((after.of(np.arange(103)) == 1).sum()), "it lent them only"
    remaining = stats_of(nodes["a"]).cached_bytes

    def compacted() -> bool:
        used_bytes = ray.get(nodes["a"].flow.remote(0.0), timeout=DEADLINE_S).used_bytes
        return remaining <= used_bytes <= remaining / (1 - COMPACTED_SHARE)

    wait_until(compacted, "the bytes of samples that moved are free again")
    assert folder.opened().total() == 103


def test_what_a_node_kept_that_died_is_read_from_storage_and_does_not_count_as_moved(
    make_folder: MakeFolder, start: Any
) -> None:
    folder = make_folder(103)
    nodes = {name: start(folder, node=name) for name in "ab"}
    before, after = placed(folder, 1, 1.0), placed(folder, 2, 4.0)
    tell(nodes, after, before)
    ray.kill(nodes["a"])
    assert ray.get(nodes["b"].move_in.remote(DEADLINE_S), timeout=DEADLINE_S) == MovedIn()
    moved = (before.of(np.arange(103)) == 0) & (after.of(np.arange(103)) == 1)
    assert stats_of(nodes["b"]).cached_samples == int(moved.sum())


def test_a_part_that_only_a_dead_coordinator_knew_is_given_up_and_one_not_known_yet_is_waited_for(
    make_folder: MakeFolder, start: Any
) -> None:
    folder = make_folder(103)
    node, weights = start(folder, node="a"), [NodeWeight("a", 10**9, 1.0)]
    placement = place_samples(weights, num_samples=103, lengths=folder.dataset.lengths, version=2)
    ray.get(node.update_placement.remote(PlacementUpdate(placement, None, {"a": node})), timeout=DEADLINE_S)
    with pytest.raises(PlacementGoneError, match=r"version 1 of the placement is not known here, versions \[2\] are"):
        CacheReader(node, timeout_s=DEADLINE_S).read(PartRequest(0, BlockPart("a", 1)))
    with pytest.raises(WaitTimeoutError, match="waited 1 s for the cache node's block 0"):
        CacheReader(node, timeout_s=1.0).read(PartRequest(0, BlockPart("a", 3)))


@pytest.mark.parametrize("share", [0.35, 1.0])
def test_read_ahead_changes_when_files_are_read_and_nothing_else(
    share: float, make_folder: MakeFolder, start: Any
) -> None:
    """A window of two blocks. The files opened match the epoch counts, and each later epoch reads D - cached."""
    folder = make_folder(103)
    readahead_bytes = 2 * BLOCK * 4000
    node = start(folder, share=share, readahead_bytes=readahead_bytes)
    reader = CacheReader(node)
    for epoch in range(3):
        answers = read_epoch(folder, reader, epoch)
        cached = stats_of(node).cached_samples
        assert sum(f.counts.local.samples for f in answers) == (cached if epoch else 0)
    stats = stats_of(node)
    assert [stats.epochs[e].reads.samples for e in range(3)] == [103, 103 - cached, 103 - cached]
    reads = lambda: stats_of(node).total.reads.samples  # noqa: E731
    eventually(lambda: reads() == folder.opened().total(), "each opened file is counted")
    assert stats.readahead_bytes <= readahead_bytes
    assert stats.peak_transient_bytes <= readahead_bytes + BLOCK * 4000


def test_read_ahead_reads_before_anybody_asks(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(103)
    node = start(folder, share=0.0, readahead_bytes=2 * BLOCK * 4000)
    CacheReader(node).read(PartRequest(0))
    ahead = {folder.dataset.uri(i) for i in order_of(folder).sample_ids(1)}
    eventually(lambda: ahead <= set(folder.opened()), "block 1 is read")
    assert stats_of(node).readahead_blocks >= 2


def test_views_are_in_shared_memory_and_read_only(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(40)
    reader = CacheReader(start(folder, share=0.5))
    _, first = reader.read(PartRequest(0))
    for view in first:
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            view.flags.writeable = True
        assert "plasma" in mapping_of(view.ctypes.data)
    _, again = reader.read(PartRequest(0))
    kept = [a.ctypes.data == b.ctypes.data for a, b in zip(first, again, strict=True)]
    assert all(kept), "budget for all of the first block: the same memory, not a copy"


def mapping_of(address: int) -> str:
    """The file mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            return line
    return "nothing"


def test_transient_slabs_go_when_their_reader_lets_go(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(24, smallest=200_000, largest=300_000)
    node = start(folder, share=0.0, block_samples=8)
    before = store_use().primary_bytes
    fetched, raw = CacheReader(node).read(PartRequest(0))
    assert store_use().primary_bytes - before >= fetched.counts.storage.nbytes > 1_600_000
    del fetched
    assert raw[0].any(), "the rows alone keep it"
    del raw
    eventually(lambda: store_use().primary_bytes - before < 100_000, "the slab is gone")


def test_references_are_not_sent_again_to_who_holds_the_slab(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(64)
    node, views = start(folder, share=0.6), SlabViews()
    first: FetchReply = ray.get(node.fetch.remote(PartRequest(0), views.known()))
    assert None not in first.slab_refs
    expected = [view.tobytes() for view in views.rows(first)]
    again: FetchReply = ray.get(node.fetch.remote(PartRequest(0), views.known()))
    assert [ref is None for ref in again.slab_refs] == [slab > 0 for slab in again.slab_ids]
    assert [view.tobytes() for view in views.rows(again)] == expected
    unasked: FetchReply = ray.get(node.fetch.remote(PartRequest(0)))
    assert None not in unasked.slab_refs


@ray.remote(num_cpus=0)
class Worker:
    """A process that reads every `step`-th block, as a prep worker does, and checks each sample."""

    def __init__(self, folder: Folder, node: Any) -> None:
        self.folder, self.contents, self.reader = folder, folder.contents(), CacheReader(node)

    def read(self, first: int, stop: int, step: int) -> int:
        order, hits = order_of(self.folder), 0
        for block in range(first, stop, step):
            fetched, raw = self.reader.read(PartRequest(block))
            assert [view.tobytes() for view in raw] == [self.contents[i] for i in order.sample_ids(block)]
            hits += fetched.counts.local.samples
        return hits

    def read_until(self, enough: Path, first: int, step: int) -> int:
        """Read until a file exists; return the number of blocks."""
        for block in itertools.count(first, step):
            if enough.exists():
                return (block - first) // step
            self.read(block, block + 1, 1)
        raise AssertionError("unreachable")


@pytest.fixture
def start_worker(ray_clean: None) -> Iterator[Callable[..., Any]]:
    """Start workers, and end them after the test."""
    workers = []

    def start_one(folder: Folder, node: Any) -> Any:
        workers.append(Worker.remote(folder, node))
        return workers[-1]

    yield start_one
    for worker in workers:
        ray.kill(worker)


def test_two_workers_at_the_same_time_read_each_file_once(
    make_folder: MakeFolder, start: Any, start_worker: Any
) -> None:
    """7 blocks an epoch, 3 epochs: one miss per sample, in the epoch that requests it first."""
    folder = make_folder(103)
    node = start(folder)
    workers = [start_worker(folder, node) for _ in range(2)]
    hits = ray.get([w.read.remote(i, 21, 2) for i, w in enumerate(workers)], timeout=60)
    assert sum(hits) == 2 * 103
    assert set(folder.opened().values()) == {1}
    assert len(folder.opened()) == 103


def test_fetches_of_different_blocks_overlap(make_folder: MakeFolder, start: Any) -> None:
    """A file of block 0 opens only after a file of block 3 was requested, and vice versa."""
    folder = make_folder(64)
    order = order_of(folder)
    folder.invite([int(order.sample_ids(0)[5]), int(order.sample_ids(3)[7])])
    node = start(folder)
    answers = ray.get([node.fetch.remote(PartRequest(0)), node.fetch.remote(PartRequest(3))], timeout=DEADLINE_S)
    assert [a.errors for a in answers] == [{}, {}]


def test_the_same_block_at_the_same_time_is_read_once(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(64)
    node = start(folder, share=0.1)
    answers = ray.get([node.fetch.remote(PartRequest(1)) for _ in range(5)], timeout=DEADLINE_S)
    assert [a.counts.storage.samples for a in answers] == 5 * [16]
    assert len({a.slab_ids for a in answers}) == 1
    assert folder.opened().total() == 16
    later: FetchReply = ray.get(node.fetch.remote(PartRequest(1)))
    cached = stats_of(node).cached_samples
    assert (later.counts.local.samples, later.counts.storage.samples) == (cached, 16 - cached)
    assert folder.opened().total() == 32 - cached


def test_a_file_deleted_after_listing_is_an_error_of_its_row_until_it_is_back(
    make_folder: MakeFolder, start: Any
) -> None:
    folder = make_folder(40)
    node, order, contents = start(folder, storage_s=0.0), order_of(folder), folder.contents()
    absent = int(order.sample_ids(1)[4])
    path = Path(folder.dataset.uri(absent))
    path.unlink()
    reader = CacheReader(node)
    for epoch in range(4):
        if epoch == 2:
            path.write_bytes(contents[absent])
        for block in range(3 * epoch, 3 * epoch + 3):
            ids = order.sample_ids(block).tolist()
            fetched, raw = reader.read(PartRequest(block))
            missing = [ids.index(absent)] if absent in ids and epoch < 2 else []
            assert list(fetched.errors) == missing
            assert all("gone" in reason for reason in fetched.errors.values())
            expected = [b"" if row in missing else contents[i] for row, i in enumerate(ids)]
            assert [view.tobytes() for view in raw] == expected
        size = len(contents[absent]) if epoch < 2 else 0
        assert stats_of(node).cached_bytes == folder.dataset.total_bytes - size
    assert folder.opened()[str(path)] == 3, "tried in epochs 0, 1 and 2, and cached since"
    assert stats_of(node).epochs[1].failures == 1


def test_a_killed_node_comes_back_and_fills_anew(make_folder: MakeFolder, start: Any, start_worker: Any) -> None:
    """kill -9 mid-epoch: rows in use stay readable, and the successor answers the next read."""
    folder = make_folder(103)
    node, contents = start(folder, readahead_bytes=BLOCK * 4000), folder.contents()
    reader, other = CacheReader(node), start_worker(folder, node)
    read_epoch(folder, reader, 0)
    _, in_hand = reader.read(PartRequest(7))
    assert ray.get(other.read.remote(0, 7, 1)) == 103
    before = stats_of(node)
    os.kill(ray.get(node.pid.remote()), signal.SIGKILL)
    assert ray.get(other.read.remote(7, 21, 1), timeout=DEADLINE_S) == 103, "one epoch to fill, one of hits"
    read_epoch(folder, reader, 1)
    assert [v.tobytes() for v in in_hand] == [contents[i] for i in order_of(folder).sample_ids(7)]
    after = stats_of(node)
    assert after.incarnation != before.incarnation
    assert after.cached_samples == 103
    assert set(folder.opened().values()) == {2}


def test_a_node_killed_while_it_reads_is_outlived(
    make_folder: MakeFolder, start: Any, start_worker: Any, tmp_path: Path
) -> None:
    """kill -9 three times while two workers read and compare each sample with its file."""
    folder = make_folder(103)
    node = start(folder, share=0.5, readahead_bytes=2 * BLOCK * 4000)
    enough = tmp_path / "enough"
    pending = [start_worker(folder, node).read_until.remote(enough, i, 2) for i in range(2)]
    for _ in range(3):
        eventually(lambda: reads_of(node) > 20, "the node reads")
        os.kill(ray.get(node.pid.remote(), timeout=DEADLINE_S), signal.SIGKILL)
    eventually(lambda: reads_of(node) > 20, "the last successor reads")
    enough.touch()
    assert min(ray.get(pending, timeout=DEADLINE_S)) > 0


def reads_of(node: Any) -> int:
    """Samples read from storage by the current incarnation; 0 while the actor is unavailable."""
    try:
        return stats_of(node).total.reads.samples
    except ray.exceptions.ActorUnavailableError:
        return 0


def test_a_killed_nodes_memory_is_given_back(make_folder: MakeFolder, start: Any) -> None:
    """Slabs of a dead node are freed once their readers have received an answer from its successor."""
    folder = make_folder(24, smallest=200_000, largest=300_000)
    node = start(folder, block_samples=8)
    before, reader = store_use().primary_bytes, CacheReader(node)
    for block in range(3):
        reader.read(PartRequest(block))
    os.kill(ray.get(node.pid.remote()), signal.SIGKILL)
    for block in range(3, 6):
        reader.read(PartRequest(block))
    limit = folder.dataset.total_bytes + 100_000
    eventually(lambda: store_use().primary_bytes - before < limit, "the old slabs are gone")


def test_a_node_that_does_not_answer_is_named_in_time(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(16)
    (folder.watch / "meeting").write_text(f"{folder.dataset.uri(3)}\nsomebody-who-never-comes")
    reader = CacheReader(start(folder), timeout_s=1.5)
    with pytest.raises(WaitTimeoutError, match=r"1\.5 s for the cache node's block 0: it did not answer"):
        reader.read(PartRequest(0))


def test_the_process_ends_with_its_threads(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(40)
    node = start(folder, readahead_bytes=10**6)
    CacheReader(node).read(PartRequest(0))
    pid = ray.get(node.pid.remote())
    node.__ray_terminate__.remote()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the process is gone")


@pytest.mark.meets_bugs
def test_a_bug_in_reading_reaches_the_caller_and_is_no_bad_sample(make_folder: MakeFolder, start: Any) -> None:
    """No sample may be skipped, and nothing of the failed read remains: later the same block is read in full."""
    folder = make_folder(64)
    node = start(folder, share=0.5, readahead_bytes=2 * BLOCK * 4000)
    broken = folder.watch / "broken"
    broken.touch()
    with pytest.raises(MemoryError, match="a bug, not a bad file"):
        ray.get(node.fetch.remote(PartRequest(0)), timeout=DEADLINE_S)
    eventually(lambda: at_rest(stats_of(node)), "what was read ahead has failed, too")
    broken.unlink()
    assert stats_of(node).cached_bytes == 0
    assert folder.opened().total() <= 4 * 2 * 3, "block 0 and 3 ahead, 2 slabs each, 3 threads that stop at once"
    answers = read_epoch(folder, CacheReader(node), 0)
    assert sum(f.counts.storage.samples for f in answers) == 64


def at_rest(stats: CacheStats) -> bool:
    """True if no read is running and nothing is held besides the cache."""
    return stats.readahead_blocks == stats.readahead_bytes == stats.fetching_bytes == 0


def test_a_negative_block_is_refused(make_folder: MakeFolder, start: Any) -> None:
    with pytest.raises(ConfigError, match="a block's number must be at least 0, got -1"):
        ray.get(start(make_folder(16)).fetch.remote(PartRequest(-1)), timeout=DEADLINE_S)


def test_a_node_that_cannot_be_made_has_nothing_to_close(make_folder: MakeFolder, start: Any) -> None:
    folder = make_folder(16)
    file = next(folder.root.rglob("*.jpg"))
    node = start(folder, disk=(Disk(path=str(file), max_bytes=1 << 20),))
    with pytest.raises(ray.exceptions.ActorDiedError, match="needs a folder that it may write to") as refused:
        ray.get(node.stats.remote(), timeout=DEADLINE_S)
    assert "__ray_shutdown__" not in log_of(refused.value)


def log_of(died: ray.exceptions.ActorDiedError) -> str:
    """Output of an actor's process whose constructor raised."""
    pid = re.search(r"\(pid=(\d+),", str(died))
    assert pid is not None, died
    eventually(lambda: not Path(f"/proc/{pid[1]}").exists(), "the process is gone")
    logs = Path(ray._private.worker.global_worker.node.get_session_dir_path()).glob(f"logs/worker-*-{pid[1]}.err")
    return "".join(log.read_text(errors="replace") for log in logs)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_part_that_waits_for_storage_holds_nobody_and_comes_whole(
    share: float, make_folder: MakeFolder, start: Any
) -> None:
    """One thread and one slot. While a file of block 2 fails, other blocks are read, and nothing of block 2 twice."""
    folder = make_folder(103)
    node = start(folder, share=share, threads=1, max_fetches=1, storage_s=600.0)
    reader, order, contents = CacheReader(node), order_of(folder), folder.contents()
    away = int(order.sample_ids(2)[5])
    name = Path(folder.dataset.uri(away)).name
    switch = folder.watch / f"away-{name}"
    switch.touch()
    reply, _ = reader.read(PartRequest(2))
    assert list(reply.errors) == [5]
    assert isinstance(reply.errors[5], TemporaryReason)
    assert "Stale file handle" in reply.errors[5]
    opened = folder.opened()
    for block in (0, 1, 3):
        reply, raw = reader.read(PartRequest(block))
        assert [view.tobytes() for view in raw] == [contents[i] for i in order.sample_ids(block)]
        assert list(reader.read(PartRequest(2))[0].errors) == [5]
    again = {Path(path).name for path in folder.opened() - opened}
    others = {Path(folder.dataset.uri(int(i))).name for i in order.sample_ids(2)} - {name}
    assert not again & others

    def is_told() -> bool:
        log = ray.get(node.flow.remote(0.0), timeout=DEADLINE_S).log
        return any("storage does not give 1 sample" in line for line in log)

    eventually(is_told, "the log says so")
    flow, stats = ray.get([node.flow.remote(0.0), node.stats.remote()], timeout=DEADLINE_S)
    assert stats.cached_bytes <= flow.used_bytes <= flow.budget_bytes == stats.budget_bytes
    assert (flow.used_bytes > 0) == (share > 0), "awaited samples count, too"
    assert min(flow.cpu_s, stats.cpu_s) > 0
    calls = (flow.incarnation + 1, 99), (flow.incarnation, flow.logged), (0, 0)
    later = [ray.get(node.flow.remote(0.0, noted), timeout=DEADLINE_S) for noted in calls]  # one after the other
    assert [each.noted for each in later] == [0, flow.logged, flow.logged], "another coordinator continues there"
    switch.unlink()
    eventually(lambda: not reader.read(PartRequest(2))[0].errors, "block 2 comes")
    reply, raw = reader.read(PartRequest(2))
    assert [view.tobytes() for view in raw] == [contents[i] for i in order.sample_ids(2)]
