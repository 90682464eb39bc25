"""What an engine is, which one runs a pipeline, and how to get it.

An engine turns the raw bytes of samples into prepared arrays. The result is a pure function of (seed, epoch,
sample id, raw bytes): it does not depend on the minibatch that a sample comes in, the number of threads, or
earlier calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import Pipeline

EngineName = Literal["cpu", "dali"]
Raw = bytes | memoryview | NDArray[np.uint8]
"""Encoded bytes of one sample; read-only for engines."""

DEFAULT_MAX_PIXELS = 100_000_000


@dataclass(frozen=True)
class SampleSpec:
    """What every prepared sample of a feed looks like.

    Attributes:
        shape: of one sample, for images (height, width, 3).
        dtype: NumPy's name of the element type, "uint8" unless a Map makes another.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of one prepared sample in bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class BadRow:
    """A sample of a block that could not be prepared.

    Attributes:
        row: its index in the block.
        reason: one clause that says what is wrong with it.
    """

    row: int
    reason: str


class Engine(Protocol):
    """Prepares blocks of samples. Not thread-safe: one call at a time."""

    name: EngineName

    def spec(self, raw: Raw, uri: str) -> SampleSpec:
        """Shape and dtype of prepared samples; decodes ``raw`` where the pipeline alone does not tell.

        Raises:
            BadSampleError: ``raw`` had to be decoded and cannot be.
            ConfigError: Normalize is to follow, but samples are not uint8 [height, width, 3].
        """

    def prepare(self, raw: Sequence[Raw], sample_ids: NDArray[np.int64], epoch: int, out: NDArray[Any]) -> list[BadRow]:
        """Fill ``out`` [n, *spec.shape] with the n samples ``raw``; bad rows are zero and reported in order
        of row.
        """

    def set_threads(self, threads: int) -> None:
        """Work with so many threads, at least 1, from the next call on."""

    def close(self) -> None:
        """Release threads and device memory."""


def resolve_engine(kind: str, pipeline: Pipeline, *, gpus: int) -> EngineName:
    """The engine that runs ``pipeline``: "auto" is DALI where there is a GPU and DALI can run it, else cpu.

    Args:
        kind: "auto", "cpu" or "dali". DALI runs without a GPU too, but is then slower than cpu.
        gpus: how many GPUs prep may use.

    Raises:
        ConfigError: another kind, or DALI asked for with a Map or a change of hue in the pipeline.
    """
    if kind not in ("auto", "cpu", "dali"):
        raise ConfigError(f"engine must be 'auto', 'cpu' or 'dali', got {kind!r}")
    cpu_only = pipeline.cpu_only
    if kind == "dali" and cpu_only:
        reason = "runs neither a Map nor ColorJitter's hue"
        raise ConfigError(f"engine 'dali' {reason}; use 'cpu' or 'auto' for a pipeline with {cpu_only!r}")
    if kind == "cpu" or cpu_only or (kind == "auto" and gpus == 0):
        return "cpu"
    return "dali"


def make_engine(
    kind: EngineName,
    pipeline: Pipeline,
    *,
    seed: int,
    threads: int = 1,
    device_id: int | None = None,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Engine:
    """An engine for ``pipeline``, ready to prepare.

    Args:
        kind: what ``resolve_engine`` returned.
        seed: of the feed, in [0, 2**63).
        threads: that work on one block.
        device_id: the GPU, for DALI; None runs DALI on the CPU.
        max_pixels: an image that claims more is refused from its header, before memory is allocated.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    if max_pixels < 1:
        raise ConfigError(f"max_pixels must be at least 1, got {max_pixels}")
    if kind == "cpu":
        from mbaas.prep.cpu import CpuEngine

        return CpuEngine(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
    resolve_engine(kind, pipeline, gpus=0 if device_id is None else 1)
    from mbaas.prep.dali import DaliEngine

    return DaliEngine(pipeline, seed=seed, threads=threads, device_id=device_id, max_pixels=max_pixels)
