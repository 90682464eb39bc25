"""The stage at which a sample crosses to the GPU: every candidate is predicted, and the fastest is chosen.

A sample is decoded, cropped and resized (including the pipeline's other transforms), and normalized, the last always on
the trial's device. Samples cross to the GPU before one of these stages, and from there take GPU time from training.
With shares x of the samples prepared on each route, one sample for all trials takes

=============  ======================================================================================
resource       seconds
=============  ======================================================================================
steps          trials on the fullest GPU / G
GPUs           (trials / G + sum of x gpu_s) / GPUs
CPUs           sum of x cpu_s / CPUs
to the GPUs    (sum of x bytes that go there + trials * bytes of a prepared sample) / (GPUs * link)
from the GPUs  sum of x bytes that come back / (GPUs * link)
=============  ======================================================================================

The longest time sets the pace. G is the rate of a trial's step without competition. A worker on a GPU hands its results
to trials through host memory, so they come back from the GPU and go to each trial.

A feed prepares all samples on one route, or some on GPUs and the others on CPUs (``dali_share``). Engines differ by a
few gray levels, so the share is fixed for the feed's life. It is a whole percentage, which users can write down. So
there are about a hundred candidates. Ties go to the least GPU time, then to the least CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import Struct

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model.curves import ROUNDING
from mbaas.model.rates import GpuRates, OnGpu, Rates, Setup
from mbaas.model.supply import ResourceTimes, read_shares

Stage = Literal["decode", "resize", "normalize"]
"""First stage on a GPU; "resize" stands for everything between decoding and normalizing."""

Shares = Mapping[Stage, float]
"""Shares of the samples by the first stage on a GPU; they add up to 1."""

PACE = {
    "steps": "the training step sets the pace",
    "GPUs": "GPUs, which train and prepare, set the pace",
    "CPUs": "CPUs set the pace",
    "to the GPUs": "the way to the GPUs sets the pace",
    "from the GPUs": "the way back from the GPUs sets the pace",
}
"""The clause for each resource of the table as the bottleneck."""

BEFORE: dict[Stage, str] = {"decode": "decoding", "resize": "resizing", "normalize": "normalizing"}
"""Names of stages in sentences."""


class Route(Struct, frozen=True, kw_only=True):
    """A measured way of preparing samples; they cross to the GPU before the stage ``first_on_gpu``.

    ``gpu_s`` are lost to the trials' steps (`gpu_seconds`); ``up_bytes`` and ``down_bytes`` of a sample cross to the
    GPU that prepares it, and back.
    """

    first_on_gpu: Stage
    cpu_s: float
    gpu_s: float = 0.0
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    memory_bytes: float = 0.0


class Devices(Struct, frozen=True, kw_only=True):
    """Resources shared by trials and prep; trials are spread evenly over the GPUs.

    ``step_per_s`` is G, samples/s of a trial that has a GPU for itself. Training leaves ``memory_bytes`` of each GPU
    free. The link between the host and each GPU has a rate in each direction.
    """

    cpus: float
    gpus: int
    trials: int
    step_per_s: float
    pixel_bytes: float
    memory_bytes: float = math.inf
    link_bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The best division of prep between CPUs and GPUs.

    Attributes:
        limit: the bottleneck, one of `PACE`.
        cpu_cores, prep_gpus: cores busy with samples that no GPU prepares; GPUs used for prep.
        told: reasons for excluding routes from the comparison, one clause each.
    """

    shares: dict[Stage, float]
    trial_per_s: float
    limit: str
    cpu_cores: int
    prep_gpus: int
    told: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        on_cpus = self.shares.get("normalize", 0.0)
        if on_cpus == 1:
            return {"engine": "cpu"}
        return {"engine": "dali", **({"dali_share": self.shares["decode"]} if on_cpus else {})}

    @property
    def sentence(self) -> str:
        cores, gpus = units.counted(self.cpu_cores, "core"), units.counted(self.prep_gpus, "GPU")
        share = self.shares.get("decode", 0.0)
        who = f"{cores} {'prepares' if self.cpu_cores == 1 else 'prepare'} all samples"
        if self.shares.get("resize"):
            who = f"DALI prepares all samples on {gpus} from what caches keep decoded"
        elif share == 1:
            who = f"DALI prepares all samples on {gpus}"
        elif share:
            who = f"DALI prepares {units.percent(share)} of the samples on {gpus}, and {cores} the others"
        written = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        return f"{who} ({written}): each trial gets {units.number(self.trial_per_s)} samples/s, and {PACE[self.limit]}"


