"""Rates of a node's GPUs: speed of preparing there, and its effect on training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt

from mbaas.units import Bytes, BytesPerS, Seconds
from mbaas.validation import options

PerS = Annotated[float, Gt(0)]


@options()
class OnGpu:
    """Rates of preparing on a GPU that also trains.

    Attributes:
        per_s: samples/s of one prep worker.
        step_per_s: samples/s of the training step on that GPU at the same time.
        cpu_s: CPU-seconds of the worker per sample.
        memory_bytes: GPU memory used by all of a feed's workers on that GPU.
    """

    per_s: PerS
    step_per_s: Annotated[float, Ge(0)]
    cpu_s: Annotated[Seconds, Ge(0)]
    memory_bytes: Bytes = 0


@options()
class GpuRates:
    """The GPUs of a node and their rates.

    Attributes:
        gpus: number of GPUs on each node.
        memory_bytes: memory of each GPU left by training; None: enough.
        link_bytes_per_s: rate between the host and each GPU, in each direction; None: unlimited.
        decode: workers that start from encoded samples; None: not measured.
        resize: workers that start from cached decoded samples; None: not measured.
        cpu_s: CPU-seconds of the CPU engine per sample; None: as given by the prep rates.
        decoded_cpu_s: CPU-seconds of the CPU engine per cached decoded sample; None: as ``cpu_s``.
    """

    gpus: Annotated[int, Ge(1)]
    memory_bytes: Bytes | None = None
    link_bytes_per_s: Annotated[BytesPerS, Gt(0)] | None = None
    decode: OnGpu | None = None
    resize: OnGpu | None = None
    cpu_s: Annotated[Seconds, Ge(0)] | None = None
    decoded_cpu_s: Annotated[Seconds, Ge(0)] | None = None

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> GpuRates:
        """Read the output of `mbaas.analysis.quantity.plain`."""
        ways = {name: OnGpu(**plain[name]) for name in ("decode", "resize") if plain[name] is not None}
        return cls(**{**plain, **ways})
