"""Runs DALI graphs in batches of bounded size, because all samples of a batch are in device memory at once.

A batch that fails is halved until the rejected samples are found. The cpu engine prepares these, or reports the error.
If the device ran out of memory, and not only for some of the samples, the bound is halved.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from nvidia import dali

from mbaas.memory import pinned

types: Any = dali.types
_Graph: Any = dali.pipeline.Pipeline
"""The DALI pipeline class. It comes from C++ without types, like `types`."""

# Matched by text, because DALI raises RuntimeError for everything. All other errors are bugs or device failures.
_REFUSALS = ("Failed to decode", "nvImageCodec failure")
# From DALI's allocator (dali/core/cuda_error.h), CUDA, and nvImageCodec. A pure C++ bad_alloc becomes MemoryError.
_OUT_OF_MEMORY = ("CUDA allocation failed", "Can't allocate", "out of memory", "bad_alloc", "ALLOCATOR_FAILURE")

IN_FLIGHT = 2
"""Batches in a graph at a time. With one, the GPU would be idle while the headers of the next batch are read."""

GraphInput: TypeAlias = Mapping[int, NDArray[Any]] | Sequence[NDArray[Any]] | NDArray[Any]
"""An input of a graph: item i belongs to sample i. Items of samples that are not prepared may be missing."""

Deliver: TypeAlias = Callable[[Mapping[int, NDArray[Any]]], None]
"""Called with the results of samples of one batch, by sample index."""

PlaceOf: TypeAlias = Callable[[int], "NDArray[Any] | None"]
"""Maps a sample's index to the memory for its result; None if not known yet."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """Samples of a block, see `GraphRuns.run`."""

    sizes: NDArray[np.int64]
    feeds: Mapping[str, GraphInput]
    deliver: Deliver
    place: PlaceOf | None


