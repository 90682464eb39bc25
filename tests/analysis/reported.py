"""An analysis as the report gets it, from stated rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stated_rates import about, line, round_rates

from mbaas.analysis.changes import recommend, verdict
from mbaas.analysis.costs import epoch_costs
from mbaas.analysis.decoding import decoding
from mbaas.analysis.measuring.verify import Check, Split, Verification
from mbaas.analysis.quantity import stated
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.whatif import predict
from mbaas.analysis.whole import Analysis, Subject

NASTY = '/data/<b>train</b> & "more"\'s \x1b[31m\udcff'
"""A path that is markup, quotes, an escape sequence and a byte that is no UTF-8."""

SUBJECT = Subject(
    data=f"{NASTY}, 1,000 samples, 100 MB",
    pipeline="Pipeline([DecodeImage(), Map(<lambda>)])",
    step="train:step, measured",
    machine="4 cores, a <processor>",
    date="21 November 2026",
)


def uneven_rates() -> Rates:
    """Make rates that each have an interval; 4 readers are enough, 8 prep workers are hardly faster than 4."""
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
    """Make a point that was run, when the prediction was too fast by ``error``."""
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


def split_of_2_s() -> Split:
    """Make a split of 504 samples: 0.5 s of training, 0.125 of prep, 1.375 of fetch; loaders say 0.1, 0.025 of it for
    each other, and 1.42.
    """
    return Split(
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
    """Make an analysis of predictions, with nothing that was run."""
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
    """Make an analysis of four trials that share a feed with a small cache: measured, run and checked."""
    rates, setup = uneven_rates(), Setup(**{"trials": 4, "cache_bytes": 20e6, **changed})
    points = [("cache_bytes", 0.0, 0.02), ("cache_bytes", 50e6, -0.03), ("prep_workers", 1, 0.06), ("trials", 4, -0.01)]
    return bare_analysis(
        rates,
        setup,
        split=split_of_2_s(),
        verification=Verification(tuple(check_of(rates, setup, *point) for point in points)),
        notes=("P is <doubtful>",),
    )
