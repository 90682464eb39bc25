"""Weighted sampling with replacement."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset.subsets import all_values, strata_of
from mbaas.errors import ConfigError, shown
from mbaas.order import Ids, check_seed, drawing_chance

if TYPE_CHECKING:
    from mbaas.dataset.base import Dataset


def drawn_by_weight(
    weights: NDArray[np.float64],
    samples: int,
    seed: int,
    strata: NDArray[Any] | None = None,
    epoch: int | None = None,
) -> Ids:
    """Draw sample ids in proportion to their weights: int64[samples], ascending; for all epochs if ``epoch`` is None.

    This is systematic sampling (Madow, "On the theory of systematic sampling, II", 1949). The weights are laid end to
    end on a line, in random order. Evenly spaced points with a random start then select samples. A sample with ``e``
    expected draws is drawn floor(e) or ceil(e) times. Independent draws would leave out a third of all samples at equal
    weights. The other arguments are those of `Draws`.
    """
    there = np.flatnonzero(weights > 0)
    order, start = drawing_chance(len(there), seed, epoch)
    ids = there[order]
    if strata is not None:
        ids = ids[np.argsort(strata[ids], kind="stable")]  # grouped by stratum, in random order within each
    ends = np.cumsum(weights[ids])
    # The number of points before the end of each weight. Rounding moves no point beyond the last weight.
    passed = np.minimum(np.floor(ends / ends[-1] * samples + start), samples).astype(np.int64)
    return np.sort(np.repeat(ids, np.diff(passed, prepend=0)))


@dataclass(frozen=True, eq=False)
class Draws:
    """Parameters of draws from a dataset.

    Attributes:
        weights: float64[n], at least 0, not all 0.
        samples: number of draws, at least 1.
        seed: selects the draws, in [0, 2**63).
        strata: [n]; each distinct value gets its expected number of draws, to within one. None: no strata.
    """

    weights: NDArray[np.float64]
    samples: int
    seed: int
    strata: NDArray[Any] | None = None

    def once(self) -> Ids:
        """Return the draws that hold for all epochs: int64[samples], ascending."""
        return drawn_by_weight(self.weights, self.samples, self.seed, self.strata)

    def of_epoch(self, epoch: int) -> Ids:
        """Return the draws of an epoch: int64[samples], ascending, read-only."""
        return _drawn(self, epoch)

    def among(self, ids: Ids) -> Draws:
        """Return the same draws for a dataset of only the samples ``ids``, which include all with positive weight."""
        return Draws(self.weights[ids], self.samples, self.seed, None if self.strata is None else self.strata[ids])

    def fingerprint(self, of: str) -> str:
        """Return 32 hex digits that identify these draws from a dataset with fingerprint ``of``."""
        digest = hashlib.blake2b(f"{self.samples} draws, seed {self.seed}, of {of} ".encode(), digest_size=16)
        digest.update(self.weights.astype("<f8", copy=False).data)
        if self.strata is not None:
            digest.update(self.strata.astype("<i8").data)
        return digest.hexdigest()


@lru_cache(maxsize=4)  # epochs in flight at the same time; a million draws take 8 MB and a third of a second
def _drawn(draws: Draws, epoch: int) -> Ids:
    ids = drawn_by_weight(draws.weights, draws.samples, draws.seed, draws.strata, epoch)
    ids.flags.writeable = False
    return ids


def draws_by_weight(dataset: Dataset, weights: Any, samples: int | None, seed: int) -> Draws:
    """Return the draws of `Dataset.resample`."""
    count = _checked_count(dataset, samples)
    check_seed(seed)
    return Draws(_checked_weights(dataset, weights), count, seed)


def balanced_draws(dataset: Dataset, field: str, samples: int | None, seed: int) -> Draws:
    """Return the draws of `Dataset.balance`."""
    count = _checked_count(dataset, samples)
    check_seed(seed)
    strata = strata_of(dataset, field, option="field")
    _, which, times = np.unique(strata, return_inverse=True, return_counts=True)
    return Draws(1.0 / times[which], count, seed, strata)


def _checked_count(dataset: Dataset, samples: Any) -> int:
    if samples is None:
        return len(dataset)
    if not isinstance(samples, (int, np.integer)) or isinstance(samples, bool) or samples < 1:
        raise ConfigError(f"samples must be a whole number of at least 1, got {shown(samples)}", option="samples")
    return int(samples)


def _checked_weights(dataset: Dataset, weights: Any) -> NDArray[np.float64]:
    what = "weights must have"
    if isinstance(weights, str):
        numbers = [each.name for each in dataset.fields if not each.shape]
        if weights not in numbers:
            raise ConfigError(
                f"weights must name a field of numbers, of which {dataset.root} has {', '.join(numbers) or 'none'}, "
                f"got {weights!r}",
                option="weights",
            )
        what, weights = f"the field {weights!r} must have", all_values(dataset, weights)
    try:
        found = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"weights must be numbers, or a field of them, got {shown(weights)}", option="weights"
        ) from None
    if found.shape != (len(dataset),):
        got = f"an array of shape {found.shape}"
        raise ConfigError(f"{what} a number for each of {len(dataset)} samples, got {got}", option="weights")
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise ConfigError(
            f"{what} finite numbers of at least 0, got {found[wrong[0]]} for sample {wrong[0]}", option="weights"
        )
    if not found.any():
        raise ConfigError(f"{what} at least one number above 0, got none", option="weights")
    return found / found.max()  # prevents an infinite sum