class GraphRuns:
    """A DALI graph and its runs.

    Three steps overlap: a GPU prepares one batch, CPUs begin the next one (file headers, launching kernels), and the
    results of the previous one are delivered.

    Args:
        outputs: builds the graph's single output; called within a DALI pipeline whenever the graph is rebuilt.
        threads, device_id: DALI threads, and the GPU; None runs DALI on the CPU.
        limit: maximum total size of a batch's samples in ``unit``, such as "pixels", unless a single sample is larger.
    """

    def __init__(
        self, outputs: Callable[[], Any], *, threads: int, device_id: int | None, limit: int, unit: str
    ) -> None:
        self._outputs, self._threads, self._device_id = outputs, threads, device_id
        self._limit, self._unit = limit, unit
        self._graph: Any = None
        self._batch = 0

    def run(
        self,
        taken: NDArray[np.intp],
        sizes: NDArray[np.int64],
        feeds: Mapping[str, GraphInput],
        deliver: Deliver,
        place: PlaceOf | None = None,
    ) -> list[int]:
        """Prepare samples; return the indices of rejected samples.

        Args:
            taken: indices of the samples to prepare, out of n.
            sizes: int64[n], size of each sample in ``unit``.
            feeds: name -> input of each of the n samples. DALI may read them in place.
            deliver: called with the results of each batch, which are valid only during the call.
            place: returns memory for a sample's result. A result on a GPU that fits is copied there instead of
                delivered.
        """
        try:
            return self._run(taken, _Job(sizes, feeds, deliver, place))
        except BaseException:
            self._graph = None  # a pending batch would be taken for the result of the next run
            raise

    def close(self) -> None:
        self._graph = None

    def _run(self, taken: NDArray[np.intp], job: _Job) -> list[int]:
        refused: list[int] = []
        running: deque[NDArray[np.intp]] = deque()
        ready: list[tuple[Any, NDArray[np.intp]]] = []  # at most one, delivered once the next batch is started
        while len(taken) or running or ready:
            following = self._first(taken, job)
            if len(running) == IN_FLIGHT or (running and self._is_too_many(len(following))):
                following = taken[:0]  # the graph is full, or must be rebuilt once it is free
            try:
                if len(following):
                    self._start(following, job)
                elif not ready:
                    ready.append((self._results(), running.popleft()))
                    continue
            except (RuntimeError, MemoryError) as error:
                # Each of these batches may be the cause, and their results were lost with the graph.
                refused += self._run_again(error, (*running, following), job)
                running.clear()
            else:
                if len(following):
                    running.append(following)
            taken = taken[len(following) :]
            if ready:
                self._hand_on(*ready.pop(), job)
        return refused

    def _run_alone(self, indices: NDArray[np.intp], job: _Job) -> list[int]:
        """Prepare samples one batch at a time; halve a batch that fails, and return the samples that fail alone."""
        refused: list[int] = []
        while len(indices):
            batch = self._first(indices, job)
            indices = indices[len(batch) :]
            try:
                self._start(batch, job)
                results = self._results()
            except (RuntimeError, MemoryError) as error:
                if len(batch) == 1:
                    self._recover(error)
                    refused.append(int(batch[0]))
                else:
                    refused += self._run_again(error, np.array_split(batch, 2), job)
            else:
                self._hand_on(results, batch, job)
        return refused

    def _run_again(
        self, error: RuntimeError | MemoryError, batches: Sequence[NDArray[np.intp]], job: _Job
    ) -> list[int]:
        """Prepare the samples of batches that failed together; return the samples that fail alone."""
        was_full, limit = self._recover(error), self._limit
        refused = [index for indices in batches for index in self._run_alone(indices, job)]
        if 0 < len(refused) < sum(map(len, batches)):
            self._limit = limit  # samples that are too large alone say nothing about batches of others
        elif was_full and self._limit == limit:
            self._halve_limit()
        return refused

    def _first(self, indices: NDArray[np.intp], job: _Job) -> NDArray[np.intp]:
        """Return as many of the first samples as the limit allows, at least one."""
        together = int(np.searchsorted(np.cumsum(job.sizes[indices]), self._limit, side="right"))
        return indices[: max(1, together)]

    def _recover(self, error: RuntimeError | MemoryError) -> bool:
        """Discard the graph, and return whether the device was out of memory.

        Re-raises the error, unless the samples of a batch or their number may have caused it.
        """
        self._graph = None  # a graph that raised cannot be run again
        if isinstance(error, MemoryError) or _mentions(error, _OUT_OF_MEMORY):
            self._batch = 0  # the next graph is built for as few samples as needed, not for the largest batch so far
            return True
        if not _mentions(error, _REFUSALS):
            raise error
        return False

    def _halve_limit(self) -> None:
        self._batch, self._limit = 0, max(1, self._limit // 2)
        where = "the CPU" if self._device_id is None else f"GPU {self._device_id}"
        _log.warning("%s is out of memory: batches of %d %s from now on", where, self._limit, self._unit)

    # ---- one batch ----

    def _start(self, indices: NDArray[np.intp], job: _Job) -> None:
        self._feed(job.feeds, indices)
        self._graph.schedule_run()

    def _feed(self, feeds: Mapping[str, GraphInput], indices: NDArray[np.intp]) -> None:
        graph = self._graph_for(len(indices))
        for name, rows in feeds.items():
            some = rows[indices] if isinstance(rows, np.ndarray) else [rows[index] for index in indices.tolist()]
            graph.feed_input(name, some)

    def _results(self) -> Any:
        """Wait for the results: a DALI list in device memory, valid while it is referenced."""
        (results,) = self._graph.share_outputs()
        self._graph.release_outputs()
        return results

    def _hand_on(self, results: Any, indices: NDArray[np.intp], job: _Job) -> None:
        left = [*range(len(indices))]
        if self._device_id is not None and job.place is not None:
            left = self._put(results, indices, job.place)
        if left:
            on_host = results if self._device_id is None else results.as_cpu()
            job.deliver({int(indices[position]): on_host.at(position) for position in left})

    def _put(self, results: Any, indices: NDArray[np.intp], place: PlaceOf) -> list[int]:
        """Copy results from the GPU to their memory; return the positions of results that do not fit."""
        assert self._device_id is not None
        shapes, dtype = results.shape(), np.dtype(types.to_numpy_type(results.dtype))
        begin = results.as_tensor().data_ptr() if results.is_dense_tensor() else None
        copies: list[tuple[int, int, int]] = []
        left = []
        for position, index in enumerate(indices.tolist()):
            to = place(index)
            if to is None or to.shape != tuple(shapes[position]) or to.dtype != dtype or not to.flags.c_contiguous:
                left.append(position)
                continue
            at = results.at(position).data_ptr() if begin is None else begin + position * to.nbytes
            copies.append((to.ctypes.data, at, to.nbytes))
        pinned.gpu(self._device_id).copy_to_host(_joined(copies))
        return left

    def _is_too_many(self, batch: int) -> bool:
        return self._graph is None or batch > self._batch

    def _graph_for(self, batch: int) -> Any:
        if self._is_too_many(batch):
            # Never shrink: with varying block sizes the graph would be rebuilt again and again.
            self._batch = max(batch, self._batch)
            graph = _Graph(
                batch_size=self._batch,
                num_threads=self._threads,
                device_id=self._device_id,
                prefetch_queue_depth=IN_FLIGHT,
            )
            with graph:
                graph.set_outputs(self._outputs())
            graph.build()
            # Private: otherwise the first `schedule_run` would require as many batches as can be in flight, and a block
            # may have only one. DALI sets it in its first run.
            graph._first_iter = False
            self._graph = graph
        return self._graph


def _joined(copies: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join copies that are adjacent on both sides."""
    joined: list[tuple[int, int, int]] = []
    for to, source, nbytes in copies:
        if joined:
            last_to, last_source, length = joined[-1]
            if (to, source) == (last_to + length, last_source + length):
                joined[-1] = last_to, last_source, length + nbytes
                continue
        joined.append((to, source, nbytes))
    return joined


def _mentions(error: Exception, words: Sequence[str]) -> bool:
    return any(word in str(error) for word in words)
