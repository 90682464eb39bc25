"""The loader: an iterable that returns a trial's minibatches."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import ray

from mbaas.base.notebook import table
from mbaas.base.units import counted, percent, seconds
from mbaas.client.batches import BatchCutter, BlockView, RecycledMemory
from mbaas.client.convert import Converter, Minibatch, check_columns, check_names, collating, make_converter
from mbaas.client.heartbeat import Heartbeat
from mbaas.client.join import Find, JoinOptions, PickledPipeline, await_feed_restart, feed_info
from mbaas.client.ledger import EpochProgress
from mbaas.client.rank_stream import RankStream
from mbaas.client.saved_state import STATE_VERSION, SavedState, read_state, resumption, schema
from mbaas.client.sharding import BatchEnd, BlockShard, RankSharding
from mbaas.client.stream import Block, Stream
from mbaas.client.totals import Totals
from mbaas.client.trainers import (
    EpochLoop,
    MinibatchNumbers,
    NumberedMinibatches,
    as_it_is,
    check_is_read_once,
    known_to_accelerate,
)
from mbaas.errors import ConfigError, FeedGoneError, StateError, shown
from mbaas.samples.fields import Arrays, BatchTransform
from mbaas.samples.order import Ids, generator
from mbaas.wire.consumers import ConsumerName, ConsumerReport, FeedInfo, Resumption, Start
from mbaas.wire.samples import MUCH_LEFT_OUT, BadSample, EpochLedger

FOR_RANKS = 2**32
"""Substream of the random numbers of rank 0's minibatches: above the index of any transform in a pipeline."""

HEARTBEAT_S = 3.0
"""Longest pause between two heartbeats; each costs about 2 ms of CPU."""

_log = logging.getLogger(__name__)


