"""Measurement of G: a training step on synthetic minibatches that are on its device already.

A step is a function of one minibatch as the loader yields it: a dict with ``image``, ``label`` and ``sample_id``. A
function without parameters is a maker. It is called once in the trial's process and returns the step, so that the model
and the optimizer are created there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbaas.base.named_functions import import_named
from mbaas.client.convert import Minibatch, collating, make_converter
from mbaas.errors import ConfigError
from mbaas.model.quantity import Quantity, measured
from mbaas.samples.fields import SAMPLE_ID, Packed
from mbaas.tools.analysis.measuring.effort import Effort, repeat
from mbaas.transforms import Normalize
from mbaas.wire.samples import SampleSpec

Step = Callable[[Minibatch], Any]

LEAST_STEPS = 2
"""Minimum number of steps of one measurement."""


@dataclass(frozen=True)
class StepRate:
    """G at one batch size in samples/s, and CPU seconds of a sample (0 if the work is done elsewhere)."""

    batch_size: int
    rate: Quantity
    cpu_s: Quantity


@dataclass(frozen=True)
class PacedStep:
    """Stand-in for training with a stated rate: sleeps as long as a step would take."""

    per_s: float

    def __post_init__(self) -> None:
        if not self.per_s > 0:
            raise ConfigError(f"the rate of a step must be above 0 samples/s, got {self.per_s}")

    def __call__(self, batch: Minibatch) -> None:
        time.sleep(len(batch[SAMPLE_ID.name]) / self.per_s)


def load_step(path: str) -> Callable[..., Any]:
    """Import the function named by "module:function", with the working directory on the search path."""
    return import_named(path, Path.cwd(), what="the step")


def ready_step(function: Callable[..., Any]) -> Step:
    """Return the step itself from a step or its maker; call it in the process that runs the step."""
    # Parameters with defaults and *args do not mark a step: a maker may have options.
    needed = [
        p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if len(needed) == 1:
        return function
    if needed:
        raise ConfigError(
            f"a step must take one minibatch, or nothing if it makes the step, got {len(needed)} parameters"
        )
    step: Step = function()
    if not callable(step):
        raise ConfigError(f"a maker of a step must return a function of a minibatch, got {type(step).__name__}")
    return step


def synthetic_batch(
    spec: SampleSpec,
    batch_size: int,
    *,
    format: str = "torch",
    device: Any = None,
    normalize: Normalize | None = None,
    has_images: bool = True,
) -> Minibatch:
    """Return a minibatch of noise on the device, in the loader's format."""
    draw = np.random.default_rng(0)
    noise = spec.made.zeros(batch_size)
    values = noise.values if isinstance(noise, Packed) else noise
    values[:] = draw.integers(0, 256, values.shape) if values.dtype == np.uint8 else draw.random(values.shape)
    known = {field.name: field.zeros(batch_size) for field in spec.known}
    arrays = {spec.made.name: noise, **known, SAMPLE_ID.name: np.arange(batch_size)}
    converter = make_converter(format, device, normalize, has_images=has_images)
    converter = collating(converter, spec, "list", has_images=has_images)
    return converter.finish(converter.start(arrays))


def step_rate(step: Step, batch: Minibatch, effort: Effort) -> StepRate:
    """Measure G on this minibatch repeatedly; each measurement waits for the device to finish."""
    size, costs, steps = len(batch[SAMPLE_ID.name]), [], LEAST_STEPS

    def rate() -> float:
        nonlocal steps
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step(batch)
        _finish(batch)  # steps on a GPU return before they have run
        seconds = time.perf_counter() - began
        costs.append((time.process_time() - cpu) / (steps * size))
        found = steps * size / seconds
        steps = max(LEAST_STEPS, round(effort.window_s * found / size))
        return found

    found = repeat(rate, effort, unit="samples/s")
    return StepRate(size, found, measured(costs[1:], unit="CPU-s"))  # the first one warmed up, as in `repeat`


def _finish(batch: Minibatch) -> None:
    device = getattr(batch[SAMPLE_ID.name], "device", None)
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.synchronize(device)
