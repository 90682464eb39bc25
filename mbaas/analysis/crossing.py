"""Best stage at which samples cross to the GPU, from measured rates and rates measured on a GPU.

If CPUs and a GPU both prepare, the CPUs' share of decoded samples from caches is assumed to be the same as without a
GPU.
"""

from __future__ import annotations

from dataclasses import replace

from mbaas import units
from mbaas.analysis.gpu_rates import GpuRates, OnGpu
from mbaas.analysis.kept import stored_share
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.errors import ConfigError
from mbaas.model.gpu_stages import DevicePlan, Devices, Stage, Way, best_plan, gpu_seconds


def crossing(rates: Rates, setup: Setup, gpu: GpuRates) -> DevicePlan:
    """Return the plan with the best stage at which samples cross to the GPU.

    Raises:
        ConfigError: a rate is missing, or no option fits the GPUs' memory.
    """
    devices = Devices(
        cpus=float(setup.nodes * setup.workers_of(rates.cores)),
        gpus=setup.nodes * gpu.gpus,
        trials=setup.trials,
        step_per_s=rates.step.value * setup.accelerator_factor,
        pixel_bytes=rates.pixel_bytes,
        **({} if gpu.memory_bytes is None else {"memory_bytes": float(gpu.memory_bytes)}),
        **({} if gpu.link_bytes_per_s is None else {"link_bytes_per_s": gpu.link_bytes_per_s}),
    )
    told: str | None = None
    staging_s = rates.staging_cpu_s.value  # the same for samples made on either device
    decoded = stored_share(rates, setup, steady=True).decoded
    cpu_s = rates.cpu_s(decoded).value
    if gpu.cpu_s is not None:
        cpu_s = (1 - decoded) * gpu.cpu_s
        cpu_s += decoded * (gpu.cpu_s if gpu.decoded_cpu_s is None else gpu.decoded_cpu_s)
    ways = [Way(first_on_gpu="normalize", cpu_s=cpu_s + staging_s)]
    if gpu.decode is not None:
        ways.append(_way("decode", gpu.decode, rates, up_bytes=rates.sample_bytes))
    if gpu.resize is not None:
        if rates.decoded_bytes is None:
            raise ConfigError(
                "resize needs the size of decoded samples, which these rates lack: measure them again", option="resize"
            )
        lacking = rates.samples * rates.decoded_bytes - setup.nodes * setup.cache_bytes
        if lacking <= 0:
            ways.append(_way("resize", gpu.resize, rates, up_bytes=rates.decoded_bytes))
        else:
            told = (
                f"no sample crosses to the GPU before resizing: to keep all decoded, caches lack {units.size(lacking)}"
            )
    plan = best_plan(ways, devices)
    return plan if told is None else replace(plan, told=(*plan.told, told))


def _way(stage: Stage, on_gpu: OnGpu, rates: Rates, *, up_bytes: float) -> Way:
    step_per_s = rates.step.value
    if on_gpu.step_per_s > step_per_s:
        raise ConfigError(  # named by its key in the rates file; the file's reader adds the line
            f"step_per_s of {stage} must be at most the step's rate when it runs alone, "
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
