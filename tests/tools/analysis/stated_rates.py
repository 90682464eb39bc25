"""Rates with round numbers, and strategies for arbitrary rates and setups."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import Quantity, stated
from mbaas.model.rates import Rates, Setup


def about(value: float, spread: float = 0.0, unit: str = "samples/s") -> Quantity:
    return Quantity(value, low=value * (1 - spread), high=value * (1 + spread), unit=unit)


def line(*points: tuple[float, float], spread: float = 0.0) -> MeasuredCurve:
    return MeasuredCurve(tuple((count, about(rate, spread)) for count, rate in points))


def round_rates(**changes: Any) -> Rates:
    """1,000 samples of 100 kB. In ms: step 1, prep 5 on one of 4 cores, storage 4, memory 0.1."""
    given: dict[str, Any] = {
        "samples": 1000,
        "sample_bytes": 100_000,
        "pixel_bytes": 150_000,
        "cores": 4,
        "batch_size": 64,
        "step": about(1000),
        "prep": line((1, 200), (2, 400), (4, 800)),
        "storage": line((1, 250)),
        "cache": about(1e9, unit="bytes/s"),
    }
    return Rates(**{**given, **changes})


def decodable_rates(**changes: Any) -> Rates:
    """Rates whose samples, once decoded, are ten times as fast to prepare and five times as large.

    Prep takes 5 ms on one of 4 cores, or 0.5 ms if decoded, and the step 0.01 ms. Storage time is negligible.
    """
    decoded = {"decoded_bytes": 500_000, "decoded_prep": line((1, 2000), (2, 4000), (4, 8000))}
    return round_rates(**{"step": about(1e5), "storage": line((1, 1e6)), **decoded, **changes})


SPREADS = st.floats(0, 0.3)
SPEEDS = st.floats(10, 10_000)
SECONDS = (st.just(0.0) | st.floats(1e-7, 0.01)).map(lambda s: stated(s, unit="CPU-s"))


@st.composite
def any_rates(draw: st.DrawFn) -> Rates:
    """Draw rates: each prep worker adds less than the one before, and speeds are memory >= disk >= storage."""
    first, second = draw(SPEEDS), draw(st.floats(0.05, 1))
    decoded = draw(st.none() | st.floats(0.5, 20))  # prep rate relative to encoded samples
    sample_bytes, storage_per_s = draw(st.floats(100, 1e6)), draw(SPEEDS)
    disk_per_s = sample_bytes * storage_per_s * draw(st.floats(1, 100))
    memory_per_s = disk_per_s * draw(st.floats(1, 100))
    return Rates(
        samples=draw(st.integers(1, 10_000)),
        sample_bytes=sample_bytes,
        pixel_bytes=draw(st.floats(100, 1e6)),
        cores=draw(st.integers(1, 16)),
        batch_size=draw(st.integers(1, 512)),
        step=about(draw(SPEEDS), draw(SPREADS)),
        prep=line((1, first), (2, first * (1 + second)), spread=draw(SPREADS)),
        storage=line((1, storage_per_s), spread=draw(SPREADS)),
        cache=about(memory_per_s, draw(SPREADS), "bytes/s"),
        disk=about(disk_per_s, draw(SPREADS), "bytes/s"),
        decoded_bytes=None if decoded is None else sample_bytes * draw(st.floats(0.5, 20)),
        decoded_prep=None if decoded is None else line((1, first * decoded), (2, first * decoded * (1 + second))),
        serving_s=draw(SECONDS),
        step_cpu_s=draw(SECONDS),
        read_cpu_s=draw(SECONDS),
        staging_cpu_s=draw(SECONDS),
        delivery_cpu_s=draw(SECONDS),
        background_cores=about(draw(st.floats(0, 2)), draw(SPREADS), "cores"),
        overlap=draw(st.floats(0, 1)),
    )


@st.composite
def any_setup(draw: st.DrawFn, *, nodes: int = 4, pipelines: int = 1) -> Setup:
    return Setup(
        nodes=draw(st.integers(1, nodes)),
        cores=draw(st.none() | st.integers(1, 32)),
        prep_workers=draw(st.none() | st.integers(1, 32)),
        cache_bytes=draw(st.floats(0, 1e10)),
        disk_bytes=draw(st.floats(0, 1e10)),
        dram_bytes=draw(st.floats(0, 1e10)),
        storage_shared=draw(st.booleans()),
        accelerators=draw(st.none() | st.integers(1, 4)),
        trials=draw(st.integers(1, 9)),
        pipelines=draw(st.integers(1, pipelines)) if pipelines > 1 else 1,
        data_parallel=draw(st.booleans()),
        sharing=draw(st.booleans()),
        decoded=draw(st.booleans()),
    )
