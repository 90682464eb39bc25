"""The prep worker: an actor that turns encoded samples into the arrays of a block."""

from __future__ import annotations

import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
from msgspec.structs import replace
from numpy.typing import NDArray

from mbaas.cache.reader import CacheReader, EncodedRows, FetchReply
from mbaas.cache.slab import TemporaryReason
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError, ResourceError, StateError, WaitTimeoutError, shown
from mbaas.memory import pinned, slots
from mbaas.memory.slots import SlotMemory
from mbaas.prep.decoded import DecodedBuffer, DecodedRows, handed_in
from mbaas.prep.engines import Batch, Encoded, Engine, Prepared, check_packages, make_engine, possible_engines
from mbaas.prep.probe import first_probe, probe_engines
from mbaas.prep.process import StallWatchdog, choose_gpu
from mbaas.ray_cluster import bugs, leftovers, resources, store
from mbaas.samples.fields import SAMPLE_ID, Arrays, Field, Packed, concatenated
from mbaas.samples.order import in_share
from mbaas.samples.placement import PartRequest, Placement, PlacementHistory
from mbaas.transforms import Pipeline
from mbaas.wire.blocks import ROW, BlockMeta, PrepConfig, WorkerBrief, WorkerLocation, own_pipeline_key
from mbaas.wire.samples import BadSample, EngineProbe, PipelineReport, Probe, SampleSpec

FETCH_TIMEOUT_S = 60.0
"""Timeout for a fetch from the local cache node (or its successor); after that, the block fails."""

REMOTE_TIMEOUT_S = 15.0
"""Timeout for a fetch from another node's cache node; after that, the worker falls back to its local cache node."""

STALL_WARNING_S = 20.0
"""Seconds without progress on a block before the worker dumps the stacks of its threads to its log."""


MOST_ENGINES = 16
"""Engines kept for pipelines that consumers brought; the one unused for longest is dropped. Making one takes
milliseconds with the cpu engine.
"""


class _Buffers(threading.local):
    # Memory for samples of blocks that are not made in slots, reused for each block of any pipeline. One per thread,
    # because two calls overlap: Ray copies the first call's result while the other thread writes the next block. A
    # subclass of `threading.local` runs `__init__` in each thread at its first access.
    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self.decoded = DecodedBuffer()

    def samples(self, rows: int, made: Field) -> NDArray[Any]:
        like = made.empty(rows)  # takes no memory unless it is written
        if self._memory.nbytes < like.nbytes:
            self._memory = np.empty(like.nbytes, np.uint8)
        return self._memory[: like.nbytes].view(like.dtype).reshape(like.shape)


UNUSED_S = 600.0
"""A pipeline is forgotten when it was not used for this long. Its slots may be read until then."""


@dataclass(eq=False)
class _Line:
    """A pipeline of the feed, and what prepares samples with it.

    ``slots`` have a block each; None where the system does not support them.
    """

    make: Callable[[], Engine]
    made: Field
    block_samples: int
    slots: SlotMemory | None
    used_at: float = 0.0

    @functools.cached_property
    def engine(self) -> Engine:
        return self.make()

    def close(self) -> None:
        """Release the engine's threads and device memory; it is made again when it is needed."""
        if "engine" in vars(self):
            self.engine.close()
            del self.engine