class Loader:
    """An iterable of minibatches, one epoch per loop. Created by `mbaas.join`.

    Each ``for batch in loader`` is one epoch: every sample exactly once, in an order determined by the feed's seed. The
    epoch ends when its last minibatch is returned, so a trainer may also draw exactly ``len(loader)`` minibatches.
    Leaving a loop early gives up the rest of the epoch, except after the first minibatch: ``next(iter(loader))``, like
    `peek`, leaves the epoch to the next loop. After an error in ``next``, the same iterator continues after the last
    minibatch returned.

    A minibatch is a dict:

    - ``image``: uint8. NumPy: ``[n, height, width, 3]``, a read-only view of shared memory, valid while referenced.
      Torch: ``[n, 3, height, width]`` in channels-last memory, private to this trial. With `mbaas.transforms.Normalize`
      in the pipeline: floats of its dtype, private in both formats. Images of different sizes
      (``DecodeImage(max_pixels=...)``) are batched according to ``collate``; each is ``[height, width, 3]``, in torch
      ``[3, height, width]``.
    - ``audio``, ``array`` or the decoder's field name, instead of ``image``: ``[n, *shape]`` in both formats, with axes
      as prepared. Samples that differ in their first length are batched according to ``collate``.
    - ``label``, ``sample_id``: int64 ``[n]``.
    - the other fields of the dataset: ``[n, *shape]``. Fields of variable length are batched according to ``collate``.

    With ``columns`` it has only their keys, and with ``batch_fn`` it is what that function returns.

    Views pin the feed's staging memory. To keep data longer, copy it and drop the minibatch.

    In a data-parallel trial each rank has its own loader, and all ranks make the same number of steps. In each step
    they divide the global minibatch evenly, and each rank gets samples from its own node where possible. If the ranks
    do not divide ``batch_size``, their counts differ by one. The last minibatch is divided evenly too, without
    repeating samples. It is left out if it has fewer samples than there are ranks, because a rank without samples has
    no mean loss.

    A loader can replace a DataLoader in trainers: it has `len`, `batch_size`, `drop_last`, `dataset`, `sampler`,
    `batch_sampler`, `collate_fn`, `set_epoch` and `state_dict`. It is not a DataLoader subclass, so trainers neither
    shard nor shuffle it again. Unpickling a loader joins the feed at its position under the same consumer name, and so
    replaces the original.

    Attributes:
        ledger: received against expected samples of the last finished epoch (of this rank), or None.
        epoch: number of epochs that were finished or left.
        collate_fn: the identity: minibatches are already collated.
        prefetch_factor: None, as for a DataLoader without workers.
    """

    collate_fn = staticmethod(as_it_is)
    prefetch_factor = None

    def __init__(
        self,
        coordinator: Any,
        name: ConsumerName,
        *,
        options: JoinOptions,
        find: Find,
        again: Callable[[dict[str, Any], Any], Loader],
    ) -> None:
        self._totals, self._born = Totals(), time.time_ns()
        make_converter(options.format, options.device, None)  # refuse an unknown format before joining
        if options.format == "torch":
            _make_known_to_torch()
        self._pid = os.getpid()
        self._coordinator, self._name, self._find, self._again = coordinator, name, find, again
        self._format, self._device, self._collate = options.format, options.device, options.collate
        self._columns, self._batch_fn = options.columns, options.batch_fn
        self._wait_timeout_s = options.wait_timeout_s
        self._begins_now = options.start == "now"
        self._memory = RecycledMemory()  # shared by all epochs
        self._pipeline = None if options.pipeline is None else PickledPipeline(options.pipeline)
        self._next_pipeline: PickledPipeline | None = None  # for the next epoch
        self._info = self._describe(coordinator, name, options.wait_timeout_s)
        self._check_fields(self._info)
        self._batch_size = _checked_batch_size(options.batch_size, self._info.settings.batch_size, name.world_size)

        # position
        self.ledger: EpochLedger | None = None
        self.epoch = 0
        self._first_bad: BadSample | None = None  # seen by this loader
        self._said_much_is_left_out = False
        self._loop = 0  # number of the newest loop; older loops are invalid
        self._before_loop: dict[str, Any] = {}  # the state at the start of the newest loop
        self._peeked: list[tuple[Arrays, BatchEnd, bool]] = []  # the minibatch returned by `peek`, for the next loop
        self._unfinished: Iterator[tuple[Arrays, BatchEnd, bool]] | None = None  # the minibatches after it
        self._only_first = False  # True while the newest loop has returned exactly one minibatch
        self._at_end: dict[str, Any] | None = None  # the state during the step on an epoch's last minibatch
        self._closed = False
        self._begin_epoch()

        if options.state is None:
            self._join(Start(now=self._begins_now))
        else:
            self._go_on(*self._read(options.state))
        # Several heartbeats per lease: a late one, or one lost in a coordinator's restart, must not end the session.
        period_s = min(HEARTBEAT_S, self._info.settings.timeouts.lease_s / 5)
        self._heartbeat = Heartbeat(self, Loader.flush, period_s=period_s, name=f"mbaas-heartbeat-{name}")

    def _describe(self, coordinator: Any, name: ConsumerName, timeout_s: float) -> FeedInfo:
        if self._pipeline is None:
            return feed_info(coordinator, name, timeout_s)
        return self._pipeline.register(coordinator, name, timeout_s)

    def _check_fields(self, info: FeedInfo) -> None:
        check_names(info.spec, self._collate)
        if self._columns is not None:
            check_columns(self._columns, info.spec, self._collate)

    def _join(self, start: Start, resumed: tuple[Resumption, int] | None = None) -> None:
        """Open a session, which ends any open session of the same name.

        Args:
            start: the first block.
            resumed: the position, if that is in the middle of an epoch, as for `RankSharding`.
        """
        sharding = RankSharding(
            self._info.order,
            batch_size=self._batch_size,
            rank=self._name.rank,
            world_size=self._name.world_size,
            drop_last=self.drop_last,
            is_certain=self._info.settings.on_bad_sample == "raise",
            resumed=resumed,
        )
        self._open(start, sharding)

    def _open(self, start: Start, sharding: RankSharding) -> None:
        """Open a stream; if the feed is gone, wait for its restart."""
        stream: Stream | None = None
        while stream is None:
            try:
                stream = (Stream if self._name.world_size == 1 else RankStream)(
                    self._coordinator,
                    self._name,
                    sharding,
                    self._totals.blocks,
                    pipeline=self._pipeline,
                    start=start,
                    wait_timeout_s=self._wait_timeout_s,
                    born=self._born,
                )
            except FeedGoneError as error:
                self._await_feed_restart(error)
        if start.resumed is not None and start.resumed.taken:
            sharding.renumber(stream.cursor - start.resumed.start)
        self._stream, self._sharding = stream, sharding
        # a loader that is garbage collected without `close` also leaves the feed
        self._farewell = weakref.finalize(self, _leave_quietly, stream, self._totals)

    def _await_feed_restart(self, error: FeedGoneError) -> None:
        self._coordinator, self._info = await_feed_restart(
            error,
            self._coordinator,
            find=self._find,
            describe=self._describe,
            name=self._name,
            info=self._info,
            timeout_s=self._wait_timeout_s,
        )

    # ---- iteration ----

    def __len__(self) -> int:
        """Return the number of minibatches in an epoch (of this rank). If bad samples are skipped, the last may be
        missing.
        """
        whole, rest = divmod(self._info.order.num_samples, self._batch_size)
        return whole + (rest >= self._name.world_size and not self.drop_last)

    def __iter__(self) -> Iterator[Minibatch]:
        """Start an epoch, or resume the one set by `load_state_dict`; an unfinished loop is given up."""
        self._check_open()
        check_is_read_once(self, self._name)
        _check_is_not_stacked()
        self._loop += 1
        self._at_end = None
        if self._only_first:
            self._rejoin(self._before_loop)
        elif self._has_begun and not self._peeked:
            self._leave_epoch()
        if self._next_pipeline is not None and not self._progress.position:
            self._change_pipeline(self._next_pipeline)
        self._before_loop, loop, epoch = self.state_dict(), self._loop, self.epoch

        def run() -> Iterator[Minibatch]:
            if self.epoch != epoch:  # the error occurred after the last minibatch
                return iter(())
            return known_to_accelerate(self._run_epoch(loop), lambda: self._at_end is not None)

        def recover() -> None:
            self._check_current(loop)
            if self.epoch == epoch:
                self._rejoin(self.state_dict())

        return EpochLoop(run, recover)

    def peek(self) -> Minibatch:
        """Return the first minibatch of the next loop without starting the loop.

        Use it to inspect shapes, dtypes and data. The loop returns the same minibatch again, from the block that this
        call received. Until the loop starts, other consumers wait for this one as they do in the middle of an epoch.
        The ranks of a trial may peek independently, after all of them have joined.

        Raises:
            StateError: the loader is in the middle of an epoch, no minibatch is left of it, or the loader is closed.
            WaitTimeoutError, BadSampleError, FeedFailedError: as for a loop.
        """
        self._check_open()
        if self._has_begun and not self._only_first and not self._peeked:
            raise StateError(
                f"loader of consumer {str(self._name)!r} is in the middle of an epoch ({self._progress.position} of "
                f"{self._info.order.num_samples} samples): call peek before the loop or after it"
            )
        self._loop += 1  # a loop that has returned its first minibatch is invalid
        if self._only_first:
            self._rejoin(self._before_loop)
        if not self._peeked:
            self._peek()
        arrays, end, _ = self._peeked[0]
        converter = self._converter()
        # Copied, because tensors may share the arrays' memory, and the loop must return the data unchanged.
        batch = converter.finish(converter.start({name: column.copy() for name, column in arrays.items()}))
        return self._shaped(batch, end)

    def set_pipeline(self, pipeline: Any) -> None:
        """Use another pipeline from the next epoch on, for schedules, Population Based Augmentation and the like.

        The consumer keeps its position and its name. The ranks of a trial all call this with the same pipeline.

        Args:
            pipeline: an `mbaas.transforms.Pipeline` over the samples of the feed.

        Raises:
            ConfigError: it does not suit the feed's samples, engine or memory, or cannot be pickled.
            BadSampleError: no sample can be prepared with it.
        """
        self._check_open()
        given = PickledPipeline(pipeline)
        self._check_fields(given.register(self._coordinator, self._name, self._wait_timeout_s))
        self._next_pipeline = given

    def _change_pipeline(self, pipeline: PickledPipeline) -> None:
        state = self.state_dict()
        self._pipeline, self._next_pipeline = pipeline, None
        self._info = self._describe(self._coordinator, self._name, self._wait_timeout_s)
        self._rejoin(state)

    def _peek(self) -> None:
        before, minibatches = self.state_dict(), self._minibatches()
        try:
            self._peeked.append(next(minibatches))
            self._unfinished = minibatches
        except BaseException as error:  # Ctrl-C, too: the next loop begins where this call did
            self._rejoin(before)
            if not isinstance(error, StopIteration):
                raise
            raise StateError(f"no minibatch is left of the epoch of consumer {str(self._name)!r}") from None

    def _begin_epoch(self) -> None:
        self._progress = EpochProgress(self._name.rank, self._name.world_size)
        self._has_begun = self._only_first = False
        self._peeked.clear()
        self._unfinished = None

    def _leave_epoch(self) -> None:
        self._stream.skip_epoch()
        self.epoch += 1
        self._begin_epoch()

    def _run_epoch(self, loop: int) -> Iterator[Minibatch]:
        # Blocks stay in staging while anything refers to them, so no local variable may outlive its use: hence each
        # ``del`` here and below.
        converter = self._converter()
        is_whole, began = not self._progress.position, time.perf_counter()  # a resumed epoch is not timed
        is_over, is_first = False, True
        for started, sample_ids, end, is_over in self._started(converter):
            batch = self._shaped(converter.finish(started), end)
            # counted before the trial gets it: a state saved during a step resumes after that step
            self._progress.count(sample_ids, position=end.position, shuffle=end.shuffle, elsewhere=end.elsewhere)
            handed_out = time.perf_counter()
            step = self.epoch * len(self) + self.minibatches if self._name.world_size > 1 else None
            self._totals.hand_out(len(sample_ids), handed_out, step=step)
            del started, sample_ids
            if is_over:  # now: many trainers count minibatches and never request one more
                at_end = self.state_dict()
                self._finish_epoch(handed_out - began if is_whole else 0.0)
                self._at_end = at_end
            self._only_first = is_first and not is_over
            yield batch
            self._only_first = is_first = False
            del batch
            self._totals.step_s += time.perf_counter() - handed_out
            self._check_current(loop)
            self._at_end = None
        if not is_over:  # the rest of the epoch were bad samples
            self._finish_epoch(time.perf_counter() - began if is_whole else 0.0)

    def _converter(self) -> Converter:
        info = self._info
        converter = make_converter(
            self._format, self._device, info.normalize, has_images=info.has_images, memory=self._memory
        )
        return collating(converter, info.spec, self._collate, has_images=info.has_images)

    def _shaped(self, batch: Minibatch, end: BatchEnd) -> Any:
        """Rename the fields of a minibatch by ``columns``, and pass it through ``batch_fn``."""
        change = self._batch_fn
        if self._columns is not None:
            batch = {new: batch[name] for new, name in self._columns.items()}
        if not isinstance(change, BatchTransform):
            return batch if change is None else change(batch)
        assert end.shuffle is not None  # a minibatch has samples, whose block has a shuffle
        seed, substream = self._info.order.seed, FOR_RANKS + self._name.rank
        return change.apply(batch, generator(seed, end.shuffle.epoch, end.position, substream=substream))

    def _started(self, converter: Converter) -> Iterator[tuple[Any, Ids, BatchEnd, bool]]:
        """Start converting minibatches, as many ahead as the converter can process in the background.

        Yields:
            The result of `Converter.start`, the sample ids, the end of the minibatch, and whether it is the epoch's
            last.
        """
        ahead: deque[tuple[Any, Ids, BatchEnd, bool]] = deque()
        for arrays, end, is_last in self._remaining():
            ahead.append((converter.start(arrays), arrays["sample_id"], end, is_last))
            del arrays
            if len(ahead) > converter.ahead:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()

    def _remaining(self) -> Iterator[tuple[Arrays, BatchEnd, bool]]:
        """Yield as `_minibatches`, beginning with the minibatch that `peek` has returned, if any."""
        minibatches = self._unfinished or self._minibatches()
        self._unfinished = None
        if self._peeked:
            yield self._peeked.pop()
        yield from minibatches

    def _minibatches(self) -> Iterator[tuple[Arrays, BatchEnd, bool]]:
        """Yield this rank's samples of each remaining minibatch, its end, and True if it is known to be the last."""
        cutter, shards = BatchCutter(self._memory), self._shards()
        for samples, shard in shards:
            cutter.put(samples)
            del samples
            for end in shard.ends:
                is_last = (shard.is_last and end is shard.ends[-1]) or self._too_few_follow(end.position)
                if is_last:
                    # The loop variable of a trial outlives the loop: as a view, the last minibatch would pin the block.
                    # Tensors are copied anyway.
                    if self._format == "numpy":
                        cutter.detach_copy()
                    for rest in shards:  # consume the blocks that fill no minibatch
                        del rest
                yield cutter.cut(end.size), end, is_last
                self._stream.look_ahead()
            cutter.detach_copy()  # the rest joins the next block's first minibatch, so this block can be freed

    def _too_few_follow(self, position: int) -> bool:
        # Counts bad samples as good: true only if no further minibatch is possible.
        needed = self._batch_size if self.drop_last else self._name.world_size
        return self._info.order.num_samples - position < needed

    def _shards(self) -> Iterator[tuple[BlockView, BlockShard]]:
        self._has_begun, is_last = True, False
        self._heartbeat.goes_on()
        while not is_last:
            block = self._next_block()
            self._stream.look_ahead()
            bad_ids = (bad.sample_id for bad in block.bad)
            shard = self._sharding.shard(block.number, block.shuffle, block.own_epoch, bad_ids)
            if self._progress.feed_epoch is None:  # first block of the epoch
                self._progress.feed_epoch = block.shuffle.epoch
                self._progress.begin = self._info.order.span(block.number)[0]
            self._progress.left_out.update(bad.sample_id for bad in block.bad)
            self._first_bad = self._first_bad or next(iter(block.bad), None)
            self._progress.dropped = shard.dropped
            samples, is_last = _own_samples(block.samples, shard), shard.is_last
            del block
            yield samples, shard
            del samples

    def _next_block(self) -> Block:
        """Return the block at the cursor, across restarts of the feed."""
        while True:
            try:
                return self._stream.next()
            except FeedGoneError as error:
                began = time.perf_counter()
                self._await_feed_restart(error)
                self._farewell.detach()  # its session ended with the coordinator
                # ranks know the epoch's plan, and send it
                self._open(self._stream.start_at(self._stream.cursor), self._sharding)
                # a wait for the feed: neither a fetch nor a prep stall
                self._totals.blocks.wait_s += time.perf_counter() - began

    def _say_much_is_left_out(self) -> None:
        # Logged in the trial's own output: "skip" was meant for a few bad samples.
        left_out, bad = len(self._progress.left_out), self._first_bad
        if self._said_much_is_left_out or bad is None or left_out <= MUCH_LEFT_OUT * self._info.order.num_samples:
            return
        self._said_much_is_left_out = True
        _log.warning(
            "feed %r skips %d of %d samples as bad in every epoch, for example %s: %s",
            self._info.settings.name, left_out, self._info.order.num_samples, bad.uri, bad.reason,
        )  # fmt: skip

    def _finish_epoch(self, seconds: float) -> None:
        self._say_much_is_left_out()
        ledger = self._progress.close(self._info.order.num_samples, self.epoch)
        self.ledger = replace(ledger, seconds=seconds, pipeline=self.pipeline)
        self._totals.add(self.ledger)
        self.epoch += 1
        self._begin_epoch()
        self._stream.done = self._stream.cursor  # the next call or heartbeat reports it
        self._heartbeat.epoch_ends()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"loader of consumer {str(self._name)!r} belongs to process {self._pid}, but was used in process "
                f"{os.getpid()}: use num_workers=0 in a DataLoader, because the feed's prep workers do this work"
            )
        if self._closed:
            raise StateError(f"loader of consumer {str(self._name)!r} is closed; join the feed again")

    def _check_current(self, loop: int) -> None:
        self._check_open()
        if loop != self._loop:
            raise StateError(
                f"this loop over the loader of consumer {str(self._name)!r} is no longer valid, because a newer "
                "one was started: a loader serves one loop at a time"
            )

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last minibatch returned, as a small dict of JSON types.

        During the step on an epoch's last minibatch, this is the end of the epoch: a restored loop yields nothing, so
        that the program continues with the code after its loop. All ranks of a trial have the same position, so each
        may load its own state or another rank's.
        """
        if self._at_end is not None:
            return dict(self._at_end)
        feed_epoch = self._progress.feed_epoch
        if feed_epoch is None:  # nothing received yet: any epoch not begun will do
            feed_epoch = self._stream.next_epoch(self._stream.cursor)
        return {
            "version": STATE_VERSION,
            "fingerprint": self._info.fingerprint,
            "engine": self._info.engine,
            "epoch": self.epoch,
            "feed_epoch": feed_epoch,
            **self._progress.state(),
        }

    @staticmethod
    def state_schema() -> dict[str, Any]:
        """Return the JSON schema of the result of `state_dict`."""
        return schema()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``: the next loop yields exactly the rest of its epoch.

        A state taken between two epochs joins the next shared epoch that this consumer has not had, if there is one.

        Args:
            state: a result of `state_dict`, from here or elsewhere; `state_schema` is its JSON schema.

        Raises:
            StateError: the state is invalid, or belongs to another dataset, pipeline, seed or version, or to another
                engine that ``engine="auto"`` chose. The message contains the value and the expected one. The loader's
                position is unchanged.
        """
        self._check_open()
        found = self._read(state)
        self._loop += 1  # a running loop has another position, and is invalid
        self._at_end = None
        self._move(*found)

    def _rejoin(self, state: dict[str, Any]) -> None:
        self._move(*self._read(state))

    def _move(self, saved: SavedState, start: Start, resumed: tuple[Resumption, int] | None) -> None:
        farewell = self._farewell
        self._go_on(saved, start, resumed)
        farewell.detach()  # the new session ended the old one

    def _go_on(self, saved: SavedState, start: Start, resumed: tuple[Resumption, int] | None) -> None:
        self._join(start, resumed)
        self._begin_epoch()
        self.epoch = saved.epoch
        self._progress = EpochProgress.restored(saved, rank=self._name.rank, world_size=self._name.world_size)

    def _read(self, state: dict[str, Any]) -> tuple[SavedState, Start, tuple[Resumption, int] | None]:
        order = self._info.order
        saved = read_state(state, info=self._info, any_pipeline=self._pipeline is not None)  # it was asked for
        if not saved.position:
            start = Start(saved.feed_epoch * order.blocks_per_epoch, flexible=True, now=self._begins_now)
            return saved, start, None
        found, row = resumption(saved, order)
        if saved.begin and self._name.world_size > 1:
            raise StateError(
                f"the state is from an epoch that began in the middle of the feed's, at sample {saved.begin}: it needs "
                f"a single consumer, but this trial has {self._name.world_size} ranks"
            )
        return saved, Start(found.start, resumed=found), (found, row)

    # ---- the DataLoader interface, for trainers ----

    @property
    def minibatches(self) -> int:
        """Number of minibatches returned so far in the epoch, including any before a loaded state."""
        return -(-self._progress.position // self._batch_size)

    @property
    def batch_size(self) -> int:
        """Samples in a global minibatch, which the ranks of a trial divide; the last of an epoch may have fewer."""
        return self._batch_size

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last minibatch of an epoch is left out."""
        return self._info.settings.drop_last

    @property
    def dataset(self) -> NumberedMinibatches:
        """Substitute for a dataset, whose length is the number of samples in an epoch over all ranks."""
        # a new one each time: an attribute would form a cycle that keeps the loader alive
        return NumberedMinibatches(self, samples=self._info.order.num_samples)

    @property
    def batch_sampler(self) -> MinibatchNumbers:
        """The numbers of an epoch's minibatches, for trainers that resume by skipping minibatches.

        The Hugging Face Trainer resumes with `accelerate.skip_first_batches`, which reads this attribute. If the
        loader's state was loaded, nothing is read a second time.
        """
        return MinibatchNumbers(self)

    @property
    def sampler(self) -> Loader:
        """The loader itself; trainers call `set_epoch` on this attribute."""
        return self

    @property
    def worker_init_fn(self) -> NoReturn:
        """A loader has none. Ray Train's `prepare_data_loader` reads it first, to build a DataLoader for each rank."""
        raise AttributeError(
            "a loader has no worker_init_fn and needs no prepare_data_loader: get_loader already divides minibatches "
            "among the ranks of Ray Train, and device= moves them; use the loader itself"
        )

    def set_epoch(self, epoch: int) -> None:  # noqa: ARG002 - samplers shuffle by it
        """Start an epoch, or continue it after a restart; the order does not depend on ``epoch``.

        A state saved during the step on an epoch's last minibatch is the end of that epoch, so the loop after it yields
        nothing. A trainer that calls this method has already counted that epoch, so the loader moves on to the next
        one.
        """
        self._check_open()
        self._at_end = None
        if not self._has_begun and self._progress.position and self._too_few_follow(self._progress.position):
            for _ in self._run_epoch(self._loop):
                pass

    def __getitem__(self, number: object) -> NoReturn:
        raise ConfigError(
            f"a loader returns minibatches in sequence, not by number, got {shown(number)}: iterate over it, or "
            'join with format="torch" for DataLoader(loader, batch_size=None)'
        )

    # ---- reports and metadata ----

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the labels, by number."""
        return self._info.class_names

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The strings that the numbers of each categorical field stand for, by field."""
        return dict(self._info.categories)

    @property
    def pipeline(self) -> str:
        """Fingerprint of this consumer's own pipeline; "" for the feed's."""
        return self._info.pipeline if self._info.difference else ""

    @property
    def stall_share(self) -> float:
        """Fraction of this trial's time spent waiting for data since it joined, 0 to 1."""
        return self.report().stall_share

    def report(self) -> ConsumerReport:
        """Return this consumer's totals since it joined: samples, waits, work in seconds; without ledgers and steps."""
        return self._totals.report()

    def flush(self) -> None:
        """Send the next heartbeat now: the totals of `report`, ledgers of finished epochs, and the steps of a rank."""
        if self._closed:
            return
        report = self._totals.full_report()
        self._stream.heartbeat(report)  # if this fails, the next heartbeat sends the same ledgers and steps again
        self._totals.acknowledge(report)

    def close(self) -> None:
        """Leave the feed and release everything this consumer holds. May be called twice.

        Takes some seconds if the coordinator is restarting and ledgers are still to be sent.
        """
        if self._closed:
            return
        self._closed = True
        self._heartbeat.end()
        self._farewell.detach()
        _leave_quietly(self._stream, self._totals)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        pipeline = self._next_pipeline or self._pipeline
        return self._again, (self.state_dict(), None if pipeline is None else pipeline.pipeline)

    def __copy__(self) -> NoReturn:
        raise StateError(
            f"a loader cannot be copied, because a copy would replace consumer {str(self._name)!r}: call "
            f"mbaas.join({self._info.settings.name!r}) with another name; for a checkpoint, save loader.state_dict()"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def _repr_html_(self) -> str:
        """Return a table for notebooks; the feed is not asked."""
        feed, report, last = self._info.settings.name, self.report(), self.ledger
        rows = {
            "feed": feed,
            "epoch": f"{self.epoch}, of {len(self):,} minibatches of {self._batch_size:,}",
            "received": counted(report.samples, "sample"),
            "waited": f"{seconds(report.wait_s)}, {percent(report.stall_share)} of the time",
            "first minibatch": f"{seconds(report.time_to_first_batch_s)} after joining" if report.samples else "-",
            "last epoch": "-" if last is None else f"{last.epoch} {'exact' if last.exact else 'INEXACT'}",
        }
        state = {"state": "closed"} if self._closed else {}
        return table(f"Consumer {self._name}", {**state, **rows})

    def __repr__(self) -> str:
        feed, name = self._info.settings.name, str(self._name)
        return f"Loader(feed={feed!r}, consumer={name!r}, batch_size={self._batch_size}, epoch={self.epoch})"


def _make_known_to_torch() -> None:
    # Makes DataLoader iterate over a loader instead of requesting samples by number.
    from torch.utils.data import IterableDataset  # here: NumPy trials do not need torch

    IterableDataset.register(Loader)  # not a base class: torch would be imported with this module


def _check_is_not_stacked() -> None:
    """Refuse a DataLoader loop that would stack whole minibatches.

    Torch gives an iterable dataset no reference to the DataLoader, so this inspects the caller of ``iter``.

    Raises:
        ConfigError: the caller collates.
    """
    fetch = sys.modules.get("torch.utils.data._utils.fetch")
    caller = sys._getframe(2).f_locals.get("self")
    if fetch is not None and isinstance(caller, fetch._IterableDatasetFetcher) and caller.auto_collation:
        raise ConfigError(
            "a loader already returns minibatches, and DataLoader(loader, batch_size=...) would stack them: use "
            "DataLoader(loader, batch_size=None), and set batch_size in mbaas.join or get_loader"
        )


def _own_samples(samples: BlockView, shard: BlockShard) -> BlockView:
    """Return this rank's samples; a rank that reads whole parts has read more."""
    if len(samples) == len(shard.rows):
        return samples
    rows = shard.good if samples.rows is None else samples.rows
    indices = np.searchsorted(rows, shard.rows)
    assert np.array_equal(rows[indices], shard.rows), "a block lacks rows that are this rank's"
    return samples.only(indices)


def _checked_batch_size(batch_size: int | None, default: int, world_size: int) -> int:
    size = default if batch_size is None else batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < world_size:  # True is an int in Python
        raise ConfigError(f"batch_size must be a whole number of at least world_size ({world_size}), got {size!r}")
    return size


def _leave_quietly(stream: Stream, totals: Totals) -> None:
    """End the consumer's sessions if the feed still exists: a loader may outlive its feed and its cluster."""
    if not ray.is_initialized():
        return
    report = totals.full_report()
    try:
        stream.leave(report)
    except Exception as error:
        # Any error: nothing can be done about it, and Ray has no specific class for a call to an actor of another
        # cluster.
        if report.ledgers and not isinstance(error, FeedGoneError):  # no ledgers left
            _log.warning(
                "feed %r did not receive the ledgers of the last %d epochs of a leaving consumer: %s",
                stream.info.settings.name, len(report.ledgers), error,
            )  # fmt: skip
