"""Studies of one parameter: predictions along its values, with the points that were run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from mbaas.base import units
from mbaas.model import words
from mbaas.model.pace import Enough, Epoch, WhatIfCurve, curve, fewest_prep_cores, smallest_cache
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import resource_times
from mbaas.tools.analysis.decoding import largest_cache
from mbaas.tools.analysis.measuring.verify import Check
from mbaas.tools.analysis.whole import Analysis

QUESTIONS = {
    "cache_bytes": ("A larger cache", "cache of a node"),
    "prep_workers": ("More prep workers", "prep workers of a node"),
    "trials": ("More trials", "trials"),
    "storage_factor": ("Faster or slower storage", "times the measured storage"),
    "accelerator_factor": ("Faster or slower training steps", "times the measured step"),
    "nodes": ("More nodes", "nodes like this one"),
}
"""Fields of `Setup` to vary -> (title, axis name)."""

COUNTS = ("prep_workers", "trials", "nodes")
"""Fields of `QUESTIONS` that are integers."""

POINTS = 33
"""Number of evenly spaced values on a curve; significant values are added."""

ROWS = 8
"""Number of evenly spaced values in a curve's table; significant values are added."""

FACTORS = [2 ** (quarter / 4) for quarter in range(-8, 17)]
"""Factors of a rate, from 1/4 to 16."""

FRACTIONS = {0.25: "¼", 0.5: "½"}

MOST_RUNS = 3
"""Maximum number of bottleneck changes listed in a sentence."""

CLOSE = 1e-6
"""Relative tolerance of a changeover point; sentences show three digits."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Predictions along one parameter, a key of `QUESTIONS`.

    Attributes:
        values: evenly spaced values.
        now: the value in the setup.
        enough: the value beyond which more has no effect; None: not computed, or no such value.
        main: the curve of the setup, at all values and at the significant ones.
        other: the curve with the opposite of ``sharing``; None if it would not be useful.
        checks: points that were run: (value, check).
        sentences: findings from the curves.
    """

    parameter: str
    values: tuple[float, ...]
    now: float
    enough: float | None
    main: WhatIfCurve
    other: WhatIfCurve | None
    checks: tuple[tuple[float, Check], ...]
    sentences: tuple[str, ...]
    sharing: bool

    @property
    def title(self) -> str:
        return QUESTIONS[self.parameter][0]

    @property
    def axis(self) -> str:
        return QUESTIONS[self.parameter][1]

    @property
    def name(self) -> str:
        return f"what-if-{self.parameter.replace('_', '-')}"

    @property
    def log(self) -> bool:
        """Return whether values are factors, shown on a logarithmic axis."""
        return self.parameter.endswith("_factor")

    def tick(self, value: float) -> str:
        if "bytes" in self.parameter:
            return units.size(value) if value else "0"
        return FRACTIONS.get(value, units.exact(value))

    @property
    def rows(self) -> list[tuple[float, Epoch, Epoch | None, Check | None]]:
        """Return table rows (value, epoch, other curve's epoch, check) for a few values and the significant ones."""
        epochs = {value: found.steady for value, found in self.main.points}
        others = {value: found.steady for value, found in self.other.points} if self.other is not None else {}
        checks = dict(self.checks)
        spread = {self.values[round((len(self.values) - 1) * row / (ROWS - 1))] for row in range(ROWS)}
        special = {self.now, *checks, *([self.enough] if self.enough is not None else [])}
        return [(at, epochs[at], others.get(at), checks.get(at)) for at in sorted(spread | special)]


def studies(analysis: Analysis) -> list[Study]:
    """Return a study for each parameter of `QUESTIONS`."""
    rates, setup = analysis.rates, analysis.setup
    cache, cores = smallest_cache(rates, setup), fewest_prep_cores(rates, setup)
    told = {
        "cache_bytes": [_about_enough(cache, units.size), *_about_decoding(analysis)],
        "prep_workers": ["Here, workers share the cores that there are.", _about_enough(cores, str)],
        "nodes": _about_nodes(setup),
    }
    # only for the cache: the answer for workers changes cores too, but a curve varies one field
    enough = {"cache_bytes": cache.amount}
    return [_study(analysis, name, enough=enough.get(name), told=told.get(name, ())) for name in QUESTIONS]


def pace(along: WhatIfCurve) -> str:
    """Return a sentence with the bottlenecks along the curve and the ranges of each."""
    named = [(value, words.RESOURCES[found.steady.limit]) for value, found in along.points]
    runs = [(name, [value for value, _ in run]) for name, run in groupby(named, key=lambda entry: entry[1])]
    if len(runs) == 1:
        return f"The pace is set by {runs[0][0]} throughout."
    # the last range has no end; many changes would make the sentence unreadable
    (end, name), *others = [(words.amount(along.parameter, values[-1]), name) for name, values in runs[:-1][:MOST_RUNS]]
    further = "".join(f", then up to {end} by {name}" for end, name in others)
    last = "in the end" if len(runs) > MOST_RUNS + 1 else "then"
    return f"Up to {end} the pace is set by {name}{further}, {last} by {runs[-1][0]}."


