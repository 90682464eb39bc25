"""Fits a `StageCurve` to measured rates.

Candidates are all continuous lines from the origin with no, one or two knots on a grid that bend down and have one
peak. Errors count quadratically up to `NOISE` and linearly beyond (Huber), so that a measurement spoilt by something
else on the machine does not bend the curve. More stages, and an end that is not flat, have to earn their parameters
(Schwarz's criterion).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.allocation.rates import StageCurve
from mbaas.errors import ConfigError

NOISE = 0.01
"""Scatter of a good measurement, as a share of the highest rate; smaller errors do not ask for another stage."""

GRID = 17
"""Evenly spaced places for knots, besides the measured counts and the middles between them."""

ROUNDS = 20
"""Of reweighting; two in a row change a curve by far less than `NOISE` by then."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """A curve and how well it agrees with its measurements.

    Attributes:
        curve: in the unit of the measured rates; beyond the highest measured count it is a guess.
        r_squared: share of the variance of the rates that the curve explains; 1 is perfect, and below 0.8 the curve is
            hardly better than the mean rate.
        residual_per_s: root mean square of measured minus fitted rate, in the unit of the rates.
        points: how many measurements went in.
    """

    curve: StageCurve
    r_squared: float
    residual_per_s: float
    points: int


@dataclass(frozen=True)
class _Lines:
    """One candidate, in units of the highest count and rate.

    Attributes:
        knots: float64[k].
        slopes: float64[k + 1]; the last one is 0 where the end is flat by definition.
        deviation: mean absolute error, at least `NOISE`.
        parameters: how many numbers were chosen to fit.
    """

    knots: Floats
    slopes: Floats
    deviation: float
    parameters: int


def fit_stages(points: Sequence[tuple[float, float]]) -> Fit:
    """The curve that agrees best with measured (count, rate) pairs, in any order, repeats welcome.

    Repeats of a count are replaced by their median. With fewer than three counts there are fewer stages; one count
    gives a line.

    Raises:
        ConfigError: there are no points, a count is not above 0, or a rate is negative or not finite.
    """
    measured = np.array(points, dtype=np.float64).reshape(-1, 2)
    if not len(measured):
        raise ConfigError("a fit needs at least 1 measured point, got 0")
    if not np.isfinite(measured).all() or (measured[:, 0] <= 0).any() or (measured[:, 1] < 0).any():
        raise ConfigError(f"points must be finite (count > 0, rate >= 0), got {points}")
    counts = np.unique(measured[:, 0])
    rates = np.array([np.median(measured[measured[:, 0] == count, 1]) for count in counts])
    x_unit, y_unit = counts[-1], rates.max() or 1.0
    best = _best(counts / x_unit, rates / y_unit)
    at = np.concatenate([[0.0], best.knots])
    heights = np.maximum(np.cumsum(np.diff(at) * best.slopes[:-1]), 0.0)
    knots = tuple(zip((best.knots * x_unit).tolist(), (heights * y_unit).tolist(), strict=True))
    curve = StageCurve(knots, float(best.slopes[-1] * y_unit / x_unit))
    errors = measured[:, 1] - curve.rates(measured[:, 0])
    total = float(((measured[:, 1] - measured[:, 1].mean()) ** 2).sum())
    explained = 1 - float((errors**2).sum()) / total if total else float(np.allclose(errors, 0))
    return Fit(curve, explained, float(np.sqrt((errors**2).mean())), len(measured))


def _best(x: Floats, y: Floats) -> _Lines:
    """The candidate with the best criterion; without knots there always is one."""
    free = [_closest(x, y, knots, flat_end=False) for knots in _knots(x)]
    flat = [_closest(x, y, knots[knots[:, -1] <= x[-2]], flat_end=True) for knots in _knots(x)[1:]]
    points = float(len(x))

    def criterion(lines: _Lines) -> float:
        return 2 * points * float(np.log(lines.deviation)) + lines.parameters * float(np.log(points))

    return min((lines for lines in (*free, *flat) if lines is not None), key=criterion)


def _knots(x: Floats) -> list[Floats]:
    """Candidates of no, one and two knots, [m, k]; every line between them has a measured count of its own."""
    grid = np.union1d(np.union1d(x, (x[1:] + x[:-1]) / 2), np.linspace(x[0], x[-1], GRID))[:-1]
    left, right = np.triu_indices(len(grid), 1)
    own = np.searchsorted(x, grid[right], side="right") > np.searchsorted(x, grid[left], side="right")
    pairs = np.stack([grid[left], grid[right]], axis=1)[own]
    return [knots for knots in (np.empty((1, 0)), grid[:, None], pairs) if len(knots)]


def _closest(x: Floats, y: Floats, knots: Floats, *, flat_end: bool) -> _Lines | None:
    """The best of the candidates [m, k] of one kind that have one peak, all fitted at once by reweighted least squares.

    The part of a count that lies on each line is multiplied by the line's slope.
    """
    number, lines = len(knots), knots.shape[1] + 1
    begins = np.hstack([np.zeros((number, 1)), knots])[:, None, :]
    lengths = np.hstack([knots, np.full((number, 1), np.inf)])[:, None, :] - begins
    basis = np.clip(x[None, :, None] - begins, 0.0, lengths)[:, :, : lines - flat_end]
    ridge = 1e-12 * np.eye(basis.shape[2])
    weights = np.ones(basis.shape[:2])
    for _ in range(ROUNDS):
        weighted = (basis * weights[:, :, None]).transpose(0, 2, 1)
        solved = np.linalg.solve(weighted @ basis + ridge, weighted @ y[:, None])
        fitted = (basis @ solved)[:, :, 0]
        errors = np.abs(y - fitted)
        weights = NOISE / np.maximum(errors, NOISE)
    slopes: Floats = np.hstack([solved[:, :, 0], np.zeros((number, int(flat_end)))])
    allowed = _one_peak(slopes) & (fitted[:, -1] >= -1e-9)
    if not allowed.any():
        return None
    loss = np.where(errors <= NOISE, errors**2 / 2, NOISE * (errors - NOISE / 2)).sum(axis=1)
    index = int(np.where(allowed, loss.round(9), np.inf).argmin())  # among equals the smallest knots
    deviation = float(np.maximum(errors[index], NOISE).mean())
    return _Lines(knots[index], slopes[index], deviation, 2 * lines - 1 - flat_end)


def _one_peak(slopes: Floats) -> NDArray[np.bool_]:
    """bool[m]: rises first, bends down while it rises, and once it falls never rises again."""
    later = slopes[:, 1:] <= np.maximum(slopes[:, :-1], 0.0) + 1e-9
    allowed: NDArray[np.bool_] = (slopes[:, 0] >= 0) & later.all(axis=1)
    return allowed