def crossing(rates: Rates, setup: Setup, gpu: GpuRates) -> DevicePlan:
    """Return the plan with the best stage at which samples cross to the GPU.

    With CPUs and a GPU, the CPUs' share of decoded samples from caches is assumed to be the same as without a GPU.
    """
    devices = Devices(
        cpus=float(setup.nodes * setup.workers_of(rates.cores)),
        gpus=setup.nodes * gpu.gpus,
        trials=setup.trials,
        step_per_s=rates.step.value * setup.accelerator_factor,
        pixel_bytes=rates.pixel_bytes,
        memory_bytes=math.inf if gpu.memory_bytes is None else float(gpu.memory_bytes),
        link_bytes_per_s=math.inf if gpu.link_bytes_per_s is None else gpu.link_bytes_per_s,
    )
    decoded = read_shares(rates, setup, steady=True).decoded
    cpu_s = rates.cpu_s(decoded).value
    if gpu.cpu_s is not None:
        decoded_cpu_s = gpu.cpu_s if gpu.decoded_cpu_s is None else gpu.decoded_cpu_s
        cpu_s = (1 - decoded) * gpu.cpu_s + decoded * decoded_cpu_s
    # Staging takes the same time for samples made on either device.
    routes = [Route(first_on_gpu="normalize", cpu_s=cpu_s + rates.staging_cpu_s.value)]
    told: list[str] = []
    if gpu.decode is not None:
        routes.append(_route("decode", gpu.decode, rates, up_bytes=rates.sample_bytes))
    if gpu.resize is not None:
        if rates.decoded_bytes is None:
            raise ConfigError(
                "resize needs the size of decoded samples, which these rates lack: measure them again", option="resize"
            )
        lacking = rates.samples * rates.decoded_bytes - setup.nodes * setup.cache_bytes
        if lacking <= 0:
            routes.append(_route("resize", gpu.resize, rates, up_bytes=rates.decoded_bytes))
        else:
            told.append(
                f"no sample crosses to the GPU before resizing: to keep all decoded, caches lack {units.size(lacking)}"
            )
    plan = best_plan(routes, devices)
    return replace(plan, told=(*plan.told, *told))


def _route(stage: Stage, on_gpu: OnGpu, rates: Rates, *, up_bytes: float) -> Route:
    step_per_s = rates.step.value
    if on_gpu.step_per_s > step_per_s:
        raise ConfigError(  # named by its key in the rates file; the file's reader adds the line
            f"step_per_s of {stage} must be at most the step's rate when it runs alone, "
            f"{units.number(step_per_s)} samples/s, got {units.number(on_gpu.step_per_s)}",
            option=stage,
        )
    return Route(
        first_on_gpu=stage,
        cpu_s=on_gpu.cpu_s + rates.staging_cpu_s.value,
        gpu_s=gpu_seconds(step_per_s=step_per_s, step_beside_per_s=on_gpu.step_per_s, made_per_s=on_gpu.per_s),
        up_bytes=up_bytes,
        down_bytes=rates.pixel_bytes,
        memory_bytes=on_gpu.memory_bytes,
    )


def gpu_seconds(*, step_per_s: float, step_beside_per_s: float, made_per_s: float) -> float:
    """Return the GPU seconds that preparing one sample takes from training.

    While prep runs, the step slows from ``step_per_s`` to ``step_beside_per_s``. The ratio is the step's share of the
    GPU; the rest of each second prepared ``made_per_s`` samples.
    """
    return max(0.0, 1 - step_beside_per_s / step_per_s) / made_per_s  # noise may make the shared step look faster


def best_plan(routes: Sequence[Route], devices: Devices) -> DevicePlan:
    usable = {route.first_on_gpu: route for route in routes if route.memory_bytes <= devices.memory_bytes}
    left = units.size(devices.memory_bytes)
    told = tuple(
        f"no sample crosses to the GPU before {BEFORE[route.first_on_gpu]}: that takes "
        f"{units.size(route.memory_bytes)} of a GPU's memory, and training leaves {left}"
        for route in routes
        if route.first_on_gpu not in usable
    )
    if not usable:
        raise ConfigError("; ".join(told))
    candidates: list[Shares] = [{stage: 1.0} for stage in usable]
    if {"decode", "normalize"} <= usable.keys():
        candidates += [{"decode": percent / 100, "normalize": (100 - percent) / 100} for percent in range(1, 100)]

    def mean(shares: Shares, name: str) -> float:
        return sum(share * getattr(usable[stage], name) for stage, share in shares.items())

    times = [_times({name: mean(shares, name) for name in COSTS}, devices) for shares in candidates]
    best = list(range(len(candidates)))
    # Each cost breaks the ties left by those before it.
    for cost in (
        [found.pace_s for found in times],
        [mean(shares, "gpu_s") for shares in candidates],
        [mean(shares, "cpu_s") for shares in candidates],
    ):
        least = min(cost[number] for number in best)
        best = [number for number in best if cost[number] <= least * (1 + ROUNDING)]
    shares, found = candidates[best[0]], times[best[0]]
    on_cpus_s = shares["normalize"] * usable["normalize"].cpu_s if "normalize" in shares else 0.0
    return DevicePlan(
        shares={stage: shares.get(stage, 0.0) for stage in usable},
        trial_per_s=1 / found.pace_s,
        limit=found.limit,
        cpu_cores=math.ceil(on_cpus_s / found.pace_s * (1 - ROUNDING)),
        prep_gpus=devices.gpus if shares.keys() - {"normalize"} else 0,
        told=told,
    )


COSTS = ("cpu_s", "gpu_s", "up_bytes", "down_bytes")
"""Fields of `Route` whose means over all samples determine the times."""


def _times(cost: Mapping[str, float], devices: Devices) -> ResourceTimes:
    g, gpus, trials = devices.step_per_s, devices.gpus, devices.trials
    link = gpus * devices.link_bytes_per_s
    return ResourceTimes(
        compute={"steps": math.ceil(trials / gpus) / g, "GPUs": (trials / g + cost["gpu_s"]) / gpus},
        prep={
            "CPUs": cost["cpu_s"] / devices.cpus,
            "to the GPUs": (cost["up_bytes"] + trials * devices.pixel_bytes) / link,
            "from the GPUs": cost["down_bytes"] / link,
        },
    )
