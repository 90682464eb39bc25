"""Choice of the stage at which a sample crosses to the GPU, from measured rates.

A sample is decoded, cropped and resized (including the pipeline's other transforms), and normalized, the last always on
the trial's device. Samples cross to the GPU before one of these stages, and from there take GPU time from training.
With shares x of the samples prepared in each way, one sample for all trials takes

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
to trials through host memory, so they come back from the GPU and go to each trial. A linear program finds the shares
that minimize the longest time. Ties go to the least GPU time, then to the least CPU time.

A feed prepares all samples in one way, or some on GPUs and the others on CPUs (``dali_share``). Engines differ by a few
gray levels, so the share is fixed for the feed's life. It is a whole percentage, which users can write down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mbaas import units
from mbaas.errors import ConfigError
from mbaas.model.rates import GpuRates, OnGpu, Rates, Setup
from mbaas.model.supply import read_shares

Stage = Literal["decode", "resize", "normalize"]
"""First stage on a GPU; "resize" stands for everything between decoding and normalizing."""

TOLERANCE = 1e-9
"""Relative tolerance for rounding errors."""

PACE = {
    "steps": "the training step sets the pace",
    "GPUs": "GPUs, which train and prepare, set the pace",
    "CPUs": "CPUs set the pace",
    "to the GPUs": "the way to the GPUs sets the pace",
    "from the GPUs": "the way back from the GPUs sets the pace",
}
"""Resources in the order of the table, and the clause for each as the bottleneck."""

BEFORE: dict[Stage, str] = {"decode": "decoding", "resize": "resizing", "normalize": "normalizing"}
"""Names of stages in sentences."""

PERCENT = 100
"""Resolution of shares."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A measured way of preparing samples; they cross to the GPU before the stage ``first_on_gpu``.

    Attributes:
        cpu_s, gpu_s: CPU seconds and GPU seconds for a sample, the latter lost to its trials' steps; see `gpu_seconds`.
        up_bytes, down_bytes: bytes of a sample sent to the GPU that prepares it, and sent back.
        memory_bytes: GPU memory needed.

    Raises:
        ConfigError: a number out of range, or GPU time where the GPU only normalizes.
    """

    first_on_gpu: Stage
    cpu_s: float
    gpu_s: float = 0.0
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cpu_s", "gpu_s", "up_bytes", "down_bytes", "memory_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")
        if self.first_on_gpu == "normalize" and self.gpu_s:
            raise ConfigError(f"gpu_s must be 0 where a GPU only normalizes, got {self.gpu_s}")

    @property
    def uses_gpu(self) -> bool:
        """True if a worker prepares on a GPU."""
        return self.first_on_gpu != "normalize"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Resources shared by trials and prep.

    Attributes:
        cpus: cores available to prep.
        gpus, trials: numbers of GPUs for training and of trials, which are spread evenly over them.
        step_per_s: G, samples/s of a trial that has a GPU for itself.
        pixel_bytes: bytes of a prepared sample.
        memory_bytes: memory of each GPU that training leaves free.
        link_bytes_per_s: rate between the host and each GPU, in each direction.

    Raises:
        ConfigError: a number out of range.
    """

    cpus: float
    gpus: int
    trials: int
    step_per_s: float
    pixel_bytes: float
    memory_bytes: float = math.inf
    link_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("gpus", "trials"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cpus", "step_per_s", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("pixel_bytes", "memory_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The best division of prep between CPUs and GPUs.

    Attributes:
        shares: shares of the samples by the first stage on a GPU; they add up to 1.
        trial_per_s: samples/s that each trial gets and trains on.
        limit: the bottleneck, one of `PACE`.
        cpu_cores, prep_gpus: cores busy with samples that no GPU prepares; GPUs used for prep.
        told: reasons for excluding ways from the comparison, one clause each.
    """

    shares: dict[Stage, float]
    trial_per_s: float
    limit: str
    cpu_cores: int
    prep_gpus: int
    told: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Feed options that implement the plan."""
        on_cpus = self.shares.get("normalize", 0.0)
        if on_cpus == 1:
            return {"engine": "cpu"}
        return {"engine": "dali", **({"dali_share": self.shares["decode"]} if on_cpus else {})}

    @property
    def sentence(self) -> str:
        """The plan as a clause for users."""
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


def gpu_seconds(*, step_per_s: float, step_beside_per_s: float, made_per_s: float) -> float:
    """Return the GPU seconds that preparing one sample takes from training.

    While prep runs, the step slows from ``step_per_s`` to ``step_beside_per_s``. The ratio is the step's share of the
    GPU; the rest of each second prepared ``made_per_s`` samples.

    Raises:
        ConfigError: ``step_per_s`` or ``made_per_s`` is not above 0, or ``step_beside_per_s`` is negative.
    """
    for name, rate in (("step_per_s", step_per_s), ("made_per_s", made_per_s)):
        if not 0 < rate < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, got {rate}")
    if not 0 <= step_beside_per_s < math.inf:
        raise ConfigError(f"step_beside_per_s must be 0 or more and finite, got {step_beside_per_s}")
    return max(0.0, 1 - step_beside_per_s / step_per_s) / made_per_s  # noise may make the shared step look faster


def best_plan(ways: Sequence[Way], devices: Devices) -> DevicePlan:
    """Choose the best single way for all samples, or the best share to decode on GPUs.

    Raises:
        ConfigError: no way, two ways that cross before the same stage, or none that fits the GPUs' memory.
    """
    usable, told = _usable(ways, devices)
    candidates = np.eye(len(usable))
    pair = [number for number, way in enumerate(usable) if way.first_on_gpu in ("decode", "normalize")]
    if len(pair) == 2:
        first = _corners([usable[number] for number in pair], devices)[:, 0] * PERCENT
        written = np.concatenate([np.floor(first), np.ceil(first)])
        mixed = np.zeros((len(written), len(usable)))
        mixed[:, pair] = np.array([written, PERCENT - written]).T / PERCENT
        candidates = np.concatenate([candidates, mixed])
    return _plan(usable, devices, candidates, told)


def _usable(ways: Sequence[Way], devices: Devices) -> tuple[list[Way], tuple[str, ...]]:
    stages = [way.first_on_gpu for way in ways]
    if not ways or len(set(stages)) < len(stages):
        raise ConfigError(f"ways must be one or more that cross before different stages, got {', '.join(stages) or 0}")
    usable = [way for way in ways if way.memory_bytes <= devices.memory_bytes]
    left = units.size(devices.memory_bytes)
    told = tuple(
        f"no sample crosses to the GPU before {BEFORE[way.first_on_gpu]}: that takes {units.size(way.memory_bytes)} of "
        f"a GPU's memory, and training leaves {left}"
        for way in ways
        if way not in usable
    )
    if not usable:
        raise ConfigError("; ".join(told))
    return usable, told


def _seconds(ways: Sequence[Way], devices: Devices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of each resource for a sample, as fixed + of_way @ shares: [resources], [resources, ways]."""
    g, gpus, trials = devices.step_per_s, devices.gpus, devices.trials
    link = gpus * devices.link_bytes_per_s
    fixed = [math.ceil(trials / gpus) / g, trials / g / gpus, 0.0, trials * devices.pixel_bytes / link, 0.0]
    of_way = [
        [0.0, way.gpu_s / gpus, way.cpu_s / devices.cpus, way.up_bytes / link, way.down_bytes / link] for way in ways
    ]
    return np.array(fixed), np.array(of_way).T


def _corners(ways: Sequence[Way], devices: Devices) -> NDArray[np.float64]:
    """Return the shares at all corners of the linear program: float64[corners, ways]."""
    # The unknowns are the shares and the seconds of the busiest resource. At a corner, as many constraints hold with
    # equality as there are unknowns: the shares add up to 1, plus any of the others. There are at most 21 candidates.
    fixed, of_way = _seconds(ways, devices)
    unit_s, count = float((fixed[:, None] + of_way).max()), len(ways)
    seconds = np.eye(count + 1)[count]
    rows = [(np.append(each, 0.0) / unit_s - seconds, -f / unit_s) for f, each in zip(fixed, of_way, strict=True)]
    rows += [(np.eye(count + 1)[way], 0.0) for way in range(count)]
    whole = (np.append(np.ones(count), 0.0), 1.0)
    found = list(np.eye(count))
    for chosen in combinations(rows, count):
        matrix, limits = (np.array(part) for part in zip(whole, *chosen, strict=True))
        if np.linalg.matrix_rank(matrix) <= count:
            continue  # these constraints have no single common point
        shares = np.linalg.solve(matrix, limits)[:-1]
        if (shares >= -TOLERANCE).all():
            shares = shares.clip(min=0)
            found.append(shares / shares.sum())
    return np.array(found)


def _plan(ways: Sequence[Way], devices: Devices, candidates: NDArray[np.float64], told: tuple[str, ...]) -> DevicePlan:
    fixed, of_way = _seconds(ways, devices)
    seconds = fixed + candidates @ of_way.T
    gpu_s, cpu_s = ([getattr(way, name) for way in ways] for name in ("gpu_s", "cpu_s"))
    best = np.arange(len(candidates))
    # Each cost breaks the ties left by those before it.
    for cost in (seconds.max(axis=1), candidates @ gpu_s, candidates @ cpu_s):
        best = best[cost[best] <= cost[best].min() * (1 + TOLERANCE)]
    shares, pace_s = candidates[best[0]], float(seconds[best[0]].max())
    # Training comes first in a tie: then it never waits.
    limit = next(name for name, s in zip(PACE, seconds[best[0]], strict=True) if s >= pace_s * (1 - TOLERANCE))
    per_s = 1 / pace_s
    on_cpus = sum(per_s * share * way.cpu_s for share, way in zip(shares, ways, strict=True) if not way.uses_gpu)
    on_gpus = any(share and way.uses_gpu for share, way in zip(shares, ways, strict=True))
    return DevicePlan(
        shares={way.first_on_gpu: float(share) for way, share in zip(ways, shares, strict=True)},
        trial_per_s=per_s,
        limit=limit,
        cpu_cores=math.ceil(on_cpus * (1 - TOLERANCE)),
        prep_gpus=devices.gpus if on_gpus else 0,
        told=told,
    )


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
    decoded = read_shares(rates, setup, steady=True).decoded
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
