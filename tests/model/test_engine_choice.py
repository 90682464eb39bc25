"""The engine follows from the rates of both engines, the workers, and what is known of the trials."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.model.engine_choice import MARGIN, NOISE, SECOND_ON_GPU, EngineChoice, EngineRoom, WorkerRates, choose

per_s = st.floats(1, 1e5)
steps = st.none() | per_s


def chosen(cpu: float, dali: float, **room: Any) -> EngineChoice:
    """The choice for these rates of one worker; by default one worker of each, on a GPU where trials may train."""
    given: dict[str, Any] = {"cpu_workers": 1, "dali_workers": 1, "gpus": 1, "is_shared": True, **room}
    return choose(WorkerRates(cpu, dali), EngineRoom(**given))


def test_on_an_h200_with_16_cpus_dali_is_chosen_for_a_search() -> None:
    """One worker: 8,689 samples/s on the GPU; on a core about 270. Eight workers are the default of the cpu engine."""
    choice = chosen(270, 8_689, cpu_workers=8, dali_workers=2)
    assert (choice.engine, choice.gpus) == ("dali", 1)
    assert choice.cpu_per_s == 2_160
    assert choice.dali_per_s == pytest.approx(8_689 * (1 + SECOND_ON_GPU))
    assert "cpu prepares 2,160 samples/s with 8 workers, dali 11,700 with 2 workers on 1 GPU" in choice.reason
    assert choice.sentence == f"dali engine: {choice.reason}"


def test_a_small_gpu_beside_many_cpus_is_left_to_the_trials() -> None:
    choice = chosen(300, 1_500, cpu_workers=16, dali_workers=2)
    assert choice.engine == "cpu"
    assert "cpu leaves the trials' GPUs alone, and dali is not 1.25 times as fast" in choice.reason


@pytest.mark.parametrize(("is_shared", "within"), [(True, "cpu"), (False, "dali")])
def test_the_preferred_engine_stays_within_the_margin(is_shared: bool, within: str) -> None:
    """GPUs that no trial trains on are for prep, so dali is preferred there: it leaves CPUs to the trials."""
    for ratio in (1 / MARGIN + 0.01, 1.0, MARGIN - 0.01):
        assert chosen(1_000, 1_000 * ratio, is_shared=is_shared).engine == within
    assert chosen(1_000, 1_000 * (MARGIN + 0.01)).engine == "dali"
    assert chosen(1_000 * (MARGIN + 0.01), 1_000, is_shared=False).engine == "cpu"


def test_a_close_choice_says_that_another_probe_may_differ() -> None:
    at = 1_000 * MARGIN
    for dali in (at * (1 - NOISE + 0.01), at * (1 + NOISE - 0.01)):
        assert "it is close, so name the engine" in chosen(1_000, dali).reason
    for dali in (at * (1 - NOISE - 0.01), at * (1 + NOISE + 0.01)):
        assert "close" not in chosen(1_000, dali).reason


def test_a_slow_step_is_not_slowed_further_by_prep_on_its_gpu() -> None:
    """CoorDL: prep on the GPU slows some models. CPUs can feed a step of 2,000 samples/s alone, so they do.

    With DALI, a sample takes 1/2,000 s of training and 1/8,000 s of prep: 1,600 samples/s.
    """
    rates = {"cpu": 500, "dali": 8_000, "cpu_workers": 8}
    slow, fast = (chosen(**rates, step_per_s=step) for step in (2_000, 30_000))
    assert slow.engine == "cpu"
    assert "whose step takes 2,000 samples/s gets 2,000 with cpu and 1,600 with dali" in slow.reason
    assert fast.engine == "dali", "4,000/s of the CPUs would stall it, and 6,316/s are left with dali"
    assert chosen(**rates).engine == "dali", "without a step, prep is assumed to be the bottleneck"


def test_a_step_is_not_slowed_by_prep_on_other_gpus() -> None:
    assert chosen(500, 8_000, cpu_workers=8, is_shared=False, step_per_s=2_000).engine == "dali"


def test_gpus_count_once_each_and_further_workers_in_part() -> None:
    four = chosen(1, 100, dali_workers=8, gpus=4)
    assert four.dali_per_s == pytest.approx(100 * (4 + 4 * SECOND_ON_GPU))
    assert chosen(1, 100, dali_workers=3, gpus=4).dali_per_s == 300


def test_an_engine_that_prepared_nothing_is_not_chosen() -> None:
    for is_shared in (True, False):
        assert chosen(0, 10, is_shared=is_shared).engine == "dali"
        assert chosen(10, 0, is_shared=is_shared, step_per_s=100).engine == "cpu"


@given(per_s, per_s, steps, st.booleans())
def test_a_faster_engine_is_never_given_up(cpu: float, dali: float, step: float | None, is_shared: bool) -> None:
    """If an engine is chosen, it is also chosen when it is faster. Equal rates give equal choices."""
    room: dict[str, Any] = {"step_per_s": step, "is_shared": is_shared}
    choice = chosen(cpu, dali, **room)
    assert choice == chosen(cpu, dali, **room)
    if choice.engine == "dali":
        assert chosen(cpu, 2 * dali, **room).engine == "dali"
    elif step is None or not math.isclose(min(cpu, step), step):
        assert chosen(2 * cpu, dali, **room).engine == "cpu"
