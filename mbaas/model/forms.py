"""Choice of the form and tier in which a node caches its samples: encoded or decoded, memory or disk, or neither.

An encoded sample in a cache is not read from storage again. A decoded one (cached after the deterministic prefix) is
not decoded again either, but usually takes more room. If x are the shares of a node's samples by form and tier, an
average sample takes

=========  ===================================================================================
resource   seconds
=========  ===================================================================================
storage    (1 - sum of all x) storage_s
CPUs       (encoded_s (d - x decoded) + decoded_s (x decoded)) / threads
disk       (encoded_bytes (x encoded there) + decoded_bytes (x decoded there)) / disk_bytes_per_s
=========  ===================================================================================

Here d, usually 1, is the share of samples that may be cached decoded. The busiest of the three resources determines the
length of an epoch. Times on one resource add up; averaging the rates of encoded and decoded samples instead, as Seneca
does (FAST 2025, equation 9), overestimates.

A linear program finds the shares with the shortest epoch. Ties go to the least CPU and storage time, because other jobs
use both, and then to the most cached samples. If memory has room for all samples encoded, every sample is cached, some
decoded. Storage is then read only once, whatever that costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model.quantity import check_fields

WORTHWHILE = 0.05
"""Smallest share of the prep CPU time that decoded samples must save to be worth making."""

TOLERANCE = 1e-9
"""Relative tolerance for rounding errors."""

SHARES = ("memory_encoded", "memory_decoded", "disk_encoded", "disk_decoded")
"""Variables of the linear program, named as in `FormPlan`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """Average costs of a sample on one node: CPU seconds of one thread from each form; storage seconds, 1 / rate.

    The disk's rate is of all threads; None if not measured. ``decodable`` is the share of the samples that may be
    cached decoded; a GPU prepares the others, without these CPU seconds.
    """

    encoded_bytes: float
    decoded_bytes: float
    encoded_s: float
    decoded_s: float
    storage_s: float
    disk_bytes_per_s: float | None = None
    decodable: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "above 0 and finite", "encoded_bytes", "decoded_bytes", "encoded_s", "disk_bytes_per_s")
        check_fields(self, "0 or more and finite", "decoded_s", "storage_s")
        if not 0 < self.decodable <= 1:
            raise ConfigError(f"decodable must be above 0 and at most 1, got {self.decodable}")

    @property
    def all_encoded_s(self) -> float:
        """CPU seconds averaged over all samples, if none is cached decoded."""
        return self.encoded_s * self.decodable

    @property
    def saved_s(self) -> float:
        """CPU seconds that a decoded sample saves each time; may be negative."""
        return self.encoded_s - self.decoded_s

    @property
    def is_worthwhile(self) -> bool:
        return self.saved_s >= WORTHWHILE * self.encoded_s

    @property
    def disk_s_per_byte(self) -> float:
        return 0.0 if self.disk_bytes_per_s is None else 1 / self.disk_bytes_per_s


class FormPlan(Struct, frozen=True, kw_only=True):
    """Shares of a node's samples to cache in each form, together at most 1; the rest is read from storage.

    ``told`` are reasons for unused forms or room, one clause each.
    """

    memory_encoded: float
    memory_decoded: float
    disk_encoded: float
    disk_decoded: float
    told: tuple[str, ...] = ()

    @property
    def decoded(self) -> float:
        return self.memory_decoded + self.disk_decoded

    @property
    def kept(self) -> float:
        return self.memory_encoded + self.disk_encoded + self.decoded


@lru_cache(4096)  # answering one question about a setup needs each plan several times
def plan_forms(
    costs: SampleCosts, *, samples: float, threads: float, memory_bytes: float, disk_bytes: float = 0
) -> FormPlan:
    """Choose the shares of a node's samples to cache in each form.

    If decoded samples bring no advantage, all are cached encoded, first in memory and then on disk. ``threads`` are the
    node's prep threads; ``memory_bytes`` and ``disk_bytes`` are room for both forms together.
    """
    # Bytes for each sample, at most the size of both forms together, so that all numbers have a similar magnitude.
    most = costs.encoded_bytes + costs.decoded_bytes
    memory, disk = (min(most, nbytes / samples) if samples else most for nbytes in (memory_bytes, disk_bytes))
    too_slow = _slow_disk(costs, threads) if disk else None
    names = SHARES[: 2 if not disk else 4 if too_slow is None else 3]
    both = _solved(costs, names, threads=threads, memory=memory, disk=disk)
    saved = both.decoded * costs.saved_s / costs.all_encoded_s
    if saved >= WORTHWHILE:
        plan, told = both, [too_slow if both.decoded < costs.decodable - TOLERANCE else None]
    else:
        plan = _solved(costs, names[::2], threads=threads, memory=memory, disk=disk)
        told = [_not_worthwhile(costs, saved) if memory or disk else None]
    if plan.kept < 1 - TOLERANCE and _disk_bytes(costs, plan) < disk - TOLERANCE * most:
        told.append("the disk is not filled, because reading more of it would take longer than storage does")
    return replace(plan, told=tuple(clause for clause in told if clause is not None))


def room_for_decoded(
    plan: FormPlan, costs: SampleCosts, *, samples: float, memory_bytes: int, disk_bytes: int = 0
) -> tuple[int, int]:
    """Return the bytes of memory and disk available to decoded samples; 0 where the plan has none.

    Only a few decoded samples have been measured, so they get all room that encoded ones, whose size is known, do not
    need. The larger samples may be the ones that stay encoded.
    """

    def left(nbytes: int, encoded: float, decoded: float) -> int:
        count = encoded * samples
        needed = (count + math.sqrt(count)) * costs.encoded_bytes
        return max(0, math.floor(nbytes - needed)) if decoded else 0

    memory = left(memory_bytes, plan.memory_encoded, plan.memory_decoded)
    return memory, left(disk_bytes, plan.disk_encoded, plan.disk_decoded)