@dataclass(eq=False)
class _Work:
    """State of the feed that a worker is engaged for; `PrepWorker.engage` replaces it as a whole.

    Attributes:
        line: the feed's pipeline.
        lines: the pipelines that consumers brought, by fingerprint, the most recently used last. Engines and slots are
            used under the worker's lock only.
        gpu: the engine's GPU; None if it runs on the CPU.
        placements: how blocks are cut into parts; empty until the first `PrepWorker.update_placement`.
        readers: node id -> reader of its cache; replaced as a whole, never modified.
        free_since: when the engine became free, on the clock of `time.perf_counter`.
        cpu_before_s: CPU-seconds that the process had used for other feeds before.
    """

    brief: WorkerBrief
    dataset: Dataset
    line: _Line
    watchdog: StallWatchdog
    buffers: _Buffers
    gpu: pinned.Gpu | None
    placements: PlacementHistory
    readers: dict[str, CacheReader] = field(default_factory=dict)
    free_since: float = 0.0
    cpu_before_s: float = 0.0
    lines: dict[str, _Line] = field(default_factory=dict)

    def close(self) -> None:
        """Release the engines' threads and device memory."""
        for line in (self.line, *self.lines.values()):
            line.close()

    def line_of(self, fingerprint: str | None) -> _Line:
        """Return the feed's pipeline, or one that a consumer brought.

        Raises:
            StateError: the feed does not know the pipeline any more.
        """
        if fingerprint is None:
            return self.line
        line = self.lines.pop(fingerprint, None) or _own_line(self.brief, self.dataset, fingerprint)
        self.lines[fingerprint] = line
        line.used_at = time.monotonic()
        for other in [*self.lines.values()][:-MOST_ENGINES]:
            other.close()
        for unused in [key for key, each in self.lines.items() if line.used_at - each.used_at > UNUSED_S]:
            del self.lines[unused]
        return line

    def prepared(
        self,
        engine: Engine,
        epoch: int,
        ids: NDArray[np.int64],
        encoded: Sequence[Encoded],
        pieces: Iterable[tuple[slice, DecodedRows]],
        out: NDArray[Any],
    ) -> Prepared:
        """Prepare samples in ``out``, piece by piece (see `handed_in`)."""
        done: list[Prepared] = []
        for piece, keep in pieces:
            batch = Batch(encoded[piece], ids[piece], epoch, self.dataset.values_in(epoch, ids[piece]))
            found = engine.prepare(batch, out[piece], keep)
            done.append(replace(found, bad=[replace(bad, row=bad.row + piece.start) for bad in found.bad]))
        if len(done) == 1:
            return done[0]
        differ = isinstance(done[0].made, Packed)
        made = concatenated([each.made for each in done]) if differ else out
        known = {name: concatenated([each.known[name] for each in done]) for name in done[0].known}
        return Prepared([bad for each in done for bad in each.bad], known, made)

    def asked_for(self, request: PartRequest, stored: NDArray[np.int64], reply: FetchReply) -> dict[int, int]:
        """Return the samples that the cache requests in decoded form: row of the part -> id of the stored sample."""
        if not len(reply.hand_in):
            return {}
        wanted = self.placements.stored(request)[reply.hand_in]
        # If a sample is drawn several times, only its first row is handed in.
        found, first = np.unique(stored, return_index=True)
        rows = first[np.searchsorted(found, wanted)]
        return dict(zip(rows.tolist(), wanted.tolist(), strict=True))


