"""The prep worker: an actor that turns the raw bytes of a block into pixels."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas import runtime
from mbaas.cache.reader import CacheReader, Fetched, Raw
from mbaas.dataset import Dataset
from mbaas.errors import BadSampleError, StateError, WaitTimeoutError
from mbaas.messages import BadSample, BlockMeta, Probe, SampleSpec, WorkerLocation
from mbaas.order import SampleOrder
from mbaas.placement import PartRequest, Placement, PlacementHistory
from mbaas.prep.engine import EngineName
from mbaas.prep.engines import make_engine
from mbaas.prep.standstill import StallWatchdog
from mbaas.transforms import Pipeline

FETCH_TIMEOUT_S = 60.0
"""A worker waits so long for its cache node (or the node's successor) before the block ends in an error."""

REMOTE_TIMEOUT_S = 15.0
"""A worker waits so long for the cache node of another node before it turns to its own."""

STALL_WARNING_S = 20.0
"""After so long without a block begun or ended, a worker that has one in hand says in its log where it is."""

PROBE_SAMPLES = 16
"""How many samples `PrepWorker.probe` tries before it calls the whole dataset unreadable."""

PROBE_REPEATS = 5
"""The fastest of so many counts; the first also pays for warming up."""


Payload = dict[str, NDArray[Any]]
"""``image`` uint8[n, h, w, 3] (or as the pipeline says), ``label`` int64[n], ``sample_id`` int64[n], in
canonical order; if it is a part of a block, also ``row`` int64[n], the rows of the block that these are.
"""


@ray.remote(num_cpus=1)
class PrepWorker:
    """Makes blocks, one at a time; the bytes of the next are fetched meanwhile (two threads, one engine).

    Args:
        dataset: the samples.
        pipeline: what to do to them.
        engine: which one prepares.
        seed: of the feed; random transforms depend on it.
        threads: threads of the engine.
        on_bad_sample: "raise" ends a block at its first bad sample, "skip" leaves bad samples out.
        stuck_s: after which a worker that makes no progress is taken for stuck; it writes the stacks of its threads to
            its log well before.
        feed: that it belongs to, and with which it ends.
    """

    def __init__(
        self,
        dataset: Dataset,
        pipeline: Pipeline,
        *,
        engine: EngineName,
        seed: int,
        threads: int,
        on_bad_sample: str,
        stuck_s: float,
        feed: str,
    ) -> None:
        self._lock = threading.Lock()
        runtime.end_with(feed)
        self.engage(
            dataset,
            pipeline,
            feed=feed,
            engine=engine,
            seed=seed,
            threads=threads,
            on_bad_sample=on_bad_sample,
            stuck_s=stuck_s,
        )

    def engage(
        self,
        dataset: Dataset,
        pipeline: Pipeline,
        *,
        feed: str,
        engine: EngineName,
        seed: int,
        threads: int,
        on_bad_sample: str,
        stuck_s: float,
    ) -> None:
        """Work for a feed from now on, with the constructor's arguments; it still ends with the feed that hired it."""
        device_id = 0 if ray.get_gpu_ids() and engine == "dali" else None
        made = make_engine(engine, pipeline, seed=seed, threads=threads, device_id=device_id)
        with self._lock:
            self._feed, self._dataset, self._engine = feed, dataset, made
            self._skip = on_bad_sample == "skip"
            self._standstill = StallWatchdog(min(STALL_WARNING_S, stuck_s / 2))
            self._readers: dict[str, CacheReader] = {}
            self._local = threading.local()
            self._free_since = 0.0

    def place(self) -> WorkerLocation:
        """Where it runs and for whom; answers as soon as the actor is up."""
        return WorkerLocation(os.getpid(), ray.get_runtime_context().get_node_id(), self._feed)

    def probe(self) -> Probe:
        """Prepare one sample alone, to learn shape, dtype and cost.

        Raises:
            BadSampleError: none of the first `PROBE_SAMPLES` samples could be prepared; names the first.
        """
        with self._standstill:
            return self._probe()

    def _probe(self) -> Probe:
        reader, first_error = self._dataset.reader(), None
        for sample_id in range(min(PROBE_SAMPLES, len(self._dataset))):
            raw = np.empty(int(self._dataset.lengths(np.array([sample_id]))[0]), np.uint8)
            try:
                reader.read_into(sample_id, raw)
                return self._probe_one(raw, sample_id)
            except BadSampleError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _probe_one(self, raw: NDArray[np.uint8], sample_id: int) -> Probe:
        uri = self._dataset.uri(sample_id)
        spec = self._engine.spec(raw, uri)
        out = np.empty((1, *spec.shape), spec.dtype)
        if flaws := self._engine.prepare([raw], np.array([sample_id]), 0, out):
            raise BadSampleError(uri, flaws[0].reason)
        return Probe(spec, min(self._time_one(raw, sample_id, out) for _ in range(PROBE_REPEATS)))

    def _time_one(self, raw: NDArray[np.uint8], sample_id: int, out: NDArray[Any]) -> float:
        began = time.perf_counter()
        self._engine.prepare([raw], np.array([sample_id]), 0, out)
        return time.perf_counter() - began

    def configure(self, order: SampleOrder, spec: SampleSpec) -> None:
        """Tell the worker the order and the shape of a prepared sample."""
        self._order, self._spec = order, spec
        self._placements = PlacementHistory(order)
        self._node = ray.get_runtime_context().get_node_id()

    def update_placement(self, placement: Placement, caches: dict[str, Any]) -> None:
        """Tell the worker a new version of the homes, and the cache node of each node."""
        self._placements.add(placement)
        self._readers = {node: self._reader(node, cache) for node, cache in caches.items()}

    def set_threads(self, threads: int) -> None:
        """Prepare with so many threads, from the next block on."""
        with self._lock:
            self._engine.set_threads(threads)

    @ray.method(num_returns=2)
    def prepare(self, feed: str, request: PartRequest, leave_out: tuple[int, ...]) -> tuple[BlockMeta, Payload]:
        """Make one part of a block of a feed.

        ``leave_out`` are samples that were bad when the block was made before: they stay out, so that all consumers
        see the same set.

        Raises:
            StateError: the worker works for another feed by now.
        """
        with self._standstill:
            return self._prepare(feed, request, leave_out)

    def _prepare(self, feed: str, request: PartRequest, leave_out: tuple[int, ...]) -> tuple[BlockMeta, Payload]:
        self._check(feed)
        arrived = time.perf_counter()
        block, rows_of_block = request.block, self._placements.rows(request)
        fetched, raw, is_remote = self._fetch(request)
        ids = self._placements.ids(request)
        with self._lock:
            self._check(feed)
            started = time.perf_counter()
            fetch_s = max(0.0, started - max(arrived, self._free_since))
            images, rows, bad = self._make(block, ids, raw, fetched.errors, leave_out)
            del raw
            ended = self._free_since = time.perf_counter()
        if bad and not self._skip:
            images, rows, bad = images[:0], rows[:0], bad[:1]
        ids = ids[rows]
        payload = {"image": images, "label": self._dataset.labels(ids), "sample_id": ids}
        if rows_of_block is not None:
            payload["row"] = rows_of_block[rows]
        meta = BlockMeta(
            block=block,
            samples=len(ids),
            bad=tuple(bad),
            fetch_s=fetch_s,
            prep_s=ended - started,
            hits=0 if is_remote else fetched.hits,
            remote=fetched.moved + (fetched.hits if is_remote else 0),
            disk=fetched.disk,
            misses=fetched.misses,
            hit_bytes=0 if is_remote else fetched.hit_bytes,
            remote_bytes=fetched.moved_bytes + (fetched.hit_bytes if is_remote else 0),
            disk_bytes=fetched.disk_bytes,
            storage_bytes=fetched.storage_bytes,
            nbytes=sum(array.nbytes for array in payload.values()),
        )
        return meta, payload

    def _check(self, feed: str) -> None:
        if feed != self._feed:
            raise StateError(f"a block of feed {feed!r} was asked of a worker that works for {self._feed!r}")

    def _make(
        self, block: int, ids: NDArray[np.int64], raw: Raw, unread: dict[int, str], leave_out: tuple[int, ...]
    ) -> tuple[NDArray[Any], NDArray[np.intp], list[BadSample]]:
        """Images of the good rows, the numbers of these rows, and the bad samples."""
        reasons = dict(unread)
        reasons.update(dict.fromkeys(np.flatnonzero(np.isin(ids, leave_out)).tolist(), "bad when first made"))
        rows = np.array([row for row in range(len(ids)) if row not in reasons], np.intp)
        out = self._buffer(len(rows))
        flaws = self._engine.prepare([raw[row] for row in rows], ids[rows], self._order.epoch_of(block), out)
        reasons.update({int(rows[flaw.row]): flaw.reason for flaw in flaws})
        if flaws:
            good = np.setdiff1d(np.arange(len(rows)), [flaw.row for flaw in flaws])
            out, rows = out[good], rows[good]
        bad = [
            BadSample(int(ids[row]), self._dataset.uri(int(ids[row])), reason)
            for row, reason in sorted(reasons.items())
        ]
        return out, rows, bad

    def _fetch(self, request: PartRequest) -> tuple[Fetched, Raw, bool]:
        """The bytes of a share: from the cache of its home; if that is gone, from this node's own, which reads what it
        lacks from storage. Also whether they came from another node.
        """
        home = request.block_part.home
        is_remote = home != self._node and home in self._readers
        if is_remote:
            try:
                return (*self._readers[home].read_packed(request), True)
            except (ray.exceptions.RayError, WaitTimeoutError):  # its node is gone; new homes are on their way
                pass
        return (*self._readers[self._node].read(request), False)

    def _reader(self, node: str, cache: Any) -> CacheReader:
        """The reader of a node's cache; a new one for a cache that took another's place."""
        known = self._readers.get(node)
        if known is not None and known.node == cache:
            return known
        return CacheReader(cache, timeout_s=FETCH_TIMEOUT_S if node == self._node else REMOTE_TIMEOUT_S)

    def _buffer(self, rows: int) -> NDArray[Any]:
        """Memory for ``rows`` prepared samples: one buffer a thread, used again for each block (Ray copies it
        out).
        """
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            shape = (self._order.block_samples, *self._spec.shape)
            buffer = self._local.buffer = np.empty(shape, self._spec.dtype)
        return buffer[:rows]
