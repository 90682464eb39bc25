"""What is known of a node's GPUs: how fast samples are prepared there, and what that takes from training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt

from mbaas.units import Bytes, BytesPerS, Seconds
from mbaas.validation import options

PerS = Annotated[float, Gt(0)]


@options()
class OnGpu:
    """What was measured of preparing on a GPU beside training.

    Attributes:
        per_s: samples/s that one worker made.
        step_per_s: samples/s of the training step on that GPU meanwhile.
        cpu_s: CPU-seconds of the worker for a sample.
        memory_bytes: of the GPU's memory, for as many workers as a feed has there.
    """

    per_s: PerS
    step_per_s: Annotated[float, Ge(0)]
    cpu_s: Annotated[Seconds, Ge(0)]
    memory_bytes: Bytes = 0


@options()
class GpuRates:
    """The GPUs of a node, and what was measured there.

    Attributes:
        gpus: on each node.
        memory_bytes: of each GPU's memory that training leaves; None: enough.
        link_bytes_per_s: between the host and each GPU, in each direction; None: no limit.
        decode: workers that begin with files; None: not measured.
        resize: workers that begin with what caches keep decoded; None: not measured.
        cpu_s: CPU-seconds of the cpu engine for a sample; None: as the rates of prep say.
        decoded_cpu_s: the same of one that caches keep decoded; None: as ``cpu_s``.
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
        """Read what `mbaas.analysis.quantity.plain` made of it."""
        ways = {name: OnGpu(**plain[name]) for name in ("decode", "resize") if plain[name] is not None}
        return cls(**{**plain, **ways})
