"""Caches hold the optimal mix of encoded and decoded samples, and only encoded ones (MinIO) if decoding is free."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.forms import (
    WORTHWHILE,
    FormPlan,
    SampleCosts,
    plan_forms,
    room_for_decoded,
)

PHOTOS = SampleCosts(encoded_bytes=100_000, decoded_bytes=500_000, encoded_s=2e-3, decoded_s=0.2e-3, storage_s=0.2e-3)
"""Photographs on fast storage: two threads prepare 1,000/s. Decoded samples are five times as large and save 90 %."""


def minio(costs: SampleCosts, *, samples: float, memory_bytes: float, disk_bytes: float = 0) -> FormPlan:
    """Cache encoded samples only, in memory until it is full, then on disk."""
    memory = min(1.0, memory_bytes / (samples * costs.encoded_bytes))
    disk = min(1 - memory, disk_bytes / (samples * costs.encoded_bytes))
    return FormPlan(memory_encoded=memory, memory_decoded=0.0, disk_encoded=disk, disk_decoded=0.0)


def seconds_per_sample(costs: SampleCosts, plan: FormPlan, threads: float = 2) -> float:
    """Seconds of an average sample on the busiest resource: storage, CPUs or disk."""
    disk_bytes = costs.encoded_bytes * plan.disk_encoded + costs.decoded_bytes * plan.disk_decoded
    return max(
        (1 - plan.kept) * costs.storage_s,
        (costs.all_encoded_s - costs.saved_s * plan.decoded) / threads,
        disk_bytes * costs.disk_s_per_byte,
    )


def shares(plan: FormPlan) -> tuple[float, float, float, float]:
    return plan.memory_encoded, plan.memory_decoded, plan.disk_encoded, plan.disk_decoded


def test_cpus_that_set_the_pace_get_decoded_samples_for_all_memory_that_there_is() -> None:
    """50 MB hold a tenth of 1,000 samples decoded: 0.9 x 2 ms + 0.1 x 0.2 ms on two threads is 0.91 ms.

    Storage reads the others in 0.18 ms.
    """
    plan = plan_forms(PHOTOS, samples=1000, threads=2, memory_bytes=50_000_000)
    assert shares(plan) == pytest.approx((0, 0.1, 0, 0))
    assert seconds_per_sample(PHOTOS, plan) == pytest.approx(0.91e-3)
    assert plan.told == ()


def test_where_all_samples_fit_encoded_all_are_kept_however_fast_storage_is() -> None:
    """250 MB hold all 1,000 samples of 100 kB. With x decoded at 500 kB and 1 - x encoded, 100 + 400 x = 250 MB."""
    plan = plan_forms(PHOTOS, samples=1000, threads=2, memory_bytes=250_000_000)
    assert shares(plan) == pytest.approx((0.625, 0.375, 0, 0))
    assert seconds_per_sample(PHOTOS, plan) == pytest.approx((2 - 0.375 * 1.8) / 2 * 1e-3)


def test_what_a_gpu_prepares_is_never_kept_decoded_and_takes_no_time_of_cpus() -> None:
    """CPUs prepare a quarter of 1,000 samples: 0.25 x 2 ms on two threads, or 0.25 x 0.2 ms if decoded."""
    costs = replace(PHOTOS, decodable=0.25)
    none = plan_forms(costs, samples=1000, threads=2, memory_bytes=0)
    assert seconds_per_sample(costs, none) == pytest.approx(0.25e-3)
    plan = plan_forms(costs, samples=1000, threads=2, memory_bytes=10**9)
    assert shares(plan) == pytest.approx((0.75, 0.25, 0, 0))
    assert seconds_per_sample(costs, plan) == pytest.approx(0.025e-3)
    assert plan.told == ()


def test_decoded_samples_have_the_room_that_encoded_ones_do_not_need() -> None:
    """In 250 MB, 625 encoded samples take 62.5 MB. A margin of 25 samples, the square root of 625, takes 2.5 MB."""
    plan = plan_forms(PHOTOS, samples=1000, threads=2, memory_bytes=250_000_000)
    memory, disk = room_for_decoded(plan, PHOTOS, samples=1000, memory_bytes=250_000_000)
    assert memory == pytest.approx(185_000_000, abs=10)
    assert disk == 0
    none = plan_forms(replace(PHOTOS, decoded_s=2e-3), samples=1000, threads=2, memory_bytes=250_000_000)
    assert room_for_decoded(none, PHOTOS, samples=1000, memory_bytes=250_000_000) == (0, 0)


def test_slow_storage_gets_its_samples_kept_first_and_then_shares_the_memory() -> None:
    """Storage takes 4 ms per sample, the CPUs 1 ms.

    Memory for half of the samples encoded gives the storage rate, 2 ms. 200 MB hold all samples encoded twice over, so
    all are cached. With x decoded, at five times the size, 1 + 4 x = 2 and x is a quarter: 0.25 x 0.1 + 0.75 x 1 ms.
    """
    slow = replace(PHOTOS, storage_s=4e-3)
    plan = plan_forms(slow, samples=1000, threads=2, memory_bytes=50_000_000)
    assert shares(plan) == pytest.approx((0.5, 0, 0, 0))
    assert seconds_per_sample(slow, plan) == pytest.approx(2e-3)
    assert plan.told == (
        "no decoded samples are kept, because one is as large as 5 encoded ones: those worth the memory save "
        "0 % of the CPU time",
    )
    plan = plan_forms(slow, samples=1000, threads=2, memory_bytes=200_000_000)
    assert shares(plan) == pytest.approx((0.75, 0.25, 0, 0))
    assert seconds_per_sample(slow, plan) == pytest.approx((1 - 0.9 * 0.25) * 1e-3)


@pytest.mark.parametrize("decoded_s", [2e-3, 2.5e-3, 1.95e-3], ids=["as long", "longer", "2.5 % less"])
def test_without_a_worthwhile_advantage_it_is_plain_minio(decoded_s: float) -> None:
    costs = replace(PHOTOS, decoded_s=decoded_s, disk_bytes_per_s=1e9)
    for memory_bytes, disk_bytes in product((0, 30_000_000, 500_000_000), (0, 20_000_000, 500_000_000)):
        plan = plan_forms(costs, samples=1000, threads=2, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        plain = minio(costs, samples=1000, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        assert shares(plan) == pytest.approx(shares(plain), abs=1e-6)
        if memory_bytes or disk_bytes:
            assert plan.told[0].startswith("no decoded samples are kept, because preparing one takes only ")


def test_what_saves_hardly_anything_is_not_worth_a_change_of_forms() -> None:
    """A decoded share x of 1,000 samples saves 0.9 x of the CPU time: saving 5 % takes 28 MB.

    Less memory caches encoded samples only.
    """
    enough = WORTHWHILE / 0.9 * 500_000_000
    assert plan_forms(PHOTOS, samples=1000, threads=2, memory_bytes=enough * 1.001).memory_decoded > 0.055
    below = plan_forms(PHOTOS, samples=1000, threads=2, memory_bytes=enough * 0.999)
    assert shares(below) == pytest.approx((0.999 * enough / 1e8, 0, 0, 0))


def test_a_disk_slower_than_decoding_keeps_no_decoded_samples_and_it_is_told_why() -> None:
    """A decoded sample of 500 kB takes 5 ms from a disk of 100 MB/s; two threads decode one in 0.9 ms."""
    room = {"samples": 1000, "threads": 2, "memory_bytes": 0, "disk_bytes": 10**9}
    slow = plan_forms(replace(PHOTOS, disk_bytes_per_s=1e8), **room)
    assert slow.disk_decoded == 0
    medium = plan_forms(replace(PHOTOS, disk_bytes_per_s=1e8), **{**room, "memory_bytes": 250_000_000})
    assert medium.told[0] == (
        "the disk keeps no decoded samples, because it reads one in 5 ms, and decoding it again takes only 900 µs"
    )
    needless = plan_forms(replace(PHOTOS, disk_bytes_per_s=1e8), **{**room, "memory_bytes": 500_000_000})
    assert (needless.memory_decoded, needless.told) == (pytest.approx(1), ())
    unknown = plan_forms(PHOTOS, **{**room, "memory_bytes": 250_000_000})
    assert shares(unknown) == pytest.approx((0, 0.5, 0.5, 0))
    assert unknown.told == ("the disk keeps no decoded samples, because its speed has not been measured",)
    costs = replace(PHOTOS, disk_bytes_per_s=5e9)
    fast = plan_forms(costs, **room)
    assert shares(fast) == pytest.approx((0, 0, 0, 1))
    assert seconds_per_sample(costs, fast) == pytest.approx(0.1e-3)  # 500 kB from the disk; the CPUs take the same time
    assert fast.told == ()


def test_decoded_samples_that_take_no_more_room_are_kept_also_where_storage_sets_the_pace() -> None:
    """Caching half of the samples in either form gives equal epoch times; decoded ones leave the CPUs to other work."""
    costs = replace(PHOTOS, decoded_bytes=100_000, storage_s=40e-3)
    plan = plan_forms(costs, samples=1000, threads=2, memory_bytes=50_000_000)
    assert shares(plan) == pytest.approx((0, 0.5, 0, 0))
    assert seconds_per_sample(costs, plan) == pytest.approx(20e-3)


def test_samples_are_kept_also_where_storage_takes_no_time() -> None:
    costs = replace(PHOTOS, decoded_s=2e-3, storage_s=0)
    plan = plan_forms(costs, samples=1000, threads=2, memory_bytes=30_000_000, disk_bytes=10**9)
    assert shares(plan) == pytest.approx((0.3, 0, 0.7, 0))


def test_a_disk_slower_than_storage_is_filled_only_as_far_as_it_helps() -> None:
    """Storage gives 250 samples/s and the disk 50: together 300, with a sixth of the samples on the disk."""
    costs = replace(PHOTOS, storage_s=4e-3, disk_bytes_per_s=5e6)
    plan = plan_forms(costs, samples=1000, threads=2, memory_bytes=0, disk_bytes=10**9)
    assert shares(plan) == pytest.approx((0, 0, 1 / 6, 0))
    assert seconds_per_sample(costs, plan) == pytest.approx(1 / 300)
    assert plan.told[-1] == "the disk is not filled, because reading more of it would take longer than storage does"


def test_a_node_without_samples_keeps_them_all() -> None:
    assert plan_forms(PHOTOS, samples=0, threads=1, memory_bytes=0).kept == pytest.approx(1)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="decoded_bytes must be above 0 and finite, got 0"):
        replace(PHOTOS, decoded_bytes=0)
    with pytest.raises(ConfigError, match="storage_s must be 0 or more and finite, got -1"):
        replace(PHOTOS, storage_s=-1)
    with pytest.raises(ConfigError, match="disk_bytes_per_s must be above 0 and finite, got inf"):
        replace(PHOTOS, disk_bytes_per_s=float("inf"))
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match=f"decodable must be above 0 and at most 1, got {share}"):
            replace(PHOTOS, decodable=share)


def spread(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats distributed log-uniformly between two bounds."""
    return st.floats(np.log(low), np.log(high)).map(lambda size: float(np.exp(size)))


