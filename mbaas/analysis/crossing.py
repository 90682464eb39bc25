"""At which stage samples should cross to the GPU, from measured rates and from what was measured on a GPU.

Of a mix of both it is taken that CPUs get no more of their samples decoded from caches than without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from annotated_types import Ge, Gt

from mbaas import units
from mbaas.allocation.devices import DevicePlan, Devices, Stage, Way, best_plan, gpu_seconds
from mbaas.analysis.kept import stored_share
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.errors import ConfigError
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
        decode: workers that begin with files; None: not measured.
        resize: workers that begin with what caches keep decoded; None: not measured.
    """

    gpus: Annotated[int, Ge(1)]
    memory_bytes: Bytes | None = None
    link_bytes_per_s: Annotated[BytesPerS, Gt(0)] | None = None
    decode: OnGpu | None = None
    resize: OnGpu | None = None


def crossing(rates: Rates, setup: Setup, gpu: GpuRates) -> DevicePlan:
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
    told: str | None = None
    staging_s = rates.staging_cpu_s.value  # whoever made a sample
    decoded = stored_share(rates, setup, steady=True).decoded
    ways = [Way(first_on_gpu="normalize", cpu_s=rates.cpu_s(decoded).value + staging_s)]
    if gpu.decode is not None:
        ways.append(_way("decode", gpu.decode, rates, step_per_s, up_bytes=rates.sample_bytes))
    if gpu.resize is not None:
        if rates.decoded_bytes is None:
            raise ConfigError(
                "resize needs the size of decoded samples, which these rates lack: measure them again", option="resize"
            )
        lacking = rates.samples * rates.decoded_bytes - setup.nodes * setup.cache_bytes
        if lacking <= 0:
            ways.append(_way("resize", gpu.resize, rates, step_per_s, up_bytes=rates.decoded_bytes))
        else:
            told = (
                f"no sample crosses to the GPU before resizing: to keep all decoded, caches lack {units.size(lacking)}"
            )
    plan = best_plan(ways, devices)
    return plan if told is None else replace(plan, told=(*plan.told, told))


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