class PrepWorker:
    """An actor that prepares blocks for one feed at a time.

    It has two threads and one engine: while one thread prepares a block, the other fetches the bytes of the next.
    `engage` assigns the idle worker to a feed, or reassigns it. It ends with the feed that started it, even if it works
    for another feed by then.

    Args:
        config: prep config of the feed that starts the worker.
        coordinator: actor id of that feed's coordinator; the worker ends with it. "" for a standalone worker.
    """

    def __init__(self, config: PrepConfig, coordinator: str = "") -> None:
        self._started_by = config.feed
        self._node = ray.get_runtime_context().get_node_id()
        self._lock = threading.Lock()  # held while the engine is used
        self._work: _Work | None = None
        if coordinator:
            leftovers.end_with(coordinator)
        # The first engine in a process loads its libraries, which may take a second. Pay for that now, while the feed's
        # other workers start, not when a consumer waits for a block.
        _engine_of(config, None).close()

    @ray.method(concurrency_group="control")
    def location(self) -> WorkerLocation:
        """Return the process id, the node and the worker's feed; answers as soon as the actor is up."""
        work = self._work  # read once: the other thread may replace it
        return WorkerLocation(os.getpid(), self._node, self._started_by if work is None else work.brief.config.feed)

    def probe(self, dataset: Dataset, config: PrepConfig, fetch_threads: int) -> Probe:
        """Read and prepare some samples to find their shape, dtype and costs, without changing the worker's state.

        Raises:
            BadSampleError: see `first_probe`.
        """
        engine = _engine_of(config, dataset)
        # If samples are divided between two engines, only the cpu engine keeps decoded samples.
        keeping = engine if config.dali_share == 1 else make_engine("cpu", config.pipeline, seed=config.seed)
        try:
            with _watchdog_of(config):
                return first_probe(dataset, engine, keeping, config.pipeline.known(dataset.fields), fetch_threads)
        finally:
            for each in {engine, keeping}:
                each.close()

    def probe_engines(self, dataset: Dataset, config: PrepConfig, fetch_threads: int) -> EngineProbe:
        """Measure both engines on some samples; ``config`` is that of a dali worker."""
        cpu = partial(_engine_of, replace(config, engine="cpu"), dataset)
        return probe_engines(dataset, cpu, partial(_engine_of, config, dataset), fetch_threads, config.threads)

    def look_at(self, dataset: Dataset, config: PrepConfig, payload: bytes, fetch_threads: int) -> PipelineReport:
        """Prepare some samples with a pipeline that a consumer brought, and report their shape and costs.

        Raises:
            ConfigError: it cannot be unpickled here, or does not suit the samples or the engine.
            BadSampleError: see `first_probe`.
        """
        try:
            pipeline = pickle.loads(payload)
        except ImportError as error:
            raise ConfigError(
                f"a prep worker cannot import what the pipeline uses: {error}; define it in the program itself, or in "
                "a module that is installed on all nodes or in the runtime environment of the feed's program"
            ) from error
        except Exception as error:  # a class's own code may raise anything
            raise ConfigError(f"the pipeline cannot be unpickled in a prep worker: {error!r}") from error
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"pipeline must be an mbaas.transforms.Pipeline, got {shown(pipeline)}")
        check_packages(pipeline)
        if pipeline.has_images != config.pipeline.has_images:
            raise ConfigError(
                f"the pipeline begins with {pipeline.decoder!r}, but the feed's samples are for "
                f"{config.pipeline.decoder!r}"
            )
        possible_engines(config.engine, pipeline, gpus=0)  # raises for what DALI does not do
        pipeline = _beside(config.pipeline, pipeline, config)
        probe = self.probe(dataset, replace(config, pipeline=pipeline), fetch_threads)
        return PipelineReport(
            probe,
            pipeline.fingerprint,
            pipeline.normalize,
            pipeline.has_images,
            pipeline.difference(config.pipeline),
        )

    @ray.method(concurrency_group="control")
    def engage(self, dataset: Dataset, brief: WorkerBrief) -> None:
        """Assign the worker to a feed. Blocks of its previous feed that are still in progress fail.

        Without effect if nothing changed, so that a restarted coordinator can engage the existing workers again.
        """
        if self._work is not None and _identity(self._work.dataset, self._work.brief) == _identity(dataset, brief):
            return
        # Build the new work completely before publishing it: other threads see all or nothing, and if the engine cannot
        # be made, the worker stays as it was.
        config, order = brief.config, brief.order
        device = _device_of(config)
        work = _Work(
            brief,
            dataset,
            line=_Line(
                partial(_engine_of, config, dataset),
                brief.spec.made,
                order.block_samples,
                _slots_for(order.block_samples, brief.spec),
            ),
            watchdog=_watchdog_of(config),
            buffers=_Buffers(),
            gpu=None if device is None else pinned.gpu(device),
            placements=PlacementHistory(order, stored_ids=dataset.stored_ids),
            # The feed that started the worker pays for its start-up.
            cpu_before_s=0.0 if self._work is None else time.process_time(),
        )
        _ = work.line.engine  # made here
        with self._lock:  # waits for the block in progress, because its engine is closed here
            before, self._work = self._work, work
            if before is not None:
                before.close()
                pinned.page_locks.let_go(lambda _: True)

    @ray.method(concurrency_group="control")
    def update_placement(self, placements: tuple[Placement, ...], caches: dict[str, Any]) -> None:
        """Update the placements by which blocks may be cut, oldest first, and the cache node of each node.

        Raises:
            StateError: the worker is idle.
        """
        work = self._engaged()
        work.placements.add_older(placements)
        work.placements.add(placements[-1])  # the current one
        work.readers = {node: self._reader(work, node, cache) for node, cache in caches.items()}

    @ray.method(num_returns=2)
    def prepare(
        self,
        feed: str,
        request: PartRequest,
        leave_out: tuple[BadSample, ...],
        most_slots: int = 0,
        pipeline: str | None = None,
    ) -> tuple[BlockMeta, Arrays]:
        """Prepare one part of a block. The arrays are a separate return, so that the caller need not wait for them.

        If storage temporarily fails to deliver a sample, no sample is prepared and ``BlockMeta.away`` is set; the
        caller then retries.

        Args:
            leave_out: samples that were bad when the block was first prepared. They stay out, so that all consumers see
                the same samples.
            most_slots: number of slots the worker may use. If one is free, the arrays are written there:
                ``BlockMeta.slot`` is its position, and the second return is empty.
            pipeline: fingerprint of the pipeline that a consumer brought; None for the feed's.

        Raises:
            StateError: the worker is idle, or works for another feed by now.
        """
        work = self._engaged()
        if feed != work.brief.config.feed:
            raise _moved_on(feed, work)
        with work.watchdog:
            return self._prepare(work, request, leave_out, most_slots, pipeline)

    def _prepare(
        self,
        work: _Work,
        request: PartRequest,
        leave_out: tuple[BadSample, ...],
        most_slots: int,
        pipeline: str | None,
    ) -> tuple[BlockMeta, Arrays]:
        arrived, epoch = time.perf_counter(), work.placements.chance_epoch(request)
        rows_of_block, ids = work.placements.rows(request), work.placements.ids(request)
        reply, encoded = self._fetch(work, request, pipeline or "")
        stored, unread = work.dataset.stored_ids(ids, epoch), reply.errors
        if stored is not ids:
            # From rows of the distinct stored samples (`PlacementHistory.stored`) to rows of the part: one stored
            # sample may serve several rows.
            at = np.unique(stored, return_inverse=True)[1].tolist()
            encoded, unread = [encoded[i] for i in at], {row: unread[i] for row, i in enumerate(at) if i in unread}

        def bad_sample(row: int, reason: str) -> BadSample:
            return BadSample(int(ids[row]), work.dataset.stored.uri(int(stored[row])), reason)

        # Samples that are left out anyway need no retry.
        left_out = {sample.sample_id: sample.reason for sample in leave_out}
        reasons = unread | {row: left_out[i] for row, i in enumerate(ids.tolist()) if i in left_out}
        if any(isinstance(reason, TemporaryReason) for reason in reasons.values()):
            row, reason = min((row, why) for row, why in reasons.items() if isinstance(why, TemporaryReason))
            return BlockMeta(request.block, epoch, away=bad_sample(row, str(reason))), {}
        with self._lock:
            # After a reassignment, the engine of the previous work is closed.
            if self._work is not work:
                raise _moved_on(work.brief.config.feed, self._engaged())
            line = work.line_of(pipeline)
            started = time.perf_counter()
            # Fetch time that overlapped with the previous block delayed no consumer.
            fetch_s = max(0.0, started - max(arrived, work.free_since))
            rows = np.array([row for row in range(len(ids)) if row not in reasons], np.intp)
            asked_for = work.asked_for(request, stored, reply)
            cache, buffer = work.readers.get(self._node), work.buffers.decoded
            form = reply.hand_in_form
            pieces = handed_in(
                cache,
                request,
                rows.tolist(),
                asked_for,
                reply.hand_in_bytes,
                buffer,
                form=form,
                applied=line.engine.forms[form] if asked_for else None,
            )
            place = line.slots.take(most_slots) if line.slots is not None and most_slots else None
            if place is not None and work.gpu is not None:
                pinned.page_locks.take(place.room, work.gpu)
            own = work.buffers.samples(line.block_samples, line.made)
            out = (own if place is None else place.samples(own))[: len(rows)]
            prepared = work.prepared(line.engine, epoch, ids[rows], [encoded[row] for row in rows], pieces, out)
            reasons |= {int(rows[flaw.row]): flaw.reason for flaw in prepared.bad}
            bad = [bad_sample(row, reason) for row, reason in sorted(reasons.items())]
            made = prepared.made
            if prepared.bad:
                # Bad rows are rare, so only parts with bad rows pay for this copy.
                good = np.setdiff1d(np.arange(len(rows)), [flaw.row for flaw in prepared.bad])
                made, rows = made[good], rows[good]
            arrays = {line.made.name: made, **prepared.known}
            if bad and work.brief.config.on_bad_sample != "skip":
                # The block fails as a whole with an error that names one sample, so no sample needs to travel.
                # Index with an empty array to get copies: a slice of packed values would keep the whole memory alive.
                none = np.arange(0)
                arrays, rows, bad = {name: column[none] for name, column in arrays.items()}, rows[:0], bad[:1]
            ids = ids[rows]
            arrays[SAMPLE_ID.name] = ids
            if rows_of_block is not None:
                arrays[ROW] = rows_of_block[rows]
            nbytes = sum(array.nbytes for array in arrays.values())
            slot = place.hand_out(arrays) if place is not None and len(ids) else None
            if slot is not None:
                arrays = {}
            elif place is not None:  # copy: the slot may be reused before Ray has serialized the arrays
                arrays = {name: column.copy() for name, column in arrays.items()}
            del encoded  # so that transient slabs are freed before Ray copies the result
            ended = work.free_since = time.perf_counter()
        meta = BlockMeta(
            block=request.block,
            epoch=epoch,
            samples=len(ids),
            bad=tuple(bad),
            fetch_s=fetch_s,
            prep_s=ended - started,
            fetched=reply.counts,
            nbytes=nbytes,
            cpu_s=time.process_time() - work.cpu_before_s,
            kept=len(asked_for),
            slot=slot,
        )
        return meta, arrays

    def _engaged(self) -> _Work:
        if self._work is None:
            raise StateError(f"a worker that feed {self._started_by!r} started is idle: it was not engaged yet")
        return self._work

    def _fetch(self, work: _Work, request: PartRequest, pipeline: str) -> tuple[FetchReply, EncodedRows]:
        """Fetch a part from its home node's cache; on failure, from the local one, which reads missing samples."""
        home, readers = request.block_part.home, work.readers
        if home != self._node and home in readers:
            try:
                reply, encoded = readers[home].read_packed(request, pipeline)
            except (ray.exceptions.RayError, WaitTimeoutError) as error:
                # If the node died, a new placement will arrive soon; prepare this block anyway.
                bugs.log_bug(error, f"in the cache of node {home[:8]}")
            else:
                return replace(reply, counts=reply.counts.from_afar()), encoded
        return readers[self._node].read(request, pipeline)

    def _reader(self, work: _Work, node: str, cache: Any) -> CacheReader:
        known = work.readers.get(node)
        if known is not None and known.node == cache:
            return known
        return CacheReader(cache, timeout_s=FETCH_TIMEOUT_S if node == self._node else REMOTE_TIMEOUT_S)


