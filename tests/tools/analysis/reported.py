"""Analyses for the tests of the report, built from stated rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stated_rates import about, line, round_rates

from mbaas.model.pace import predict
from mbaas.model.quantity import stated
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import epoch_costs, recommend, verdict
from mbaas.tools.analysis.decoding import decoding
from mbaas.tools.analysis.measuring.verify import Check, EpochSplit, Verification
from mbaas.tools.analysis.whole import Analysis, Subject

NASTY = '/data/<b>train</b> & "more"\'s \x1b[31m\udcff'
"""A path with markup, quotes, an escape sequence and a byte that is invalid in UTF-8."""

SUBJECT = Subject(
    data=f"{NASTY}, 1,000 samples, 100 MB",
    pipeline="Pipeline([DecodeImage(), Map(<lambda>)])",
    step="train:step, measured",
    machine="4 cores, a <processor>",
    date="21 November 2026",
)


def uneven_rates() -> Rates:
    """Rates that all have intervals; 4 readers are enough, and 8 prep workers are hardly faster than 4."""
    return round_rates(
        step=about(1000, 0.02),
        prep=line((1, 203), (2, 391), (4, 807), (8, 823), spread=0.03),
        storage=line((1, 118), (2, 209), (4, 251), (8, 247), spread=0.05),
        cache=about(1e9, 0.1, "bytes/s"),
        step_cpu_s=stated(0.0002, unit="CPU-s"),
        staging_cpu_s=stated(0.0003, unit="CPU-s"),
        delivery_cpu_s=stated(0.0001, unit="CPU-s"),
    )


def check_of(rates: Rates, setup: Setup, parameter: str, value: float, error: float) -> Check:
    """A checked point whose prediction was too fast by the fraction ``error``."""
    changed: dict[str, Any] = {parameter: value}
    steady = predict(rates, replace(setup, **changed)).steady
    found = about(steady.trial_per_s.value / (1 + error), 0.02)
    return Check(
        parameter=parameter,
        value=value,
        predicted=steady.trial_per_s,
        found=found,
        simulated=1.004 * found.value,
        limit=steady.limit,
    )


def split_of_2_s() -> EpochSplit:
    """A split of 504 samples: 0.5 s of training, 0.125 s of prep, 1.375 s of fetch.

    Loaders measured 0.075 s of prep, 0.025 s for other trials, and 1.42 s of fetch.
    """
    return EpochSplit(
        samples=504,
        epoch_s=about(2.0, 0.04, "s"),
        compute_s=about(0.5, 0.0, "s"),
        prep_stall_s=about(0.125, 0.04, "s"),
        fetch_stall_s=about(1.375, 0.04, "s"),
        live_prep_stall_s=about(0.075, 0.04, "s"),
        live_fetch_stall_s=about(1.42, 0.04, "s"),
        live_peer_stall_s=about(0.025, 0.04, "s"),
    )


def bare_analysis(rates: Rates, setup: Setup, **more: Any) -> Analysis:
    """An analysis with predictions only; nothing was run."""
    changes = recommend(rates, setup)
    given: dict[str, Any] = {
        "subject": SUBJECT,
        "rates": rates,
        "setup": setup,
        "prediction": predict(rates, setup),
        "sentence": verdict(rates, setup, changes=changes),
        "changes": tuple(changes),
        "costs": epoch_costs(rates, setup),
        "decoding": decoding(rates, setup),
    }
    return Analysis(**{**given, **more})


def full_analysis(**changed: Any) -> Analysis:
    """An analysis of four trials that share a feed with a small cache: measured, run and checked."""
    rates, setup = uneven_rates(), Setup(**{"trials": 4, "cache_bytes": 20e6, **changed})
    points = [("cache_bytes", 0.0, 0.02), ("cache_bytes", 50e6, -0.03), ("prep_workers", 1, 0.06), ("trials", 4, -0.01)]
    return bare_analysis(
        rates,
        setup,
        split=split_of_2_s(),
        verification=Verification(tuple(check_of(rates, setup, *point) for point in points)),
        notes=("P is <doubtful>",),
    )
