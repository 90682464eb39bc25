"""The loader: minibatches of a feed in a trial."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from mbaas.client.account import EpochProgress
from mbaas.client.batches import BatchCutter
from mbaas.client.block_view import BlockView
from mbaas.client.convert import Batch, make_converter
from mbaas.client.figures import StreamStats
from mbaas.client.heartbeat import Heartbeat
from mbaas.client.join import open_stream
from mbaas.client.rank_group import RankGroup
from mbaas.client.rank_stream import RankStream
from mbaas.client.sharding import BatchEnd, BlockShard, RankSharding
from mbaas.client.stream import Block, Stream
from mbaas.errors import ConfigError, MbaasError, StateError
from mbaas.messages import Arrays, ConsumerReport, EpochLedger, FeedInfo

STATE_VERSION = 1

HEARTBEAT_S = 3.0
"""Longest pause between two signs of life; each costs about 2 ms of CPU."""


class Loader:
    """An iterable of minibatches, one epoch a loop; made by `mbaas.join`.

    Each ``for batch in loader`` is one epoch: every sample exactly once, in an order fixed by the feed's seed. A
    minibatch is a dict:

    - ``image``: uint8; as numpy ``[n, height, width, 3]``, a read-only view of shared memory that is valid as long as
      it is referenced; as torch ``[n, 3, height, width]`` in channels-last memory, private to this trial. With
      `mbaas.transforms.Normalize` in the pipeline, floats of its dtype, private in both formats.
    - ``label``, ``sample_id``: int64 ``[n]``.

    Views pin the feed's staging memory: keep a copy, not the minibatch, of what you need for longer.

    Of a data-parallel trial each rank has a loader, and all step together: every rank makes the same number of steps,
    and in each the ranks together get the global minibatch, shared out evenly, so that each gets what lies on its own
    node as far as possible. (With a ``batch_size`` that the ranks divide, all get the same number of samples; else
    numbers differ by one.) The last minibatch of an epoch is shared out evenly, too: no sample is repeated to fill it
    up, and if it has fewer samples than there are ranks, it is left out, because a rank without a sample has no mean
    loss.

    Attributes:
        ledger: what the last finished epoch held against what it had to hold (of this rank), or None.
        epoch: number of epochs that were finished or left.
    """

    def __init__(
        self,
        coordinator: Any,
        *,
        consumer: str,
        batch_size: int | None,
        format: str,
        device: Any,
        rank: int,
        world_size: int,
        wait_timeout_s: float,
    ) -> None:
        self._coordinator, self._consumer = coordinator, consumer
        self._rank, self._world_size, self._asked_size = rank, world_size, batch_size
        self._format, self._device, self._wait_timeout_s = format, device, wait_timeout_s
        make_converter(format, device, None)
        self._figures = StreamStats()
        self._stream = self._join(None, False, None)
        self._info = self._stream.info
        try:
            self._batch_size = _checked_batch_size(batch_size, self._info.settings.batch_size, world_size)
        except ConfigError:
            _leave_quietly(self._stream)
            raise
        self._set_course(None)
        self.ledger: EpochLedger | None = None
        self.epoch = 0
        self._id = uuid.uuid4().hex
        self._loop = 0
        self._closed = False
        self._step_s = 0.0
        self._samples = 0
        self._news: list[EpochLedger] = []
        self._news_lock = threading.Lock()
        self._begin_epoch()
        self._farewell = weakref.finalize(self, _leave_quietly, self._stream)
        period_s = min(HEARTBEAT_S, self._info.settings.lease_s / 5)
        self._pulse = Heartbeat(self, period_s=period_s, name=f"mbaas-pulse-{consumer}")

    def _join(self, start: int | None, flexible: bool, info: FeedInfo | None) -> Stream:
        """A session of its own; ``info`` is the feed's, needed with a ``start``."""
        team = None
        if self._world_size > 1:
            team = RankGroup(
                self._coordinator,
                self._consumer,
                rank=self._rank,
                world_size=self._world_size,
                batch_size=self._asked_size,
                wait_timeout_s=self._wait_timeout_s,
            )
        return open_stream(
            self._coordinator,
            self._consumer,
            start=start,
            flexible=flexible,
            wait_timeout_s=self._wait_timeout_s,
            figures=self._figures,
            info=info,
            team=team,
        )

    def _set_course(self, begin: tuple[int, int] | None) -> None:
        """Where minibatches of a new stream end; ``begin`` as for `RankSharding`."""
        self._course = RankSharding(
            self._info.order,
            batch_size=self._batch_size,
            rank=self._rank,
            world_size=self._world_size,
            drop_last=self._drop_last,
            is_certain=self._info.settings.on_bad_sample == "raise",
            begin=begin,
        )
        if isinstance(self._stream, RankStream):
            self._stream.course = self._course

    def _begin_epoch(self) -> None:
        self._account = EpochProgress(self._rank, self._world_size)
        self._begun = False

    # ---- iteration ----

    def __len__(self) -> int:
        """Minibatches in an epoch (of this rank); with bad samples left out the last ones may be missing."""
        whole, rest = divmod(self._info.order.num_samples, self._batch_size)
        return whole + (rest >= self._world_size and not self._drop_last)

    @property
    def _drop_last(self) -> bool:
        return self._info.settings.drop_last

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch, or go on in the one that `load_state_dict` named; a loop that was left half-way
        is given up.
        """
        self._check_open()
        self._loop += 1
        if self._begun:
            self._leave_epoch()
        return self._epoch(self._loop)

    def _leave_epoch(self) -> None:
        """Give up the rest of an epoch: on to the beginning of the next."""
        blocks = self._info.order.blocks_per_epoch
        self._stream.skip_to(-(-self._stream.cursor // blocks) * blocks)
        self.epoch += 1
        self._begin_epoch()

    def _epoch(self, loop: int) -> Iterator[Batch]:
        converter = make_converter(self._format, self._device, self._info.normalize)
        started: deque[tuple[Any, Any, BatchEnd]] = deque()
        source = self._minibatches()
        is_whole, began = not self._account.position, time.perf_counter()
        more = True
        while more or started:
            while more and len(started) <= converter.ahead:
                cut = next(source, None)
                if cut is None:
                    more = False
                else:
                    arrays, mark = cut
                    started.append((converter.start(arrays), arrays["sample_id"], mark))
                    del cut, arrays
            if not started:
                break
            item, sample_ids, mark = started.popleft()
            self._account.count(sample_ids, mark)  # consumed from here on, as far as a saved state is concerned
            batch = converter.finish(item)
            del item, sample_ids
            self._samples += len(batch["sample_id"])
            handed_out = time.perf_counter()
            yield batch
            del batch
            self._step_s += time.perf_counter() - handed_out
            self._check_current(loop)
        self._finish_epoch(time.perf_counter() - began if is_whole else 0.0)

    def _minibatches(self) -> Iterator[tuple[Arrays, BatchEnd]]:
        """This rank's share of each minibatch of the rest of the current epoch."""
        cutter = BatchCutter()
        for block in self._epoch_blocks():
            leg = self._course.leg(block.number, (bad.sample_id for bad in block.bad))
            self._account.dropped = leg.dropped
            cutter.put(_own(block.samples, leg))
            is_last = (block.number + 1) % self._info.order.blocks_per_epoch == 0
            del block
            for mark in leg.marks:
                if is_last and mark is leg.marks[-1]:  # a trial's variable outlives its loop, and would hold the block
                    cutter.detach_copy()
                yield cutter.cut(mark.size), mark
                self._stream.look_ahead()
            cutter.detach_copy()

    def _epoch_blocks(self) -> Iterator[Block]:
        """The blocks of the rest of the current epoch."""
        blocks_per_epoch = self._info.order.blocks_per_epoch
        self._begun, last = True, False
        while not last:
            block = self._stream.next()
            self._stream.look_ahead()
            self._account.feed_epoch = block.number // blocks_per_epoch
            self._account.left_out.update(bad.sample_id for bad in block.bad)
            last = (block.number + 1) % blocks_per_epoch == 0
            yield block
            del block

    def _finish_epoch(self, seconds: float) -> None:
        self.ledger = replace(self._account.close(self._info.order, self.epoch), seconds=seconds)
        with self._news_lock:
            self._news.append(self.ledger)
        self.epoch += 1
        self._begin_epoch()
        self._stream.done = self._stream.cursor
        self._pulse.beat()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"loader of consumer {self._consumer!r} is closed; join the feed again")

    def _check_current(self, loop: int) -> None:
        self._check_open()
        if loop != self._loop:
            raise StateError(
                f"this loop over the loader of consumer {self._consumer!r} was given up when a newer one began: "
                "a loader serves one loop at a time"
            )

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: after the last minibatch that it handed out. Small, and plain JSON
        types only.

        The ranks of a trial stand at the same place, so each may load its own state or that of another.
        """
        feed_epoch = self._account.feed_epoch
        if feed_epoch is None:
            feed_epoch = self._stream.cursor // self._info.order.blocks_per_epoch
        return {
            "version": STATE_VERSION,
            "fingerprint": self._info.fingerprint,
            "epoch": self.epoch,
            "feed_epoch": feed_epoch,
            **self._account.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken: the next loop yields exactly the rest of its epoch.

        A state taken between two epochs joins the epoch that others are about to begin, if there is one.

        Raises:
            StateError: the state is of another dataset, pipeline, seed or version.
        """
        self._check_open()
        if state.get("version") != STATE_VERSION:
            raise StateError(f"loader state must have version {STATE_VERSION}, got {state.get('version')!r}")
        if state["fingerprint"] != self._info.fingerprint:
            raise StateError(
                "the state belongs to another dataset, pipeline or seed: its fingerprint is "
                f"{state['fingerprint']}, the feed's is {self._info.fingerprint}"
            )
        order = self._info.order
        position = min(state["position"], order.num_samples - 1)
        start = state["feed_epoch"] * order.blocks_per_epoch + position // order.block_samples
        report = self._take_report()
        self._loop += 1
        self._stream = self._join(start, flexible=state["position"] == 0, info=self._info)
        self._set_course((start, state["position"]) if state["position"] else None)
        with self._news_lock:
            self._news[:0] = report.ledgers
        self._farewell.detach()
        self._farewell = weakref.finalize(self, _leave_quietly, self._stream)
        self._begin_epoch()
        self.epoch = state["epoch"]
        self._account = EpochProgress.restored(state, rank=self._rank, world_size=self._world_size)

    # ---- for the service and for people ----

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the labels, by number."""
        return self._info.class_names

    @property
    def stall_share(self) -> float:
        """Share of this trial's time that it waited for data, 0 to 1, since it joined."""
        return self.report().stall_share

    def report(self) -> ConsumerReport:
        """What this consumer did since it joined: samples, seconds of stall and of work; without ledgers."""
        return ConsumerReport(
            loader=self._id,
            samples=self._samples,
            wait_s=self._figures.waited_s,
            fetch_stall_s=self._figures.fetch_stalled_s,
            step_s=self._step_s,
            local_bytes=self._figures.local_bytes,
            remote_bytes=self._figures.remote_bytes,
        )

    def flush(self) -> None:
        """Tell the service now what the next heartbeat would say: figures, and ledgers of finished epochs."""
        if self._closed:
            return
        report = self._take_report()
        try:
            self._stream.heartbeat(report)
        except MbaasError:
            with self._news_lock:
                self._news[:0] = report.ledgers
            raise

    def _take_report(self) -> ConsumerReport:
        """`report` with the ledgers that were not handed in yet; they are handed in once."""
        with self._news_lock:
            news, self._news = tuple(self._news), []
        return replace(self.report(), ledgers=news)

    def close(self) -> None:
        """Leave the feed; what this consumer held is free for others. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._pulse.end()
        self._farewell.detach()
        _leave_quietly(self._stream, self._take_report())

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = self._info.settings.name
        return f"Loader(feed={name!r}, consumer={self._consumer!r}, batch_size={self._batch_size}, epoch={self.epoch})"


def _own(samples: BlockView, leg: BlockShard) -> BlockView:
    """What a rank has to take of the samples that it read."""
    if len(samples) == len(leg.rows):
        return samples
    there = leg.good if samples.rows is None else samples.rows
    indices = np.searchsorted(there, leg.rows)
    assert np.array_equal(there[indices], leg.rows), "a block lacks rows that are this rank's"
    return samples.only(indices)


def _checked_batch_size(batch_size: int | None, default: int, world_size: int) -> int:
    size = default if batch_size is None else batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < world_size:
        raise ConfigError(f"batch_size must be a whole number of at least world_size ({world_size}), got {size!r}")
    return size


def _leave_quietly(stream: Stream, report: ConsumerReport | None = None) -> None:
    """Give the place back, if there is still somebody to give it to: a loader may outlive its feed, and its cluster."""
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # Ray has no class for an actor of another cluster
            stream.leave(report)