# Control calls have their own thread. Otherwise a restarted coordinator would consider a worker dead that is busy with
# two long blocks.
PrepWorkerActor: Any = ray.remote(num_cpus=1, concurrency_groups={"control": 1})(PrepWorker)  # type: ignore[call-overload]


def _identity(dataset: Dataset, brief: WorkerBrief) -> tuple[object, ...]:
    config = brief.config
    # Compare pipelines by fingerprint: a Map's function that is sent twice becomes two functions.
    return config.feed, dataset.fingerprint, config.pipeline.fingerprint, brief.order, brief.spec


def _device_of(config: PrepConfig) -> int | None:
    """Return the index of the feed's GPU among the GPUs visible to this process; None for the CPU."""
    return _device() if config.engine == "dali" and (config.shares_gpu or ray.get_gpu_ids()) else None


def _engine_of(config: PrepConfig, dataset: Dataset | None) -> Engine:
    def for_dali(sample_ids: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
        # Divide by stored id: then one engine handles a sample in all its draws, and keeps its decoded form.
        stored = sample_ids if dataset is None else dataset.stored_ids(sample_ids, epoch)
        return in_share(stored, config.dali_share)

    return make_engine(
        config.engine,
        config.pipeline,
        seed=config.seed,
        threads=config.threads,
        device_id=_device_of(config),
        for_dali=None if config.dali_share == 1 else for_dali,
    )


def _own_line(brief: WorkerBrief, dataset: Dataset, fingerprint: str) -> _Line:
    config = brief.config
    kept = store.get(config.feed, own_pipeline_key(fingerprint))
    if kept is None:
        raise StateError(f"feed {config.feed!r} does not know pipeline {fingerprint} any more")
    _, own = pickle.loads(kept)
    pipeline, spec = _beside(config.pipeline, pickle.loads(own.payload), config), own.report.probe.spec
    make = partial(_engine_of, replace(config, pipeline=pipeline), dataset)
    return _Line(make, spec.made, own.block_samples, _slots_for(own.block_samples, spec))


def _beside(feeds: Pipeline, own: Pipeline, config: PrepConfig) -> Pipeline:
    """Return a pipeline that a consumer brought, restricted to the decoded samples that its engine can share.

    DALI goes on from one form only. For it, samples are kept in the form of the feed's pipeline.
    """
    if config.engine != "dali" or not own.has_images:
        return own
    common = own.common_prefix(feeds)
    return own.with_prefix(common if common == feeds.prefix else 0)


@functools.cache  # a worker stays with its GPU
def _device() -> int:
    # Ray shows a process only the GPUs assigned to it, and all GPUs if it reserved none.
    if ray.get_gpu_ids():
        return 0
    node = ray.get_runtime_context().get_node_id()
    gpus = resources.gpus_of(node)
    if not gpus:
        # DALI would fall back to the CPU, which is slower and gives slightly different pixels than the other workers.
        raise ResourceError(
            f"node {node} has no GPU, and the feed prepares on GPUs; scaling.prep_labels can name nodes"
        )
    return choose_gpu(gpus)


def _slots_for(block_samples: int, spec: SampleSpec) -> SlotMemory | None:
    """Return memory with slots of one block each; None where the system does not support it."""
    if not slots.are_supported():
        return None
    arrays = len(spec.fields) + 1
    # A packed field has up to three arrays, and one bound more than samples.
    spare = 3 * arrays * (slots.ALIGNED_BYTES + np.dtype(np.int64).itemsize)
    row = Field(ROW, (), "int64")
    try:
        return SlotMemory(block_samples * (spec.nbytes + row.nbytes) + spare)
    except OSError:  # for example in a sandbox without this system call
        return None


def _watchdog_of(config: PrepConfig) -> StallWatchdog:
    # Must fire before the coordinator kills a slow worker, so that the log shows where the worker was.
    return StallWatchdog(min(STALL_WARNING_S, config.prep_s / 2))


def _moved_on(feed: str, work: _Work) -> StateError:
    return StateError(f"a block of feed {feed!r} was requested from a worker of feed {work.brief.config.feed!r}")