def _disk_bytes(costs: SampleCosts, plan: FormPlan) -> float:
    return costs.encoded_bytes * plan.disk_encoded + costs.decoded_bytes * plan.disk_decoded


def _slow_disk(costs: SampleCosts, threads: float) -> str | None:
    if costs.disk_bytes_per_s is None:
        return "the disk keeps no decoded samples, because its speed has not been measured"
    read_s, decode_s = costs.decoded_bytes * costs.disk_s_per_byte, costs.saved_s / threads
    if read_s < decode_s:
        return None
    decoding = (
        f"decoding it again takes only {units.seconds(decode_s)}" if decode_s > 0 else "decoding it saves no time"
    )
    return f"the disk keeps no decoded samples, because it reads one in {units.seconds(read_s)}, and {decoding}"


def _not_worthwhile(costs: SampleCosts, saved: float) -> str:
    if not costs.is_worthwhile:
        share = units.percent(max(0.0, costs.saved_s / costs.encoded_s))
        return f"no decoded samples are kept, because preparing one takes only {share} less CPU time"
    size = f"one is as large as {units.number(costs.decoded_bytes / costs.encoded_bytes)} encoded ones"
    saving = f"those worth the memory save {units.percent(saved)} of the CPU time"
    return f"no decoded samples are kept, because {size}: {saving}"


def _solved(costs: SampleCosts, names: Sequence[str], *, threads: float, memory: float, disk: float) -> FormPlan:
    """Solve the linear program with the named shares; room is in bytes per sample."""
    # The optimum of a linear program is at a corner of the feasible region. At a corner, as many constraints hold with
    # equality as there are variables: at most four shares and the seconds of the busiest resource. With at most
    # thirteen constraints there are 1,287 candidates. Trying all of them takes less time than importing a solver.
    constraints, limits = _constraints(costs, names, threads=threads, memory=memory, disk=disk)
    chosen = _choices(len(limits), len(names) + 1)
    is_point = np.linalg.det(constraints[chosen]) != 0
    chosen = chosen[is_point]
    points = np.linalg.solve(constraints[chosen], limits[chosen][..., None])[..., 0]
    corners = points[(points @ constraints.T <= limits + TOLERANCE).all(axis=1)].clip(min=0)
    shares, busiest = corners[:, :-1], corners[:, -1]
    kept, decoded, in_memory = shares.sum(axis=1), shares @ _names(names, "decoded"), shares @ _names(names, "memory")
    used_s = (1 - kept) * costs.storage_s + costs.all_encoded_s - decoded * costs.saved_s
    # Each cost breaks the ties left by those before it.
    best = np.arange(len(corners))
    for cost in (busiest, used_s / (costs.storage_s + costs.encoded_s), -kept, -in_memory):
        best = best[cost[best] <= cost[best].min() + 2 * TOLERANCE]
    chosen_shares = shares[best[0]] / max(1.0, kept[best[0]])  # rounding must not push the sum above 1
    found = dict(zip(names, chosen_shares.tolist(), strict=True))
    return FormPlan(**{name: found.get(name, 0.0) for name in SHARES})


@cache
def _choices(number: int, length: int) -> NDArray[np.intp]:
    return np.array(list(combinations(range(number), length)))


def _constraints(
    costs: SampleCosts, names: Sequence[str], *, threads: float, memory: float, disk: float
) -> tuple[Floats, Floats]:
    """Return A and b in A x <= b; x are the named shares and the seconds of the busiest resource."""
    decoded, in_memory = _names(names, "decoded"), _names(names, "memory")
    nbytes = np.where(decoded, costs.decoded_bytes, costs.encoded_bytes)
    ones, most = np.ones(len(names)), costs.encoded_bytes + costs.decoded_bytes
    unit_s = max(costs.storage_s, costs.encoded_s / threads, costs.decoded_s / threads)
    rows = [
        (ones, 0.0, 1.0),
        *([(decoded, 0.0, costs.decodable)] if costs.decodable < 1 else []),
        *([(-ones, 0.0, -1.0)] if memory >= costs.encoded_bytes * (1 - TOLERANCE) else []),
        (nbytes * in_memory / most, 0.0, memory / most),
        (nbytes * (1 - in_memory) / most, 0.0, disk / most),
        (-ones * costs.storage_s / unit_s, -1.0, -costs.storage_s / unit_s),
        (-decoded * costs.saved_s / threads / unit_s, -1.0, -costs.all_encoded_s / threads / unit_s),
    ]
    if costs.disk_bytes_per_s is not None:
        # Scaled by its largest number, because a disk may be arbitrarily slow.
        seconds = nbytes * (1 - in_memory) * costs.disk_s_per_byte / unit_s
        largest = max(1.0, float(seconds.max()))
        rows.append((seconds / largest, -1.0 / largest, 0.0))
    not_negative = -np.eye(len(names) + 1)
    constraints = np.vstack([np.array([[*shares, seconds] for shares, seconds, _ in rows]), not_negative])
    limits = np.array([*(limit for _, _, limit in rows), *np.zeros(len(not_negative))])
    return constraints, limits


def _names(names: Sequence[str], part: str) -> Floats:
    return np.array([float(part in name) for name in names])
