"""The dali engine: NVIDIA DALI on a GPU or the CPU.

Three rules keep a sample's result independent of the minibatch that it comes in:

* On a GPU all JPEGs take the CUDA decoder. DALI would share a batch out between it and the hardware decoder,
  whose pixels differ slightly.
* CMYK JPEGs, which decoders treat differently, and files that DALI refuses although their header is good, are
  prepared by the cpu engine.
* What DALI refuses is found by halving its batch (`dali_runs`), and is left to the cpu engine; so is an image that is
  too large for the device's memory by itself.

Damage inside a JPEG's entropy-coded data shows only while it is decoded: DALI then fills with grey where the
cpu engine refuses. Truncated files are found by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays, Field
from mbaas.messages import EngineName
from mbaas.prep import dali_graph
from mbaas.prep.cpu import CpuEngine
from mbaas.prep.dali_runs import Again, Feed, GraphRuns
from mbaas.prep.decoded import Keep
from mbaas.prep.engine import DEFAULT_MAX_PIXELS, BadRow, Encoded, Prepared
from mbaas.prep.header import Header, UndecodableError
from mbaas.prep.part_input import PartInput, read_headers
from mbaas.prep.places import Places, places_of
from mbaas.prep.plan import plan, stages_of
from mbaas.transforms import Pipeline
from mbaas.transforms.base import Step, Windows

BATCH_PIXELS = 64_000_000
"""Pixels, before anything is cropped, of the images that DALI has at a time: 128 of 700x700, or 5 of 12 megapixels.
Decoded they take 200 MB, and about as much again at each stage of the graph.
"""


class DaliEngine:
    """An engine that prepares images with DALI. See ``prep.engine.Engine``."""

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
        self._max_pixels = max_pixels
        self._cpu = CpuEngine(pipeline, seed=seed, max_pixels=max_pixels)
        self._runs = GraphRuns(
            lambda: dali_graph.images(self._stages, gpu=device_id is not None),
            threads=threads,
            device_id=device_id,
            limit=batch_pixels,
            unit="pixels",
        )

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        return self._cpu.field(encoded, uri, known)

    def prepare(
        self,
        encoded: Sequence[Encoded],
        sample_ids: NDArray[np.int64],
        epoch: int,
        known: Arrays,
        out: NDArray[Any],
        keep: Keep | None = None,  # noqa: ARG002 (nothing is kept yet)
    ) -> Prepared:
        block = read_headers(encoded, sample_ids, epoch, known, self._max_pixels)
        placed = block.placed(self._pipeline)
        steps = plan(self._stages, self._seed, epoch, block.sample_ids, block.sizes, placed)
        # DALI reads these arrays in place: they live until the run is over.
        feeds: dict[str, Feed] = {dali_graph.ENCODED: [np.frombuffer(each, np.uint8) for each in block.encoded]}
        feeds |= dali_graph.feeds(self._stages, steps)
        places = places_of(block, self._pipeline, steps, out)

        def take(index: int, image: NDArray[Any]) -> None:
            row = block.rows[index]
            try:
                places.put(row, image, None)
            except UndecodableError as error:
                block.bad.append(BadRow(row, str(error)))

        fitting = ~np.isin(block.rows, [bad.row for bad in block.bad])
        takes = self._takes(block, steps)
        taken, refused = np.flatnonzero(fitting & takes), np.flatnonzero(fitting & ~takes).tolist()
        refused += self._runs.run(taken, block.sizes.prod(axis=1), feeds, take)
        if refused:
            self._leave_to_cpu(block, sorted(refused), places, out)
        return block.finish(self._pipeline, steps, places.made())

    def set_threads(self, threads: int) -> None:
        self._runs.set_threads(threads)

    def close(self) -> None:
        self._runs.close()
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

    def _leave_to_cpu(self, block: PartInput, indices: list[int], places: Places, out: NDArray[Any]) -> None:
        # Their fields go along, because transforms may be drawn by them; what becomes of fields is told by `finish`.
        again = Again(
            [block.rows[index] for index in indices],
            [block.encoded[index] for index in indices],
            block.sample_ids[indices],
            {name: column[np.array(indices)] for name, column in block.known.items()},
            block.epoch,
        )
        block.bad.extend(again.prepare(self._cpu, out, lambda row, image: places.put(row, image, None)))


def _is_left_to_cpu(header: Header) -> bool:
    """Whether DALI decodes it in another way, or not everywhere: a JPEG of four channels; a WebP."""
    return header.format == "webp" or (header.format == "jpeg" and header.channels == 4)
