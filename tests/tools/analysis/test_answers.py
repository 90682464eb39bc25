"""Smallest cache, fewest cores, cheapest machines, bottleneck and advice match hand calculations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from stated_rates import about, any_rates, any_setup, line, round_rates

from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.pace import bottleneck, curve, fewest_prep_cores, predict, smallest_cache
from mbaas.model.quantity import Quantity, stated
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import MachineType, Offer, offers, recommend

NO_CPU = stated(0, unit="CPU-s")


def test_the_smallest_cache() -> None:
    """0.1 x + 4 (1 - x) = 1.25 ms at x = 2.75 / 3.9 = 70.5128 %: 70,512,821 of 100,000,000 bytes.

    2 nodes: prep takes 0.625 ms, the step 1 ms, both memories 0.05 ms. 4 - 3.95 x = 1 at x = 3 / 3.95, half on each
    node.
    """
    found = smallest_cache(round_rates(), Setup())
    assert (found.amount, found.low, found.high) == (70_512_821, 70_512_821, 70_512_821)
    assert found.reason == "a cache of 70.5 MB, 71 % of the bytes read there, ends fetch stalls; it is 0 B now"
    assert smallest_cache(round_rates(), Setup(nodes=2)).amount == 37_974_684
    private = smallest_cache(round_rates(), Setup(trials=4, sharing=False))
    assert private.amount == 282_051_283  # 4 copies of 70,512,820.5 bytes, rounded up once


def test_the_smallest_cache_with_an_interval() -> None:
    """Storage gives 200 to 400 samples/s: 2.5 - 2.4 x = 1.25 and 5 - 4.9 x = 1.25, so 52.08 and 76.53 MB."""
    storage = MeasuredCurve(((1, Quantity(250, low=200, high=400, unit="samples/s")),))
    found = smallest_cache(round_rates(storage=storage), Setup())
    assert (found.low, found.amount, found.high) == (52_083_334, 70_512_821, 76_530_613)


def test_no_cache_is_needed_or_none_suffices() -> None:
    """Storage at 1,000 samples/s is faster than prep at 800. Memory at 50 MB/s delivers only 500 samples/s."""
    enough = smallest_cache(round_rates(storage=line((1, 1000))), Setup())
    assert (enough.amount, enough.reason) == (0, "fetch does not set the pace, even without a cache")
    slow = smallest_cache(round_rates(cache=about(50e6, unit="bytes/s")), Setup())
    assert slow.amount is None
    assert slow.reason == "fetch sets the pace even if all 100 MB that are read are cached"


@settings(max_examples=30, deadline=None)
@given(any_rates(), any_setup())
def test_the_smallest_cache_is_the_smallest(rates: Rates, setup: Setup) -> None:
    """Holds for encoded samples: decoded ones change the time that fetching may take."""
    rates, setup = replace(rates, overlap=1.0), replace(setup, decoded=False)
    amount = smallest_cache(rates, setup).amount
    if amount is None:
        return
    assert predict(rates, replace(setup, cache_bytes=amount)).steady.fetch_stall_s.value == 0
    if amount:
        assert predict(rates, replace(setup, cache_bytes=amount - 1)).steady.fetch_stall_s.value > 0


def test_the_fewest_prep_cores() -> None:
    """1,000 samples/s at 200 a core need 5 cores, 950 to 1,050 need 5 to 6. Two other cores do not change that."""
    found = fewest_prep_cores(round_rates(step=about(1000, 0.05)), Setup())
    assert (found.amount, found.low, found.high) == (5, 5, 6)
    assert found.reason == "5 prep cores on each node end prep stalls; it has 4 now"
    beside = fewest_prep_cores(round_rates(), Setup(prep_workers=2))
    assert beside.reason == "5 prep cores on each node beside 2 other cores end prep stalls; it has 2 now"


def test_cores_that_steps_need_too() -> None:
    """Steps of 2 CPU-ms and prep of 5 at 500 samples/s: 7 / 2 = 3.5 cores, so 4."""
    rates = round_rates(step=about(500), step_cpu_s=stated(2e-3, unit="CPU-s"))
    assert fewest_prep_cores(rates, Setup()).amount == 4


def test_no_number_of_prep_cores_suffices() -> None:
    """Half of 150 kB at 50 MB/s takes 1.5 ms, more than the step."""
    found = fewest_prep_cores(round_rates(), Setup(nodes=2, network_bytes_per_s=50e6), most=64)
    assert (found.amount, found.reason) == (None, "not even 64 prep cores on each node end prep stalls")


@settings(max_examples=20, deadline=None)
@given(any_rates())
def test_the_fewest_prep_cores_are_the_fewest(rates: Rates) -> None:
    rates = replace(rates, overlap=1.0, cores=2)
    amount = fewest_prep_cores(rates, Setup(prep_workers=1), most=512).amount
    if amount is None:
        return
    stalls = [
        predict(rates, Setup(prep_workers=n, cores=1 + n)).steady.prep_stall_s.value for n in (amount, amount - 1) if n
    ]
    assert stalls[0] <= 1e-8 * rates.samples
    assert all(stall > 0 for stall in stalls[1:])


def test_the_bottleneck() -> None:
    """Storage takes 4 ms, then prep 1.25 ms: 3.2 times as fast."""
    found = bottleneck(round_rates(), Setup())
    assert (found.resource, found.certain, found.next) == ("storage", True, "prep")
    assert found.gain == pytest.approx(3.2)
    assert found.sentence == (
        "storage sets the pace; without that limit training would be 3.2 times as fast, and prep (decoding and "
        "transforming) would set it"
    )
    unsure = bottleneck(round_rates(storage=line((1, 790), spread=0.1)), Setup())
    assert not unsure.certain
    assert (
        "storage sets the pace (or, within the measured interval, prep (decoding and transforming))" in unsure.sentence
    )


def test_curves() -> None:
    """Storage twice and four times as fast takes 2 ms, then prep limits at 1.25 ms."""
    found = curve(round_rates(), Setup(), "storage_factor", [1, 2, 4])
    assert [(x, p.steady.epoch_s.value) for x, p in found.points] == [
        (1, pytest.approx(4.0)),
        (2, pytest.approx(2.0)),
        (4, pytest.approx(1.25)),
    ]
    with pytest.raises(ConfigError, match=r"parameter must be one of cache_bytes, .*, got 'sharing'"):
        curve(round_rates(), Setup(), "sharing", [1])


SMALL = MachineType(name="small", price_per_h=1.0, cores=4, cache_bytes=40e6, most=3)
LARGE = MachineType(name="large", price_per_h=4.0, cores=16, cache_bytes=100e6)


def test_the_cheapest_machines() -> None:
    """101 epochs, the first one 4 s.

    One small machine: 0.4 x 0.1 + 0.6 x 4 = 2.44 ms, so 248 s for 248 / 3600.
    Two: x = 0.8 gives 0.04 + 0.8 = 0.84 ms, less than the step's 1 ms, so 104 s for 2 x 104 / 3600 = 208 / 3600.
    Three: also 104 s, for 312 / 3600. One large machine: 104 s for 416 / 3600.
    """
    found = offers(round_rates(), Setup(), [LARGE, SMALL], epochs=101)
    assert [(o.machine, o.nodes, round(o.job_s.value), round(o.cost.value * 3600)) for o in found] == [
        ("small", 2, 104, 208),
        ("small", 1, 248, 248),
        ("small", 3, 104, 312),
        ("large", 1, 104, 416),
    ]
    assert [o.limit for o in found] == ["step", "storage", "step", "step"]


def test_what_machines_cost_if_each_trial_loads_for_itself() -> None:
    """Four trials.

    Shared, the first epoch takes 4 s, then 1,000 epochs take 1 s each, limited by the step. Without sharing the first
    takes 16 s, and 16 cores prepare 4 x 5 ms in 1.25 ms.
    """
    (offer,) = offers(round_rates(), Setup(trials=4), [replace(LARGE, cache_bytes=1e9)], epochs=1001)
    assert offer.cost.value * 3600 / 4 == pytest.approx(4 + 1000)
    assert offer.alone_cost.value * 3600 / 4 == pytest.approx(16 + 1250)


def test_the_cheapest_that_is_in_time() -> None:
    """One small machine is the cheapest, but takes 248 s."""
    cheap = replace(SMALL, price_per_h=1.0, most=1)

    def cheapest(deadline_s: float) -> Offer:
        return offers(round_rates(), Setup(), [LARGE, cheap], epochs=101, deadline_s=deadline_s)[0]

    assert cheapest(math.inf).machine == "small"
    assert cheapest(200).machine == "large"
    assert (cheapest(50).machine, cheapest(50).in_time) == ("small", False)
    with pytest.raises(ConfigError, match=r"at least 1 machine, got 0"):
        offers(round_rates(), Setup(), [], epochs=1)


def test_the_recommended_change_comes_first() -> None:
    """Not sharing takes 4 times as long, and a cache alone gains 16 / 5 = 3.2 times.

    Faster storage gains 2 times, but has to be bought. A second node would read the same storage.
    """
    found = recommend(round_rates(), Setup(trials=4, sharing=False))
    assert [(c.kind, round(c.speedup.value, 2)) for c in found] == [
        ("setting", 4.0),
        ("setting", 3.2),
        ("purchase", 2.0),
    ]
    assert (
        found[0].advice == "let all 4 trials share one feed, so that each sample is fetched and prepared once for all"
    )
    assert found[0].setup.sharing


def test_a_cache_that_there_is_no_memory_for_has_to_be_bought() -> None:
    """10 MB: 0.1 x 0.1 + 0.9 x 4 = 3.61 ms, 1.108 times as fast. The rest up to 70.5 MB makes it 3.2 times."""
    settings, bought = (
        next(c for c in recommend(round_rates(), Setup(), memory_bytes=10e6) if c.kind == kind)
        for kind in ("setting", "purchase")
    )
    assert settings.advice == "give the cache 10 MB"
    assert settings.speedup.value == pytest.approx(4 / 3.61)
    assert bought.advice == "give the cache 70.5 MB, more memory than there is"
    assert bought.speedup.value == pytest.approx(3.2, rel=1e-6)


def test_fewer_workers_where_more_are_slower() -> None:
    """600 samples/s from 2 workers, 300 from 4: 2 of the 4 cores are twice as fast."""
    rates = round_rates(prep=line((1, 300), (2, 600), (3, 450), (4, 300)), prep_cpu_s=NO_CPU, storage=line((1, 1e6)))
    best = recommend(rates, Setup())[0]
    assert (best.kind, best.advice) == ("setting", "use 2 prep workers instead of 4")
    assert best.speedup.value == pytest.approx(2.0, rel=0.02)


def test_nothing_is_recommended_that_brings_nothing() -> None:
    rates = round_rates(storage=line((1, 1e6)), prep=line((1, 1e4)))
    assert [c.advice for c in recommend(rates, Setup())] == ["use accelerators that are twice as fast"]
