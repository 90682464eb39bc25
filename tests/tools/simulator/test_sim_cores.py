"""Cores shared by prep, reading and training match hand calculations, and invariants hold for every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_systems import machine, run, system, systems

from mbaas.errors import ConfigError
from mbaas.tools.simulator import simulate
from mbaas.tools.simulator.simulation import changed, parse
from mbaas.tools.simulator.system import CORE_COSTS, Cores, System

COSTS: dict[str, float] = {
    "prep_cpu_s": 8,
    "staging_cpu_s": 4,
    "delivery_cpu_s": 2,
    "step_cpu_s": 14,
    "read_cpu_s": 6,
}
"""Added to 10 s of training, 1 s of prep and 5 s of PFS for each byte and thread (`small_systems.machine`)."""


def on_cores(given: System, count: int, **costs: float) -> System:
    return replace(given, machine=replace(given.machine, cores=Cores(count=count, **costs)))


def test_prep_training_and_reading_take_turns_on_the_cores() -> None:
    """Four samples of one byte in steps of one, nothing cached.

    On 2 cores a sample takes (8 + 4 + 6 + 2 + 14) / 2 = 17 s, on 4 cores 8.5 s, on 10 cores 3.4 s. Steps use the cores
    for 14 / 2 = 7 s, less than the 10 s of training.

    The service reads a sample in 5 s in parallel with prep. The first sample is ready after 5 s of reading, plus prep.
    Then prep or training sets the pace, whichever takes longer. The first minibatch waited for the PFS; with 17 s a
    sample, training then waits 3 x (17 - 10) s.

    Other policies read and prepare in turn, 6 s, which hides 3.4 s on the cores but not 17 s.
    """
    given = system(machine(), samples=4)
    found = {count: run(on_cores(given, count, **COSTS), "mbaas") for count in (2, 4, 10)}
    assert found[2].total_s == pytest.approx(5 + 4 * 17 + 10)
    assert found[4].total_s == pytest.approx(5 + 8.5 + 4 * 10)
    assert found[10].total_s == pytest.approx(5 + 3.4 + 4 * 10)
    assert found[2].seconds["staging"] == pytest.approx(3 * 7)
    assert found[2].seconds["pfs"] == pytest.approx(5 + 17)
    assert run(on_cores(given, 2, **COSTS), "staging_buffer").total_s == pytest.approx(4 * 17 + 10)
    assert run(on_cores(given, 10, **COSTS), "staging_buffer").total_s == pytest.approx(6 + 4 * 10)


def test_steps_of_several_trials_share_cores() -> None:
    """Three trials on one core: steps take 3 x 14 = 42 s, where training alone would take 10 s.

    The service prepares once: 8 + 4 + 6 + 3 (2 + 14) = 66 s. Without sharing, each trial prepares for itself: 3
    (18 + 16) = 102 s. naive waits for its reading, (18 + 2) x 3 = 60 s of the core, more than 3 (5 + 1) s of its one
    thread. It then trains, 42 s.
    """
    given = on_cores(system(machine(), samples=4, trials=3), 1, **COSTS)
    assert run(given, "perfect").total_s == pytest.approx(4 * 42)
    assert run(given, "mbaas").total_s == pytest.approx(5 + 4 * 66 + 42)
    assert run(given, "minio").total_s == pytest.approx(4 * 102 + 42)
    assert run(given, "naive").total_s == pytest.approx(4 * (60 + 42))


def test_each_machine_has_its_own_cores() -> None:
    """Two workers with one core take every other sample; 8 s of prep for a step are less than its training."""
    given = system(machine(), samples=8, workers=2)
    assert run(on_cores(given, 1, prep_cpu_s=8), "mbaas").total_s == pytest.approx(5 + 8 + 4 * 10)
    assert run(on_cores(given, 1, prep_cpu_s=16), "mbaas").total_s == pytest.approx(5 + 4 * 16 + 10)


def test_what_is_cached_is_not_read() -> None:
    """Reading takes 30 s of the one core, prep nothing; the second epoch finds all four samples in ram."""
    found = run(on_cores(system(machine(ram_bytes=9), samples=4, epochs=2), 1, read_cpu_s=30), "mbaas")
    assert found.epoch_s == pytest.approx((5 + 4 * 30 + 10, 4 * 10))


costs = st.fixed_dictionaries({name: st.just(0.0) | st.floats(0, 30) for name in CORE_COSTS})


@settings(max_examples=30, deadline=None)
@given(given=systems(), costs=costs, count=st.integers(1, 6), more=st.integers(1, 6))
def test_more_cores_never_slow_down_and_nothing_beats_perfect(
    given: System, costs: dict[str, float], count: int, more: int
) -> None:
    """With enough cores for everything, the results equal those without a limit on cores."""
    few, many = (on_cores(given, cores, **costs) for cores in (count, count + more))
    perfect = run(few, "perfect").total_s
    for slow, fast, free in zip(simulate(few), simulate(many), simulate(given), strict=True):
        assert sum(slow.seconds.values()) == pytest.approx(slow.total_s)
        assert slow.total_s >= perfect * (1 - 1e-9), slow.policy
        assert fast.total_s <= slow.total_s * (1 + 1e-9), slow.policy
        assert free.total_s <= fast.total_s * (1 + 1e-9), slow.policy
    for enough, free in zip(simulate(on_cores(given, 10**30, **costs)), simulate(given), strict=True):
        assert enough.seconds == pytest.approx(free.seconds, rel=1e-12), free.policy
        assert enough.epoch_s == pytest.approx(free.epoch_s, rel=1e-12), free.policy
        assert replace(enough, seconds=free.seconds, total_s=free.total_s, epoch_s=free.epoch_s) == free


def test_cores_that_are_always_busy_are_none() -> None:
    given = system(machine(), samples=4)
    busy = run(on_cores(given, 4, **COSTS, background=2), "mbaas")
    assert busy.total_s == run(on_cores(given, 2, **COSTS), "mbaas").total_s


def test_cores_as_a_parameter() -> None:
    given = on_cores(system(machine()), 2, prep_cpu_s=1)
    assert changed(given, "cores", parse(given, "cores", "6")).machine.cores == Cores(count=6, prep_cpu_s=1)
    with pytest.raises(ConfigError, match=r"one of cache_bytes, .*, ssd_bytes, cores, got 'core'"):
        changed(given, "core", 6)
    with pytest.raises(ConfigError, match=r"one of cache_bytes, .*, ssd_bytes, got 'cores'"):
        changed(system(machine()), "cores", 6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"count": 0}, "count of cores must be at least 1, got 0"),
        ({"count": 2, "background": 2.0}, r"background must be 0 or more and below 2 cores, got 2\.0"),
        ({"count": 2, "step_cpu_s": -1.0}, r"step_cpu_s must be 0 or more and finite, got -1"),
    ],
)
def test_cores_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Cores(**change)