COSTS = st.builds(
    SampleCosts,
    encoded_bytes=spread(1e3, 1e6),
    decoded_bytes=spread(1e3, 1e7),
    encoded_s=spread(1e-5, 1e-1),
    decoded_s=st.just(0.0) | spread(1e-6, 1e-1),
    storage_s=st.just(0.0) | spread(1e-6, 1e-1),
    disk_bytes_per_s=st.none() | spread(1e6, 1e10),
    decodable=st.sampled_from([1.0, 1.0, 0.75, 0.125]),
)
THREADS = st.sampled_from([1, 2, 16])
ROOM = st.just(0.0) | spread(1e-2, 10)
"""Capacity as a multiple of the bytes of all samples, encoded."""

SAMPLES = 1000


def planned(costs: SampleCosts, threads: int, memory: float, disk: float) -> FormPlan:
    return plan_forms(costs, samples=SAMPLES, threads=threads, **budgets(costs, memory, disk))


def budgets(costs: SampleCosts, memory: float, disk: float) -> dict[str, float]:
    whole = SAMPLES * costs.encoded_bytes
    return {"memory_bytes": memory * whole, "disk_bytes": disk * whole}


@settings(max_examples=150, deadline=None)
@given(COSTS, THREADS, ROOM, ROOM)
def test_shares_fit_and_are_never_slower_than_plain_minio(
    costs: SampleCosts, threads: int, memory: float, disk: float
) -> None:
    plan, room = planned(costs, threads, memory, disk), budgets(costs, memory, disk)
    assert min(shares(plan)) >= 0
    assert plan.kept <= 1 + 1e-12
    assert plan.decoded <= costs.decodable + 1e-8
    for place, nbytes in (("memory", room["memory_bytes"]), ("disk", room["disk_bytes"])):
        encoded, decoded = getattr(plan, f"{place}_encoded"), getattr(plan, f"{place}_decoded")
        used = SAMPLES * (encoded * costs.encoded_bytes + decoded * costs.decoded_bytes)
        assert used <= nbytes + 1e-8 * SAMPLES * (costs.encoded_bytes + costs.decoded_bytes)
    plain = minio(costs, samples=SAMPLES, **room)
    assert seconds_per_sample(costs, plan, threads) <= seconds_per_sample(costs, plain, threads) * (1 + 1e-6)


