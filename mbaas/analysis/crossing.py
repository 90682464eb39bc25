"""At which stage samples should cross to the GPU, from measured rates and from what was measured on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt

from mbaas import units
from mbaas.allocation.devices import DevicePlan, Devices, Stage, Way, best_mix, best_way, gpu_seconds
from mbaas.analysis.quantity import plain_fields
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.errors import ConfigError
from mbaas.units import Bytes, BytesPerS, Seconds
from mbaas.validation import options

WORTH_SAYING = 1.02
"""A mix of ways that is less than 2 % faster is not worth a sentence."""

PerS = Annotated[float, Gt(0)]


@options()
class OnGpu:
    """What was measured of preparing on a GPU beside training.

    Attributes:
        per_s: samples/s that one worker made.
        step_per_s: samples/s of the training step on that GPU meanwhile.
        cpu_s: CPU-seconds of the worker for a sample.
        memory_bytes: of the GPU's memory.
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
        decode, resize: workers that take over before decoding, and before resizing; None: not measured.
    """

    gpus: Annotated[int, Ge(1)]
    memory_bytes: Bytes | None = None
    link_bytes_per_s: Annotated[BytesPerS, Gt(0)] | None = None
    decode: OnGpu | None = None
    resize: OnGpu | None = None


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Where samples should cross to the GPU.

    Attributes:
        plan: for a feed, which prepares all samples in one way.
        mix: if blocks could be prepared in different ways.
    """

    plan: DevicePlan
    mix: DevicePlan

    @property
    def sentences(self) -> tuple[str, ...]:
        """Say it in clauses for people."""
        gain = self.mix.trial_per_s / self.plan.trial_per_s
        mixed = f"if blocks could be prepared in different ways: {self.mix.sentence}" if gain >= WORTH_SAYING else None
        return (self.plan.sentence, *([mixed] if mixed else []), *self.plan.told)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


def crossing(rates: Rates, setup: Setup, gpu: GpuRates) -> Crossing:
    """Decide at which stage samples should cross to the GPU.

    Raises:
        ConfigError: a way for whose cost a rate is missing, or none that fits the GPUs' memory.
    """
    step_per_s = rates.step.value * setup.accelerator_factor
    devices = Devices(
        cpus=float(setup.nodes * setup.workers_of(rates.cores)),
        gpus=setup.nodes * gpu.gpus,
        trials=setup.trials,
        step_per_s=step_per_s,
        pixel_bytes=rates.pixel_bytes,
        **({} if gpu.memory_bytes is None else {"memory_bytes": float(gpu.memory_bytes)}),
        **({} if gpu.link_bytes_per_s is None else {"link_bytes_per_s": gpu.link_bytes_per_s}),
    )
    staging_s = rates.staging_cpu_s.value  # whoever made a sample
    ways = [Way(first_on_gpu="normalize", cpu_s=rates.prepared_cpu_s.value + staging_s)]
    if gpu.decode is not None:
        ways.append(_way("decode", gpu.decode, rates, step_per_s, up_bytes=rates.sample_bytes))
    if gpu.resize is not None:
        if rates.decoded_bytes is None:
            raise ConfigError(
                "resize needs the size of decoded samples, which these rates lack: measure them again", option="resize"
            )
        ways.append(_way("resize", gpu.resize, rates, step_per_s, up_bytes=rates.decoded_bytes))
    return Crossing(plan=best_way(ways, devices), mix=best_mix(ways, devices))


def _way(stage: Stage, on_gpu: OnGpu, rates: Rates, step_per_s: float, *, up_bytes: float) -> Way:
    if on_gpu.step_per_s > step_per_s:
        raise ConfigError(  # by the key of the file, whose line the reader adds
            f"step_per_s of {stage} must be at most the step's rate with nothing beside it, "
            f"{units.number(step_per_s)} samples/s, got {units.number(on_gpu.step_per_s)}",
            option=stage,
        )
    return Way(
        first_on_gpu=stage,
        cpu_s=on_gpu.cpu_s + rates.staging_cpu_s.value,
        gpu_s=gpu_seconds(step_per_s=step_per_s, step_beside_per_s=on_gpu.step_per_s, made_per_s=on_gpu.per_s),
        up_bytes=up_bytes,
        down_bytes=rates.pixel_bytes,
        memory_bytes=on_gpu.memory_bytes,
    )
