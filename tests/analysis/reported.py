"""An analysis with round numbers, as the report gets it."""

from __future__ import annotations

from typing import Any

from stated_rates import about, line, round_rates

from mbaas.analysis.changes import recommend
from mbaas.analysis.measuring.differential import Split
from mbaas.analysis.measuring.verify import Check, Verification
from mbaas.analysis.quantity import Quantity, stated
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.verdict import verdict
from mbaas.analysis.whatif import predict
from mbaas.analysis.whole import Analysis, Subject


def measured_rates() -> Rates:
    """Storage of 250 samples/s is the limit; every rate has an interval."""
    return round_rates(
        step=about(1000, 0.02),
        prep=line((1, 203), (2, 391), (4, 807), (8, 823), spread=0.03),
        storage=line((1, 118), (2, 209), (4, 251), (8, 247), spread=0.05),
        cache=about(1e9, 0.1, "bytes/s"),
        step_cpu_s=stated(0.0002, unit="CPU-s"),
        staging_cpu_s=stated(0.0003, unit="CPU-s"),
        delivery_cpu_s=stated(0.0001, unit="CPU-s"),
    )


def checked(rates: Rates, setup: Setup, parameter: str, value: float, error: float) -> Check:
    """A point that was run, and found slower or faster than predicted by ``error``."""
    from dataclasses import replace

    changed: dict[str, Any] = {parameter: value}
    steady = predict(rates, replace(setup, **changed)).steady
    found = steady.trial_per_s.value / (1 + error)
    return Check(parameter, value, steady.trial_per_s, about(found, 0.02), steady.limit)


def split_of_4_s() -> Split:
    """An epoch of 504 samples in 2 s: 0.5 of compute, 0.125 of prep, the rest fetch; loaders say nearly the same."""

    def s(value: float, spread: float = 0.04) -> Quantity:
        return about(value, spread, "s")

    return Split(
        samples=504,
        epoch_s=s(2.0),
        compute_s=s(0.5, 0.0),
        prep_stall_s=s(0.125),
        fetch_stall_s=s(1.375),
        live_prep_stall_s=s(0.1),
        live_fetch_stall_s=s(1.42),
    )


def analysis(rates: Rates | None = None, setup: Setup | None = None, **changes: Any) -> Analysis:
    """Four trials that share a feed with a small cache; measured, run, checked."""
    rates = measured_rates() if rates is None else rates
    setup = Setup(trials=4, cache_bytes=20e6) if setup is None else setup
    found = recommend(rates, setup)
    points = [
        ("cache_bytes", 0.0, 0.02),
        ("cache_bytes", 50e6, -0.03),
        ("cache_bytes", 100e6, 0.041),
        ("prep_workers", 1, 0.06),
        ("prep_workers", 4, -0.01),
        ("trials", 1, 0.012),
        ("trials", 2, -0.022),
    ]
    given: dict[str, Any] = {
        "subject": Subject(
            data='/data/<train> & "more", 1,000 samples, 100 MB',
            pipeline="Pipeline([DecodeImage(), RandomResizedCrop(224), RandomHorizontalFlip()])",
            step="train:step, measured",
            machine="4 cores, a processor",
            date="21 November 2025",
        ),
        "rates": rates,
        "setup": setup,
        "prediction": predict(rates, setup),
        "sentence": verdict(rates, setup, changes=found),
        "changes": tuple(found),
        "split": split_of_4_s(),
        "verification": Verification(tuple(checked(rates, setup, *point) for point in points)),
        "notes": ("P against workers fits three straight lines badly (R^2 0.79)",),
    }
    return Analysis(**{**given, **changes})
