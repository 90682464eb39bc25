"""Engines turn encoded samples into prepared ones: their protocol, and the choice of an engine.

The result is a pure function of (seed, epoch, sample id, encoded bytes). It does not depend on the block, the number of
threads, or earlier calls, nor on whether a sample arrives encoded or in its cached decoded form.

`cpu`         images, on the CPU
`dali`        images, by DALI on a GPU or the CPU
`arrays`      audio and other arrays, on the CPU
`dali_sound`  spectrograms, by DALI after the first steps of `arrays`
`dali_runs`   runs DALI graphs in batches of bounded size
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.errors import BadSampleError, ConfigError
from mbaas.prep.decoded import DecodedRows
from mbaas.prep.process import SampleThreads
from mbaas.prep.sound import sound_libraries
from mbaas.samples.fields import Arrays, Column, Field
from mbaas.transforms import DecodeAudio, Pipeline
from mbaas.transforms.arrays import UnfitError
from mbaas.transforms.decoders import MOST_PIXELS, is_numeric
from mbaas.wire.samples import EngineName

Encoded = bytes | memoryview | NDArray[np.uint8]
"""The bytes of one sample: a file, or the container of a decoded sample. Engines must not modify them."""

EngineOf = Callable[[NDArray[np.int64], int], NDArray[np.bool_]]
"""Selects the samples of one of two engines: (sample ids int64[n], epoch) -> bool[n]."""

DEFAULT_MAX_PIXELS = MOST_PIXELS
"""Default limit of the size of an image, in pixels."""

DEFAULT_MAX_BYTES = 1 << 30
"""Default limit of the decoded size of audio and other arrays, in bytes; equal to the limit of a file."""


class BadRow(Struct, frozen=True):
    """A sample of a block (``row`` is its index) that could not be prepared, and the reason, as one clause."""

    row: int
    reason: str


class Prepared(Struct, frozen=True):
    """The result of preparing n samples.

    Attributes:
        bad: samples that could not be prepared, in order of row.
        known: the dataset's fields of the good samples, in order of row. Fields with image coordinates follow the
            transformed pixels, and a Map may change fields; all other fields are the input's.
        made: the prepared field of all n samples, either ``out`` itself, or packed if samples differ in size. Bad
            samples are zero; packed ones may also be empty.
    """

    bad: list[BadRow]
    known: Arrays
    made: Column


@dataclass(frozen=True)
class Batch:
    """n samples to prepare.

    Attributes:
        ids: int64[n], the samples' ids.
        epoch: seeds the random transforms.
        known: the samples' fields, as in the dataset; not modified in place.
    """

    encoded: Sequence[Encoded]
    ids: NDArray[np.int64]
    epoch: int
    known: Arrays

    def __len__(self) -> int:
        return len(self.encoded)


class Engine(ABC):
    """Prepares blocks of samples in ``threads`` threads. Not thread-safe: one call at a time."""

    name: EngineName = "cpu"

    def __init__(self, pipeline: Pipeline, seed: int, threads: int) -> None:
        self._pipeline, self._seed = pipeline, seed
        self._threads = SampleThreads(threads)
        self._graphs: Sequence[Any] = ()  # `GraphRuns`, which only the dali engines import
        # Numbers of transforms after which samples may be kept, ascending.
        self._kept_after: Sequence[int] = range(1, pipeline.prefix + 1)

    @property
    def forms(self) -> dict[int, int]:
        """Forms in which the engine can keep samples, and go on from kept ones -> transforms applied, ascending."""
        return {self._pipeline.prefix_forms[applied - 1]: applied for applied in self._kept_after}

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        """Return the shape and dtype of a prepared sample. Decode it only if the pipeline does not determine them.

        Raises:
            BadSampleError: ``encoded`` had to be decoded and cannot be.
            ConfigError: Normalize follows, but samples are not uint8 [height, width, 3]; or samples are not numeric, or
                have fewer axes than those that may differ.
        """
        try:
            sample = self._first_sample(Batch([encoded], np.zeros(1, np.int64), 0, known))
        except UnfitError as error:
            raise BadSampleError(uri, str(error)) from error
        differing, got = self._pipeline.differing, f"{sample.dtype.name} {list(sample.shape)}"
        if not is_numeric(sample.dtype):
            raise ConfigError(f"samples are arrays of {sample.dtype.name}, and must be numbers that torch has")
        if self._pipeline.normalize and not is_image(sample):
            raise ConfigError(f"Normalize needs uint8 [height, width, 3], but samples are {got}")
        if sample.ndim < differing:
            which = "their first length" if differing == 1 else f"their first {differing} lengths"
            if self._pipeline.has_images:
                which = "height and width (DecodeImage's max_pixels)"
            has = got if sample.ndim else "a number without any"
            raise ConfigError(f"samples may differ in {which}, but the first one is {has}")
        shape = (*(None,) * differing, *sample.shape[differing:])
        return Field(self._pipeline.decoder.field, shape, sample.dtype.name, self._pipeline.longest)

    @abstractmethod
    def _first_sample(self, batch: Batch) -> NDArray[Any]:
        """Prepare the only sample of ``batch``; raise UnfitError if it is bad."""

    @abstractmethod
    def prepare(self, batch: Batch, out: NDArray[Any], keep: DecodedRows | None = None) -> Prepared:
        """Prepare n samples.

        Args:
            out: [n, *field.shape], receives the prepared samples; rows of bad samples become zero. If samples differ in
                size, it is contiguous memory for n samples of the largest size (`Field.empty`), filled end to end.
            keep: receives the decoded form of its wanted rows, if these are good and not in that form yet, up to its
                capacity.
                Samples that are good in this epoch only are not kept, such as audio that is damaged outside the epoch's
                window.

        Raises:
            DatasetError: a field with image coordinates, or a field that must match one, does not fit the image.
        """

    def close(self) -> None:
        """Release threads and device memory."""
        self._threads.close()
        for graph in self._graphs:
            graph.close()


def is_image(array: NDArray[Any]) -> bool:
    """Return whether an array is uint8 [height, width, 3]."""
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size > 0


def possible_engines(kind: str, pipeline: Pipeline, *, gpus: int) -> tuple[EngineName, ...]:
    """Return the engines that may prepare ``pipeline``: one, or both for "auto" if there are GPUs and DALI supports it.

    Args:
        kind: "auto", "cpu" or "dali". DALI also runs without a GPU, but is then slower for images than cpu.

    Raises:
        ConfigError: ``kind`` is unknown, or is "dali" for a pipeline with a transform that only the cpu engine runs.
    """
    if kind not in ("auto", "cpu", "dali"):
        raise ConfigError(f"engine must be 'auto', 'cpu' or 'dali', got {kind!r}")
    cpu_only = pipeline.cpu_only
    if kind == "dali" and cpu_only:
        wanted = f"use 'cpu' or 'auto' for a pipeline with {cpu_only!r}"
        raise ConfigError(f"engine 'dali' {cpu_only.dali_limit}; {wanted}")
    if kind == "cpu" or cpu_only or (kind == "auto" and gpus == 0):
        return ("cpu",)
    return ("dali",) if kind == "dali" else ("cpu", "dali")


def check_share(dali_share: float, engine: str, pipeline: Pipeline) -> None:
    """Check that the samples may be divided between DALI and the cpu engine.

    Raises:
        ConfigError: ``dali_share`` is below 1, and ``engine`` is "cpu" or the pipeline is not for images.
    """
    if dali_share == 1:
        return
    if engine == "cpu":
        raise ConfigError(f"dali_share must be 1 with engine='cpu', which leaves nothing to DALI, got {dali_share}")
    if not pipeline.has_images:
        raise ConfigError(
            f"dali_share must be 1 for a pipeline that begins with {pipeline.decoder!r}: only images are shared out, "
            f"got {dali_share}"
        )


def workers_per_gpu(pipeline: Pipeline) -> int:
    """Return the default number of dali workers per GPU.

    Images are decoded on the GPU: two workers keep it busy, as one decodes while the other reads headers and hands in
    results. Audio is decoded on CPUs, so it takes more workers.
    """
    return 2 if pipeline.has_images else 4


def check_packages(pipeline: Pipeline) -> None:
    """Raise ConfigError if an optional package that a pipeline needs is missing here; all nodes should be equal."""
    if isinstance(pipeline.decoder, DecodeAudio):
        sound_libraries()


def make_engine(
    kind: EngineName,
    pipeline: Pipeline,
    *,
    seed: int,
    threads: int = 1,
    device_id: int | None = None,
    for_dali: EngineOf | None = None,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Engine:
    """Construct an engine for ``pipeline``.

    Args:
        kind: one of `possible_engines`.
        seed: the feed's seed, in [0, 2**63).
        device_id: the GPU for DALI; None runs DALI on the CPU.
        for_dali: selects the images for DALI; the dali engine prepares the others on CPUs at the same time. None: all.
        max_pixels: larger images are rejected by their header, before memory is allocated.
        max_bytes: the same limit for audio and other arrays, in decoded bytes.

    Raises:
        ConfigError: a package needed by the pipeline is missing.
    """
    # Import lazily: a process loads the libraries of one engine only.
    if kind == "cpu" and not pipeline.has_images:
        from mbaas.prep.engines.arrays import ArrayEngine

        return ArrayEngine(pipeline, seed=seed, threads=threads, max_bytes=max_bytes)
    if kind == "cpu":
        from mbaas.prep.engines.cpu import CpuEngine

        return CpuEngine(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
    possible_engines(kind, pipeline, gpus=0)  # for its error: DALI itself would fail at the first block only
    if not pipeline.has_images:
        from mbaas.prep.engines.dali_sound import DaliSoundEngine

        return DaliSoundEngine(pipeline, seed=seed, threads=threads, device_id=device_id, max_bytes=max_bytes)
    from mbaas.prep.engines.dali import DaliEngine

    return DaliEngine(
        pipeline, seed=seed, threads=threads, device_id=device_id, max_pixels=max_pixels, for_dali=for_dali
    )
