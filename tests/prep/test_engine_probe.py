"""The probe measures both engines on a dataset's samples within its time, and reports what fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.dataset import Dataset, synthetic
from mbaas.prep import probe
from mbaas.prep.engines import Batch, Engine, Prepared, make_engine
from mbaas.prep.probe import GROWTH, MEASURED_S, PROBE_READS_S, TOGETHER, probe_engines

PIPELINE = T.Pipeline([T.DecodeImage(), T.CenterCrop(8)])


def cpu() -> Engine:
    return make_engine("cpu", PIPELINE, seed=0)


class Timed:
    """The cpu engine on a simulated clock: a call takes ``fixed_s``, and each sample ``each_s``."""

    def __init__(self, fixed_s: float, each_s: float, clock: Clock) -> None:
        self.engine, self._fixed_s, self._each_s, self._clock = cpu(), fixed_s, each_s, clock
        self.counts: list[int] = []
        self.closed = False

    def field(self, *given: Any) -> Any:
        return self.engine.field(*given)

    def prepare(self, batch: Batch, out: Any) -> Prepared:
        self.counts.append(len(batch))
        self._clock.now += self._fixed_s + self._each_s * len(batch)
        return self.engine.prepare(batch, out)

    def close(self) -> None:
        self.closed = True
        self.engine.close()


class Clock:
    now = 0.0

    load = 1.0

    def perf_counter(self) -> float:
        return self.now * self.load

    def process_time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    simulated = Clock()
    monkeypatch.setattr(probe, "time", simulated)
    return simulated


@pytest.fixture
def data() -> Dataset:
    return synthetic(40, height=16, width=16)


def making(engine: Any) -> Callable[[], Engine]:
    return lambda: engine


def test_each_engine_has_its_rate_at_the_batches_that_its_time_allows(data: Dataset, clock: Clock) -> None:
    """DALI with 4 ms for a call and 0.1 ms for a sample prepares 6,154/s in batches of 64; alone, a sample takes 4 ms.

    The cpu engine needs 4 ms for each sample, so a batch of 64 takes half of its time, and it is measured with 8.
    """
    slow, batched = Timed(0.0, 0.004, clock), Timed(0.004, 0.0001, clock)
    found = probe_engines(data, making(slow), making(batched), 2)
    assert found.failure == ""
    assert found.rates is not None
    assert found.rates.cpu_per_s == pytest.approx(250)
    assert found.rates.dali_per_s == pytest.approx(TOGETHER / (0.004 + TOGETHER * 0.0001))
    assert (max(slow.counts), max(batched.counts)) == (GROWTH, TOGETHER)
    assert slow.closed
    assert batched.closed


def test_other_programs_slow_the_time_of_the_cpu_engine_and_not_its_rate(data: Dataset, clock: Clock) -> None:
    """Workers reserve their CPUs, so the load of the moment does not count. With two threads, CPU time counts half."""
    clock.load = 4.0
    found = probe_engines(data, making(Timed(0.0, 0.004, clock)), making(Timed(0.0, 0.001, clock)), 2, threads=2)
    assert found.rates is not None
    assert found.rates.cpu_per_s == pytest.approx(500)
    assert found.rates.dali_per_s == pytest.approx(250)


@pytest.mark.parametrize("each_s", [0.00001, 0.001, 0.03, 0.2, 3.0])
def test_an_engine_is_measured_for_half_a_second_after_its_first_call(
    data: Dataset, clock: Clock, each_s: float
) -> None:
    """A sample that takes longer is prepared twice: the first call also loads code."""
    engine = Timed(0.0, each_s, clock)
    found = probe_engines(data, making(engine), making(Timed(0.0, 0.001, clock)), 2)
    assert found.rates is not None
    assert found.rates.cpu_per_s == pytest.approx(1 / each_s)
    assert sum(engine.counts) * each_s <= max(MEASURED_S + 2 * each_s, 2 * each_s) * 1.001


def test_the_real_engines_are_measured_within_two_seconds_beside_loading(data: Dataset) -> None:
    def dali() -> Engine:
        return make_engine("dali", PIPELINE, seed=0)  # on the CPU

    dali().close()  # loads its libraries
    began = time.perf_counter()
    found = probe_engines(data, cpu, dali, 2)
    assert time.perf_counter() - began < PROBE_READS_S + 2 * MEASURED_S + 2, "with room for a busy machine"
    assert found.rates is not None
    assert min(found.rates.cpu_per_s, found.rates.dali_per_s) > 10


def test_a_failure_of_dali_is_reported_with_its_reason(data: Dataset) -> None:
    def broken() -> Engine:
        raise RuntimeError("somewhere\nCUDA driver version is insufficient")

    found = probe_engines(data, cpu, broken, 2)
    assert (found.rates, found.failure) == (None, "RuntimeError: CUDA driver version is insufficient")


def test_bad_samples_are_passed_over_and_only_bad_ones_give_no_rates(tmp_path: Path, data: Dataset) -> None:
    (tmp_path / "a").mkdir()
    for name in ("0.jpg", "1.jpg"):
        (tmp_path / "a" / name).write_bytes(b"no image at all")
    found = probe_engines(mbaas.read_images(str(tmp_path)), cpu, cpu, 2)
    assert (found.rates, found.failure) == (None, "")