def _study(analysis: Analysis, parameter: str, *, enough: float | None, told: Sequence[str]) -> Study:
    rates, setup = analysis.rates, analysis.setup
    values = _values(analysis, parameter)
    # a cache larger than all data is drawn at the end of the axis
    now = min(_present(analysis, parameter), values[-1])
    checks = tuple(_checks(analysis, parameter, now))
    # add the points where the bottleneck changes: the curve bends there, usually between two of the given values
    given = sorted({*values, now, *([] if enough is None else [enough]), *(value for value, _ in checks)})
    at = sorted({*given, *_changeovers(rates, setup, parameter, given)})
    main = curve(rates, setup, parameter, at)
    # sharing makes no difference for a single trial, except on a curve along the number of trials
    several = setup.trials > 1 or parameter == "trials"
    other = curve(rates, replace(setup, sharing=not setup.sharing), parameter, at) if several else None
    shared, alone = (main, other) if setup.sharing else (other, main)
    gain = _about_sharing(shared, alone) if parameter == "trials" else []
    return Study(
        parameter=parameter,
        values=tuple(values),
        now=now,
        enough=enough,
        main=main,
        other=other,
        checks=checks,
        sentences=(pace(main), *gain, *told, *_doubts(analysis, main)),
        sharing=setup.sharing,
    )


def _values(analysis: Analysis, parameter: str) -> Sequence[float]:
    rates, setup = analysis.rates, analysis.setup
    if parameter in COUNTS:
        # workers: up to the measured count, and at least to twice the cores, to show contention; others: up to twice
        # the present value
        cores = max(2 * setup.cores_of(rates.cores), math.ceil(rates.prep.most))
        most = cores if parameter == "prep_workers" else max(8, 2 * getattr(setup, parameter))
        return sorted({round(1 + (most - 1) * number / (POINTS - 1)) for number in range(POINTS)})
    if parameter == "cache_bytes":
        # a little beyond the largest useful cache, to show that more has no effect
        most_bytes = 1.1 * largest_cache(rates, setup)
        return [most_bytes * number / (POINTS - 1) for number in range(POINTS)]
    return FACTORS


def _changeovers(rates: Rates, setup: Setup, parameter: str, values: Sequence[float]) -> Iterator[float]:
    counts = parameter in COUNTS

    def limit(value: float) -> str:
        changed: dict[str, Any] = {parameter: value}
        return resource_times(rates, replace(setup, **changed), steady=True).limit

    # Yields the last value before each change of the bottleneck, found by bisection. It finds one change between two
    # neighbouring values; these are so close that further changes would hardly be visible.
    for low, high in pairwise(values):
        before = limit(low)
        if limit(high) == before:
            continue
        while high - low > (1 if counts else CLOSE * high):
            middle = (low + high) // 2 if counts else (low + high) / 2
            low, high = (middle, high) if limit(middle) == before else (low, middle)
        yield low


def _checks(analysis: Analysis, parameter: str, now: float) -> Iterable[tuple[float, Check]]:
    verification = analysis.verification
    for check in () if verification is None else verification.checks:
        if check.parameter == parameter:
            yield check.value, check
        elif check.value == _present(analysis, check.parameter):
            yield now, check  # the unchanged setup is a point of every curve


def _present(analysis: Analysis, parameter: str) -> float:
    if parameter == "prep_workers":
        return analysis.setup.workers_of(analysis.rates.cores)
    value: float = getattr(analysis.setup, parameter)
    return value


def _about_enough(enough: Enough, say: Callable[[int], str]) -> str:
    said = words.sentence(enough.reason)
    if enough.amount is None or enough.low == enough.high:
        return said
    low, high = ("no amount" if end is None else say(end) for end in (enough.low, enough.high))
    return said if low == high else f"{said} Within the measured interval it is {low} to {high}."


def _about_decoding(analysis: Analysis) -> list[str]:
    found = analysis.decoding
    return [] if found is None else [words.sentence(found.sentence)]


def _about_nodes(setup: Setup) -> list[str]:
    told = []
    if setup.network_bytes_per_s == math.inf:
        told.append("The network between nodes is taken to have no limit: it is not given.")
    if setup.data_parallel:
        told.append("Each trial has a rank on every node, which first takes the samples prepared there.")
    told.append(f"All nodes read {'one storage' if setup.storage_shared else 'a storage of their own'}.")
    return told


def _about_sharing(shared: WhatIfCurve | None, alone: WhatIfCurve | None) -> list[str]:
    if shared is None or alone is None:
        return []
    (value, together), (_, apart) = shared.points[-1], alone.points[-1]
    gain = together.steady.trial_per_s.value / apart.steady.trial_per_s.value
    if abs(gain - 1) < 0.02:
        return []
    where = words.amount(shared.parameter, value)
    return [f"With {where}, sharing one feed makes each trial {units.number(gain)} times as fast."]


def _doubts(analysis: Analysis, along: WhatIfCurve) -> list[str]:
    """Return the notes of the curve's last point that do not apply to the setup as it is."""
    known = {note for _, found in along.points[:1] for note in found.notes} | set(analysis.prediction.notes)
    return [words.sentence(note) for note in along.points[-1][1].notes if note not in known]
