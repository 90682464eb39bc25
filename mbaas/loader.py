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
from numpy.typing import NDArray

from mbaas.delivery.convert import Batch, make_converter
from mbaas.delivery.cut import Cutter, share
from mbaas.delivery.ledger import Tally, close, expected
from mbaas.delivery.mosaic import Arrays
from mbaas.delivery.stream import Block, BlockStream
from mbaas.errors import ConfigError, MbaasError, StateError
from mbaas.staging.status import ConsumerReport, EpochLedger

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

    Attributes:
        ledger: what the last finished epoch held against what it had to hold, or None.
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
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, world_size - 1], world_size was {world_size} and rank was {rank}")
        self._coordinator, self._consumer = coordinator, consumer
        self._rank, self._world_size = rank, world_size
        self._format, self._device, self._wait_timeout_s = format, device, wait_timeout_s
        make_converter(format, device, None)
        self._stream = self._join(None, False)
        self._info = self._stream.info
        try:
            self._batch_size = _checked_batch_size(batch_size, self._info.settings.batch_size, world_size)
        except ConfigError:
            _leave_quietly(self._stream)
            raise
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
        self._pulse = _Pulse(self)

    def _join(self, start: int | None, flexible: bool) -> BlockStream:
        return BlockStream(
            self._coordinator,
            self._consumer,
            start=start,
            flexible=flexible,
            wait_timeout_s=self._wait_timeout_s,
        )

    def _begin_epoch(self) -> None:
        self._tally = Tally()
        self._left_out: set[int] = set()
        self._feed_epoch: int | None = None
        self._resume_at = 0
        self._last_id: int | None = None
        self._begun = False

    # ---- iteration ----

    def __len__(self) -> int:
        """Minibatches in an epoch (of this rank); with bad samples left out the last ones may be missing."""
        samples = self._info.sweep.num_samples
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

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
        blocks = self._info.sweep.blocks_per_epoch
        self._stream.skip_to(-(-self._stream.cursor // blocks) * blocks)
        self.epoch += 1
        self._begin_epoch()

    def _epoch(self, loop: int) -> Iterator[Batch]:
        converter = make_converter(self._format, self._device, self._info.normalize)
        started: deque[tuple[Any, NDArray[np.int64]]] = deque()
        source = self._minibatches()
        more = True
        while more or started:
            while more and len(started) <= converter.ahead:
                arrays = next(source, None)
                if arrays is None:
                    more = False
                else:
                    started.append((converter.start(share(arrays, self._rank, self._world_size)), arrays["sample_id"]))
                    del arrays
            if not started:
                break
            item, sample_ids = started.popleft()
            self._count(sample_ids)
            batch = converter.finish(item)
            del item, sample_ids
            self._samples += len(batch["sample_id"])
            handed_out = time.perf_counter()
            yield batch
            del batch
            self._step_s += time.perf_counter() - handed_out
            self._check_current(loop)
        self._finish_epoch()

    def _count(self, sample_ids: Any) -> None:
        """The minibatch counts as consumed from here on: it is in the ledger and before the position of a
        saved state.
        """
        self._tally.add(sample_ids)
        self._last_id = int(sample_ids[-1])
        self._resume_at = 0

    def _minibatches(self) -> Iterator[Arrays]:
        """Minibatches, over all ranks, of the rest of the current epoch."""
        cutter = Cutter(self._batch_size)
        for block in self._epoch_blocks():
            cutter.put(block.samples, self._first_row(block))
            del block
            while cutter.full():
                yield cutter.cut()  # type: ignore[misc]
            cutter.settle()
        rest = cutter.cut()
        if rest is not None and not self._drop_last:
            yield rest

    def _epoch_blocks(self) -> Iterator[Block]:
        """The blocks of the rest of the current epoch."""
        blocks_per_epoch = self._info.sweep.blocks_per_epoch
        self._begun, last = True, False
        while not last:
            block = self._stream.next()
            self._feed_epoch = block.number // blocks_per_epoch
            self._left_out.update(bad.sample_id for bad in block.bad)
            last = (block.number + 1) % blocks_per_epoch == 0
            yield block
            del block

    def _first_row(self, block: Block) -> int:
        """The first row of a block that is not before the position of a loaded state."""
        if self._resume_at == 0:
            return 0
        assert self._feed_epoch is not None
        positions = self._info.sweep.positions(self._feed_epoch, block.samples.sample_ids())
        return int(np.searchsorted(positions, self._resume_at))

    def _finish_epoch(self) -> None:
        assert self._feed_epoch is not None
        due = expected(self._info.sweep, self._feed_epoch, self._left_out, self._batch_size if self._drop_last else 1)
        self.ledger = close(self.epoch, self._feed_epoch, self._tally, due)
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
        """
        position = self._resume_at
        if self._last_id is not None:
            assert self._feed_epoch is not None
            ids = np.array([self._last_id], np.int64)
            position = int(self._info.sweep.positions(self._feed_epoch, ids)[0]) + 1
        boundary = self._stream.cursor // self._info.sweep.blocks_per_epoch
        return {
            "version": STATE_VERSION,
            "fingerprint": self._info.fingerprint,
            "epoch": self.epoch,
            "feed_epoch": self._feed_epoch if self._feed_epoch is not None else boundary,
            "position": position,
            "samples": self._tally.samples,
            "id_hash": self._tally.id_hash,
            "left_out": sorted(self._left_out),
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
        sweep = self._info.sweep
        position = min(state["position"], sweep.num_samples - 1)
        start = state["feed_epoch"] * sweep.blocks_per_epoch + position // sweep.block_samples
        report = self._take_report()
        self._loop += 1
        self._stream = self._join(start, flexible=state["position"] == 0)
        self._stream.waited_s, self._stream.fetch_stalled_s = report.wait_s, report.fetch_stall_s
        with self._news_lock:
            self._news[:0] = report.ledgers
        self._farewell.detach()
        self._farewell = weakref.finalize(self, _leave_quietly, self._stream)
        self._begin_epoch()
        self.epoch = state["epoch"]
        self._tally = Tally(state["samples"], state["id_hash"])
        self._left_out = set(state["left_out"])
        self._resume_at = state["position"]

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
            wait_s=self._stream.waited_s,
            fetch_stall_s=self._stream.fetch_stalled_s,
            step_s=self._step_s,
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


def _checked_batch_size(batch_size: int | None, default: int, world_size: int) -> int:
    size = default if batch_size is None else batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < world_size:
        raise ConfigError(f"batch_size must be a whole number of at least world_size ({world_size}), got {size!r}")
    return size


def _leave_quietly(stream: BlockStream, report: ConsumerReport | None = None) -> None:
    """Give the place back, if there is still somebody to give it to."""
    if ray.is_initialized():
        with contextlib.suppress(MbaasError):
            stream.leave(report)


class _Pulse:
    """A thread that keeps the consumer's lease alive, and ends with its loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)
        self._done = False
        self._wake = threading.Event()
        period_s = min(HEARTBEAT_S, loader._info.settings.lease_s / 5)
        self._thread = threading.Thread(
            target=self._run, args=(period_s,), name=f"mbaas-pulse-{loader._consumer}", daemon=True
        )
        weakref.finalize(loader, self._wake.set)
        self._thread.start()

    def _run(self, period_s: float) -> None:
        while True:
            self._wake.wait(period_s)
            self._wake.clear()
            loader = self._loader()
            if loader is None or self._done or not ray.is_initialized():
                return
            with contextlib.suppress(MbaasError):  # the trial's own next call raises it, where it can be seen
                loader.flush()
            del loader

    def beat(self) -> None:
        """Say at once where the consumer stands: at an epoch's end the service may have to seat a
        successor there.
        """
        self._wake.set()

    def end(self) -> None:
        self._done = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
