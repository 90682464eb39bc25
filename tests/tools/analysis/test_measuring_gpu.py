"""A DALI worker next to a training step is measured correctly, on the CPU and, where present, on a GPU."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
from stated_rates import about, line, round_rates

from mbaas import transforms as T
from mbaas.analysis import Setup, Workload
from mbaas.dataset import synthetic
from mbaas.model.gpu_stages import crossing
from mbaas.model.rates import Rates
from mbaas.prep.engines import make_engine
from mbaas.samples.fields import Field
from mbaas.settings import FeedOptions
from mbaas.tools.analysis.measuring.effort import Effort
from mbaas.tools.analysis.measuring.prep import Blocks, Raw, decode_samples, prepared_field, subset
from mbaas.tools.analysis.measuring.service import PacedStep, gpu_rates
from mbaas.tools.analysis.measuring.system import Survey
from mbaas.wire.samples import EngineName

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DEVICES = [pytest.param(None, id="cpu"), pytest.param(0, id="gpu", marks=[pytest.mark.gpu, NO_GPU])]
EFFORT = Effort(least=3, most=6, window_s=0.2, budget_s=1.0)
PIPELINE = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(64)])
STEP_PER_S = 900.0


def workload(**changes: Any) -> Workload:
    given: dict[str, Any] = {
        "dataset": synthetic(200, height=96, width=128),
        "pipeline": PIPELINE,
        "step": PacedStep(STEP_PER_S),
        "options": FeedOptions(batch_size=32),
    }
    return Workload(**{**given, **changes})


class Meanwhile:
    """Prepares in this process during a measurement in others, because the speed of the machine varies.

    On a virtual machine with a busy host, the CPU time of a sample rose 1.7 times from one second to the next.
    """

    def __init__(self, made: Field, **prepared: tuple[EngineName, Raw]) -> None:
        self._engines = {engine: make_engine(engine, PIPELINE, seed=0) for engine, _ in prepared.values()}
        self._blocks = {
            name: Blocks(samples, self._engines[engine], made) for name, (engine, samples) in prepared.items()
        }
        self._seen: dict[str, list[float]] = {name: [] for name in prepared}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._prepare)

    def __enter__(self) -> Meanwhile:
        for blocks in self._blocks.values():
            blocks.prepare()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for engine in self._engines.values():
            engine.close()

    def _prepare(self) -> None:
        while not self._is_over.is_set():
            for name, blocks in self._blocks.items():
                began, count = time.process_time(), sum(blocks.prepare() for _ in range(5))
                self._seen[name].append((time.process_time() - began) / count)

    def check(self, name: str, cpu_s: float) -> None:
        """Compare a measured CPU time per sample with the times of this process during the measurement."""
        seen = self._seen[name][1:]  # the first round ran while the measuring processes were starting
        least, most = min(seen), max(seen)
        assert 0.5 * least <= cpu_s <= 1.5 * most, f"{name} took {cpu_s:g} s there, {least:g} to {most:g} s here"


@pytest.mark.parametrize("gpu", DEVICES)
def test_both_are_measured_at_the_same_time_and_the_cpu_engine_alone(ray_clean: None, gpu: int | None) -> None:
    """The step sleeps, so the worker takes no CPU time from it."""
    trained = workload()
    raw, rates = subset(trained.dataset), round_rates(step=about(STEP_PER_S))
    kept, made = decode_samples(raw, PIPELINE, engine="dali"), prepared_field(raw, PIPELINE)
    assert kept is not None
    with Meanwhile(made, decode=("dali", raw), resize=("dali", kept), alone=("cpu", raw)) as meanwhile:
        found = gpu_rates(trained, rates, raw, kept, made, EFFORT, gpus=2, gpu=gpu)
    assert found.gpus == 2
    assert found.decode is not None
    assert found.resize is not None
    for name, way in (("decode", found.decode), ("resize", found.resize)):
        assert 0.7 * STEP_PER_S < way.step_per_s <= STEP_PER_S
        assert way.per_s > 100
        if gpu is None:
            assert way.per_s * way.cpu_s < 1.1, "one thread that is busy all the time"
            meanwhile.check(name, way.cpu_s)
    assert found.cpu_s is not None
    assert found.decoded_cpu_s is not None
    meanwhile.check("alone", found.cpu_s)
    assert found.decoded_cpu_s < found.cpu_s
    assert (found.memory_bytes is None) == (gpu is None)
    assert (found.decode.memory_bytes == 0) == (gpu is None)
    decoded_samples = {"decoded_bytes": 37e3, "decoded_prep": line((1, 500))}
    measured = round_rates(step=about(STEP_PER_S), on_gpu=found, **decoded_samples)
    again = Rates.from_json(json.loads(json.dumps(measured.to_json())))
    assert again == measured
    assert crossing(again, Setup(), found).options == crossing(measured, Setup(), found).options


def test_it_is_measured_where_there_are_a_gpu_images_for_dali_and_a_step() -> None:
    def crosses(given: Workload, rate_per_s: float | None = None, gpus: int = 1) -> bool:
        return Survey(workload=given, rate_per_s=rate_per_s, gpus=gpus).crosses_to_gpu

    assert crosses(workload())
    assert not crosses(workload(), gpus=0)
    assert not crosses(workload(), 100.0), "a stated step time holds under any load"
    assert not crosses(workload(options=FeedOptions(batch_size=32, engine="cpu")))
    assert not crosses(workload(pipeline=T.Pipeline([T.DecodeImage(), T.Map(lambda image, rng: image)])))
    assert not crosses(workload(pipeline=T.Pipeline([T.DecodeAudio(16_000, max_s=1), T.MelSpectrogram(400)])))
