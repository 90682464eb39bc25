"""Runs graphs of NVIDIA DALI: in batches of a bounded size, because a device holds all samples of a batch at once.

Where even that is too much for its memory, the bound is halved. A batch that fails is halved until the samples that
DALI refuses are found; they are for the cpu engine, which also says what is wrong with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from nvidia import dali

types: Any = dali.types
_Graph: Any = dali.pipeline.Pipeline
"""DALI's pipeline class, which comes from C++ without types, as `types` does."""

# By its words, because DALI raises RuntimeError for everything; all but these are a bug, or a device that failed.
_REFUSALS = ("Failed to decode", "nvImageCodec failure")
# DALI's own allocator (dali/core/cuda_error.h), CUDA, and nvImageCodec. What C++ raises alone comes as MemoryError.
_OUT_OF_MEMORY = ("CUDA allocation failed", "Can't allocate", "out of memory", "bad_alloc", "ALLOCATOR_FAILURE")

Feed: TypeAlias = Sequence[NDArray[Any]] | NDArray[Any]
"""An input of a graph: number i is for sample i."""

_log = logging.getLogger(__name__)


class GraphRuns:
    """A graph and its runs.

    Args:
        outputs: makes the graph's single output; called within DALI's pipeline whenever the graph is built anew.
        threads: of DALI.
        device_id: the GPU; None runs DALI on the CPU.
        limit: of the sizes of a batch's samples together, unless one alone has more.
        unit: what sizes count, such as "pixels".
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
        feeds: Mapping[str, Feed],
        deliver: Callable[[int, NDArray[Any]], None],
    ) -> list[int]:
        """Prepare samples; return those that DALI refuses.

        Args:
            taken: which of n samples.
            sizes: int64[n], what each weighs against the limit.
            feeds: name -> the input of each of the n samples. DALI may read them where they lie.
            deliver: takes a sample's number and its result, which is valid only until it returns.
        """
        refused: list[int] = []
        while len(taken):
            batch = taken[: _fitting(sizes[taken], self._limit)]
            refused += self._run(batch, feeds, deliver)
            taken = taken[len(batch) :]
        return refused

    def set_threads(self, threads: int) -> None:
        """Work with ``threads`` threads. DALI fixes them when a graph is built, so the next run builds it anew."""
        self._threads, self._graph = threads, None

    def close(self) -> None:
        """Release the graph's threads and memory."""
        self._graph = None

    def _run(
        self, indices: NDArray[np.intp], feeds: Mapping[str, Feed], deliver: Callable[[int, NDArray[Any]], None]
    ) -> list[int]:
        try:
            result = self._run_graph(feeds, indices)
        except (RuntimeError, MemoryError) as error:
            self._graph = None  # a graph that raised cannot be run again
            if isinstance(error, MemoryError) or _says(error, _OUT_OF_MEMORY):
                self._take_less()
            elif not _says(error, _REFUSALS):
                raise
        else:
            for position, index in enumerate(indices.tolist()):
                deliver(index, result.at(position))
            return []
        if len(indices) == 1:
            return [int(indices[0])]
        middle = len(indices) // 2
        return [*self._run(indices[:middle], feeds, deliver), *self._run(indices[middle:], feeds, deliver)]

    def _take_less(self) -> None:
        """Make batches half as large from now on: the device has no more memory for us, others may use it, too."""
        # The graph that is built next is for as few samples as it needs, not for as many as there once were.
        self._batch, self._limit = 0, max(1, self._limit // 2)
        where = "the CPU" if self._device_id is None else f"GPU {self._device_id}"
        _log.warning("%s is out of memory: batches of %d %s from now on", where, self._limit, self._unit)

    def _run_graph(self, feeds: Mapping[str, Feed], indices: NDArray[np.intp]) -> Any:
        """Return DALI's list of results in host memory, valid until the next run."""
        graph = self._graph_for(len(indices))
        for name, rows in feeds.items():
            some = rows[indices] if isinstance(rows, np.ndarray) else [rows[index] for index in indices.tolist()]
            graph.feed_input(name, some)
        (results,) = graph.run()
        return results if self._device_id is None else results.as_cpu()

    def _graph_for(self, batch: int) -> Any:
        if self._graph is None or batch > self._batch:
            # Never smaller than before: blocks of changing sizes would have it built again and again.
            self._batch = max(batch, self._batch)
            # One batch at a time: its inputs are read where they lie, and they are there only while it is prepared.
            graph = _Graph(
                batch_size=self._batch, num_threads=self._threads, device_id=self._device_id, prefetch_queue_depth=1
            )
            with graph:
                graph.set_outputs(self._outputs())
            graph.build()
            self._graph = graph
        return self._graph


def _fitting(sizes: NDArray[np.int64], limit: int) -> int:
    """Return how many of the first samples stay within a limit together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(sizes), limit, side="right")))


def _says(error: Exception, words: Sequence[str]) -> bool:
    return any(word in str(error) for word in words)