@settings(max_examples=150, deadline=None)
@given(COSTS, THREADS, ROOM, ROOM, spread(1, 100), spread(1, 100))
def test_more_room_is_never_slower(
    costs: SampleCosts, threads: int, memory: float, disk: float, more_memory: float, more_disk: float
) -> None:
    less = planned(costs, threads, memory, disk)
    assume((memory >= 1) == (memory * more_memory >= 1))  # from 1 on, all samples must be cached
    more = planned(costs, threads, memory * more_memory, disk * more_disk)
    assert seconds_per_sample(costs, more, threads) <= seconds_per_sample(costs, less, threads) * (1 + 1e-6)


STEPS = np.linspace(0, 1, 9)
GRID = np.array([point for point in product(STEPS, repeat=4) if sum(point) <= 1])
"""Shares in the order of `shares`: all combinations in eighths with a sum of at most 1."""


@settings(max_examples=60, deadline=None)
@given(COSTS, THREADS, ROOM, ROOM)
def test_no_shares_that_fit_are_better(costs: SampleCosts, threads: int, memory: float, disk: float) -> None:
    """Decoded samples on disk only if the plan may have them, and none at all if they are not worthwhile."""
    plan, room = planned(costs, threads, memory, disk), budgets(costs, memory, disk)
    sizes = np.array([costs.encoded_bytes, costs.decoded_bytes])
    fits = GRID[:, :2] @ sizes * SAMPLES <= room["memory_bytes"]
    fits &= GRID[:, 2:] @ sizes * SAMPLES <= room["disk_bytes"]
    fits &= GRID[:, 1] + GRID[:, 3] <= costs.decodable
    if memory >= 1:
        fits &= GRID.sum(axis=1) == 1
    has_none = any(said.startswith("no decoded") for said in plan.told)
    if has_none:
        fits &= GRID[:, 1] == 0
    disk_bytes_per_s = costs.disk_bytes_per_s or 1.0
    if has_none or costs.decoded_bytes / disk_bytes_per_s >= (costs.encoded_s - costs.decoded_s) / threads:
        fits &= GRID[:, 3] == 0
    names = ("memory_encoded", "memory_decoded", "disk_encoded", "disk_decoded")
    for point in GRID[fits]:
        other = FormPlan(**dict(zip(names, point.tolist(), strict=True)))
        others_s, plans_s = seconds_per_sample(costs, other, threads), seconds_per_sample(costs, plan, threads)
        assert plans_s <= others_s * (1 + 1e-6)
        if others_s <= plans_s * (1 + 1e-9):
            assert used_s(costs, plan) <= used_s(costs, other) + 1e-6 * (costs.encoded_s + costs.storage_s)


def used_s(costs: SampleCosts, plan: FormPlan) -> float:
    """CPU and storage seconds per sample."""
    cpu_s = costs.encoded_s * (costs.decodable - plan.decoded) + costs.decoded_s * plan.decoded
    return cpu_s + costs.storage_s * (1 - plan.kept)
