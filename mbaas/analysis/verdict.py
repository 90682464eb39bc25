"""What the measurements mean, in one sentence that needs no paper."""

from __future__ import annotations

from collections.abc import Sequence

from mbaas import units
from mbaas.analysis import words
from mbaas.analysis.changes import Change, recommend
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.whatif import Epoch, predict

PROBLEM = 0.05
"""A trial that waits for data more than this share of its time has a problem with loading."""

LEAST_PART = 0.005
"""A stall below this share of the time is left out."""


def verdict(rates: Rates, setup: Setup, *, changes: Sequence[Change] | None = None) -> str:
    """Say whether loading is the problem, what sets the pace, what to change, and what that would bring.

    Args:
        changes: what `recommend` found, if it was asked already.
    """
    epoch = predict(rates, setup).steady
    best = next(iter(recommend(rates, setup) if changes is None else changes), None)
    return f"{_waits(epoch, setup)}, and {words.NAMES[epoch.limit]} {_pace(epoch)}; {_advice(best)}."


def _waits(epoch: Epoch, setup: Setup) -> str:
    who = "the trial waits" if setup.trials == 1 else f"each of {setup.trials} trials waits"
    waited = epoch.prep_stall + epoch.fetch_stall
    if waited <= PROBLEM:
        return f"Loading is not the problem: {who} for data only {units.percent(waited)} of the time"
    # reading first: what is not there cannot be prepared, so it is the first thing to look at
    parts = [("to be read", epoch.fetch_stall), ("to be prepared", epoch.prep_stall)]
    whys = [f"{units.percent(part)} for samples {why}" for why, part in parts if part >= LEAST_PART]
    return f"Loading is the problem: {who} for data {units.percent(waited)} of the time ({' and '.join(whys)})"


def _pace(epoch: Epoch) -> str:
    between = units.interval(epoch.epoch_s.low, epoch.epoch_s.high, units.seconds)
    return f"sets the pace at {units.seconds(epoch.epoch_s.value)} an epoch" + (f" ({between})" if between else "")


def _advice(best: Change | None) -> str:
    if best is None:
        return "nothing that was looked at would make it 2 % faster"
    epoch = words.duration(best.prediction.steady.epoch_s)
    return f"{best.advice}, and an epoch takes {epoch}, {units.number(best.speedup.value)} times as fast"
