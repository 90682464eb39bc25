"""The dali engine: NVIDIA DALI on a GPU or the CPU.

Three rules keep a sample's result independent of the minibatch that it comes in:

* On a GPU all JPEGs take the CUDA decoder. DALI would share a batch out between it and the hardware decoder,
  whose pixels differ slightly.
* CMYK JPEGs, which decoders treat differently, and files that DALI refuses although their header is good, are
  prepared by the cpu engine.
* A batch that fails is halved until the samples that DALI refuses are found.

A block goes through DALI in batches of a bounded number of pixels, because a GPU holds all images of a batch at once.
Where even that is too much, the bound is halved, and an image that is too large by itself is left to the cpu engine.

Damage inside a JPEG's entropy-coded data shows only while it is decoded: DALI then fills with grey where the
cpu engine refuses. Truncated files are found by both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays, Field, Packed
from mbaas.messages import EngineName
from mbaas.prep import dali_graph
from mbaas.prep.cpu import CpuEngine
from mbaas.prep.engine import DEFAULT_MAX_PIXELS, BadRow, Encoded, Prepared
from mbaas.prep.header import Header, UndecodableError
from mbaas.prep.part_input import PartInput, read_headers
from mbaas.prep.places import Places, places_of
from mbaas.prep.plan import plan, stages_of
from mbaas.transforms import Pipeline
from mbaas.transforms.base import Step, Windows

# By its words, because DALI raises RuntimeError for everything; all but these are a bug, or a device that failed.
_REFUSALS = ("Failed to decode", "nvImageCodec failure")
# DALI's own allocator (dali/core/cuda_error.h), CUDA, and nvImageCodec. What C++ raises alone comes as MemoryError.
_OUT_OF_MEMORY = ("CUDA allocation failed", "Can't allocate", "out of memory", "bad_alloc", "ALLOCATOR_FAILURE")

BATCH_PIXELS = 64_000_000
"""Pixels, before anything is cropped, of the images that DALI has at a time: 128 of 700x700, or 5 of 12 megapixels.
Decoded they take 200 MB, and about as much again at each stage of the graph.
"""

_log = logging.getLogger(__name__)


class DaliEngine:
    """An engine that prepares samples with DALI. See ``prep.engine.Engine``."""

    name: EngineName = "dali"

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        threads: int = 1,
        device_id: int | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        batch_pixels: int = BATCH_PIXELS,
    ) -> None:
        """Build nothing yet: the first block says for how many samples the graph must be.

        Args:
            device_id: the GPU; None runs DALI on the CPU.
            batch_pixels: of the images of a batch together, unless one alone has more.
            pipeline, seed, threads, max_pixels: see `mbaas.prep.engines.make_engine`.
        """
        self._pipeline, self._stages = pipeline, stages_of(pipeline.prep)[0]
        self._seed = seed
        self._threads = threads
        self._device_id = device_id
        self._max_pixels, self._batch_pixels = max_pixels, batch_pixels
        self._cpu = CpuEngine(pipeline, seed=seed, max_pixels=max_pixels)
        self._graph: Any = None
        self._batch = 0

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        return self._cpu.field(encoded, uri, known)

    def prepare(
        self, encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, known: Arrays, out: NDArray[Any]
    ) -> Prepared:
        block = read_headers(encoded, sample_ids, epoch, known, self._max_pixels)
        placed = block.placed(self._pipeline)
        steps = plan(self._stages, self._seed, epoch, block.sample_ids, block.sizes, placed)
        feeds = dali_graph.feeds(self._stages, steps)
        places = places_of(block, self._pipeline, steps, out)
        fitting = ~np.isin(block.rows, [bad.row for bad in block.bad])
        takes = self._takes(block, steps)
        taken, refused = np.flatnonzero(fitting & takes), np.flatnonzero(fitting & ~takes).tolist()
        while len(taken):
            batch = taken[: _fitting(block.sizes[taken].prod(axis=1), self._batch_pixels)]
            refused += self._run(block, feeds, batch, places)
            taken = taken[len(batch) :]
        if refused:
            self._leave_to_cpu(block, sorted(refused), places, out)
        return block.finish(self._pipeline, steps, places.made())

    def set_threads(self, threads: int) -> None:
        """Work with ``threads`` threads. DALI fixes them when a graph is built, so the next block builds it anew."""
        self._threads, self._graph = threads, None

    def close(self) -> None:
        self._graph = None
        self._cpu.close()

    def _takes(self, block: PartInput, steps: Sequence[Step]) -> NDArray[np.bool_]:
        """Decide which samples go to DALI: bool[n]. Those whose result is too large do not: the cpu engine says what is
        wrong with them.
        """
        takes = np.array([not _is_left_to_cpu(header) for header in block.headers], bool)
        for step in steps:
            if isinstance(step, Windows):
                takes &= step.sizes.prod(axis=1) <= self._max_pixels
        return takes

    def _run(
        self, block: PartInput, feeds: dict[str, NDArray[Any]], indices: NDArray[np.intp], places: Places
    ) -> list[int]:
        """Prepare the samples ``indices`` of the block; return those that DALI refuses."""
        try:
            result = self._run_graph(block, feeds, indices)
        except (RuntimeError, MemoryError) as error:
            self._graph = None  # a graph that raised cannot be run again
            if isinstance(error, MemoryError) or _says(error, _OUT_OF_MEMORY):
                self._take_less()
            elif not _says(error, _REFUSALS):
                raise
        else:
            self._deliver(block, indices, result, places)
            return []
        if len(indices) == 1:
            return [int(indices[0])]
        middle = len(indices) // 2
        return [
            *self._run(block, feeds, indices[:middle], places),
            *self._run(block, feeds, indices[middle:], places),
        ]

    def _take_less(self) -> None:
        """Make batches half as large from now on: the device has no more memory for us, others may use it, too."""
        # The graph that is built next is for as few samples as it needs, not for as many as there once were.
        self._batch, self._batch_pixels = 0, max(1, self._batch_pixels // 2)
        where = "the CPU" if self._device_id is None else f"GPU {self._device_id}"
        _log.warning("%s is out of memory: batches of %d pixels from now on", where, self._batch_pixels)

    def _run_graph(self, block: PartInput, feeds: dict[str, NDArray[Any]], indices: NDArray[np.intp]) -> Any:
        """Return DALI's list of prepared images in host memory, valid until the next run."""
        graph = self._graph_for(len(indices))
        # DALI reads these arrays in place: they live until the run is over.
        encoded = [np.frombuffer(block.encoded[index], np.uint8) for index in indices.tolist()]
        graph.feed_input(dali_graph.ENCODED, encoded)
        for name, rows in feeds.items():
            graph.feed_input(name, rows[indices])
        (images,) = graph.run()
        return images if self._device_id is None else images.as_cpu()

    def _graph_for(self, batch: int) -> Any:
        if self._graph is None or batch > self._batch:
            # Never smaller than before: blocks of changing sizes would have it built again and again.
            self._batch = max(batch, self._batch)
            self._graph = dali_graph.build(
                self._stages, batch=self._batch, threads=self._threads, device_id=self._device_id
            )
        return self._graph

    @staticmethod
    def _deliver(block: PartInput, indices: NDArray[np.intp], images: Any, places: Places) -> None:
        rows = [block.rows[index] for index in indices.tolist()]
        for position, row in enumerate(rows):
            try:
                places.put(row, images.at(position), None)
            except UndecodableError as error:
                block.bad.append(BadRow(row, str(error)))

    def _leave_to_cpu(self, block: PartInput, indices: list[int], places: Places, out: NDArray[Any]) -> None:
        rows = [block.rows[index] for index in indices]
        # Made apart: a choice of rows of `out` is a copy of them.
        apart = np.empty((len(rows), *out.shape[1:]), out.dtype)
        # Their fields go along, because transforms may be drawn by them; what becomes of fields is told by `finish`.
        known = {name: column[np.array(indices)] for name, column in block.known.items()}
        prepared = self._cpu.prepare(
            [block.encoded[index] for index in indices], block.sample_ids[indices], block.epoch, known, apart
        )
        made, bad = prepared.made, {each.row: each.reason for each in prepared.bad}
        for number, row in enumerate(rows):
            if number in bad:
                block.bad.append(BadRow(row, bad[number]))
            else:
                places.put(row, made.value(number) if isinstance(made, Packed) else made[number], None)


def _is_left_to_cpu(header: Header) -> bool:
    """Whether DALI decodes it in another way, or not everywhere: a JPEG of four channels; a WebP."""
    return header.format == "webp" or (header.format == "jpeg" and header.channels == 4)


def _fitting(pixels: NDArray[np.integer[Any]], limit: int) -> int:
    """Return how many of the first images stay within a limit together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(pixels), limit, side="right")))


def _says(error: Exception, words: Sequence[str]) -> bool:
    return any(word in str(error) for word in words)
