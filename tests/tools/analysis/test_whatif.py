"""Predictions match hand calculations and simulations, and invariants hold for any rates."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stated_rates import about, any_rates, any_setup, decodable_rates, line, round_rates

from mbaas.errors import ConfigError
from mbaas.model.balance import travelling_share
from mbaas.model.curves import MeasuredCurve
from mbaas.model.pace import Epoch, predict
from mbaas.model.quantity import Quantity, stated
from mbaas.model.rates import Rates, Setup, step_overhead
from mbaas.model.supply import read_shares

CLOSE = 1 + 1e-9


def split(epoch: Epoch) -> list[float]:
    """Return the seconds of compute, prep stall and fetch stall."""
    return [epoch.compute_s.value, epoch.prep_stall_s.value, epoch.fetch_stall_s.value]


def steady(rates: Rates | None = None, **changes: Any) -> Epoch:
    return predict(round_rates() if rates is None else rates, Setup(**changes)).steady


def test_nothing_cached() -> None:
    """Per sample: step 1 ms, prep 5 / 4 = 1.25 ms, storage 4 ms. 1,000 samples: 1 + 0.25 + 2.75 = 4 s."""
    epoch = steady()
    assert split(epoch) == pytest.approx([1.0, 0.25, 2.75])
    assert epoch.epoch_s.value == pytest.approx(4.0)
    assert epoch.trial_per_s.value == pytest.approx(250)
    assert (epoch.limit, epoch.prep_stall, epoch.fetch_stall) == (
        "storage",
        pytest.approx(1 / 16),
        pytest.approx(11 / 16),
    )
    assert {name: rate.value for name, rate in epoch.bounds.items()} == pytest.approx(
        {"step": 1000, "prep": 800, "cores": 800, "fetch": 250}
    )


def test_half_cached() -> None:
    """50 of 100 MB: 0.5 x 0.1 ms + 0.5 x 4 ms = 2.05 ms. The cache does not help the first epoch."""
    found = predict(round_rates(), Setup(cache_bytes=50e6))
    assert split(found.steady) == pytest.approx([1.0, 0.25, 0.8])
    assert split(found.first) == pytest.approx([1.0, 0.25, 2.75])
    assert found.run_s(11).value == pytest.approx(4.0 + 10 * 2.05)


def test_disk_takes_what_memory_has_no_room_for() -> None:
    """30 MB in memory, 50 MB on a disk of 200 MB/s: 0.3 x 0.1 + 0.5 x 0.5 + 0.2 x 4 = 1.08 ms, less than prep."""
    epoch = steady(round_rates(disk=about(200e6, unit="bytes/s")), cache_bytes=30e6, disk_bytes=50e6)
    assert split(epoch) == pytest.approx([1.0, 0.25, 0.0])
    assert epoch.bounds["fetch"].value == pytest.approx(1 / 0.00108)
    with pytest.raises(ConfigError, match=r"disk_bytes of 50 MB needs the rate of the disk"):
        predict(round_rates(), Setup(disk_bytes=50e6))


def test_trials_that_do_not_share_pay_for_themselves() -> None:
    """4 trials: prep 4 x 1.25 = 5 ms, storage 4 x 4 = 16 ms, or 4 (0.025 + 3) = 12.1 ms with 25 of 100 MB cached."""
    assert split(steady(trials=4, sharing=False)) == pytest.approx([1.0, 4.0, 11.0])
    assert split(steady(trials=4, sharing=False, cache_bytes=100e6)) == pytest.approx([1.0, 4.0, 7.1])
    assert split(steady(trials=4, cache_bytes=100e6)) == pytest.approx([1.0, 0.25, 0.0])


def test_the_total_of_trials_that_share() -> None:
    """4 trials at 250 samples/s each."""
    assert predict(round_rates(), Setup(trials=4)).steady.total_per_s.value == pytest.approx(1000)


def test_nodes_add_up_and_pixels_travel() -> None:
    """With 2 nodes, prep takes 0.625 ms, cached reads 0.05 ms, the step 1 ms.

    Half of 150 kB takes 0.75 ms over 100 MB/s, and 1.5 ms over 50 MB/s, 0.5 ms more than the step. Storage takes 4 ms
    if both nodes share it. If each has one, it takes 2 ms for an even share, and the fuller node needs 1.0264 of that.
    """
    cached = {"nodes": 2, "cache_bytes": 50e6}
    assert split(steady(network_bytes_per_s=100e6, **cached)) == pytest.approx([1.0, 0.0, 0.0])
    slow = steady(network_bytes_per_s=50e6, **cached)
    assert (split(slow), slow.limit) == (pytest.approx([1.0, 0.5, 0.0]), "network")
    assert slow.bounds["fetch"].value == pytest.approx(20_000)
    assert steady(nodes=2).epoch_s.value == pytest.approx(4.0)
    assert steady(nodes=2, storage_shared=False).epoch_s.value == pytest.approx(2 * 1.0264, abs=1e-3)
    assert steady(nodes=2, trials=3, sharing=False, network_bytes_per_s=1).bounds["prep"].value == pytest.approx(400)


def test_the_fullest_home_reads_the_most_from_a_storage_of_its_own() -> None:
    """4 nodes, 1,000 samples: a node has up to 1.049 x sqrt(4 / 1,000) = 0.0663 of its share in excess.

    With half of the samples cached, it reads 0.5663 of its share, with 99 % cached at most all that are left.
    """
    four = {"nodes": 4, "storage_shared": False}
    half, most = (steady(**four, cache_bytes=share * 25e6).bounds["fetch"].value for share in (0.5, 0.99))
    assert 4e3 / half == pytest.approx(0.5 * 0.1 + 0.5663 * 4, abs=1e-3)
    assert 4e3 / most == pytest.approx(0.99 * 0.1 + 0.04 * 4)
    assert "storage" not in steady(**four, cache_bytes=25e6).limits


def test_trials_with_several_pipelines_share_what_is_fetched() -> None:
    """4 trials with 2 pipelines and minibatches of 8 of 1,000 samples: prep 2 x 1.25 ms, storage 4 ms.

    Copies take 1.25 x 3 x 8 / 1,000 = 0.03 of the samples. With half of them cached, 0.5 / 0.97 are read. On 2 nodes
    with 2 trials each, half of each pipeline's 150 kB travels to each node.
    """
    rates = round_rates(batch_size=8)
    shared = {"trials": 4, "pipelines": 2}
    assert steady(rates, **shared, cache_bytes=100e6).epoch_s.value == pytest.approx(2.5)
    half = steady(rates, **shared, cache_bytes=50e6)
    assert half.bounds["fetch"].value == pytest.approx(1e3 / (0.5 * 0.1 + 0.5 / 0.97 * 4))
    wide = steady(rates, **shared, nodes=2, cache_bytes=50e6, network_bytes_per_s=100e6)
    assert wide.bounds["network"].value == pytest.approx(1e3 / 1.5)


def test_pipelines_read_alone_where_the_cache_has_no_room_for_copies() -> None:
    """1.25 x 3 x 64 / 1,000 = 0.24 of the samples; 2 x 4 ms without a cache. An empty cache has room for all copies."""
    found = predict(round_rates(), Setup(trials=4, pipelines=2))
    assert (found.first.epoch_s.value, found.steady.epoch_s.value) == pytest.approx((4.0, 8.0))
    cached = steady(trials=4, pipelines=2, cache_bytes=23e6).bounds["fetch"].value
    assert cached == pytest.approx(1e3 / (0.23 * 0.1 + 2 * 0.77 * 4))


def test_more_pipelines_than_trials_are_one_for_each() -> None:
    assert steady(trials=3, pipelines=8) == steady(trials=3, pipelines=3)
    assert steady(trials=3, pipelines=8, sharing=False) == steady(trials=3, sharing=False)


def test_data_parallel_trials_take_the_samples_of_their_node() -> None:
    """2 nodes, minibatches of 64: 0.0497 of a minibatch travels, half to each node. 3.73 kB take 3.73 ms at 1 MB/s.

    4 trials, each with a rank on both nodes, take half of their samples on each: 4 / 2 (0.05 + 1) ms of a node's 2
    cores, with 5.1 / 2 ms of prep. On 2 accelerators 4 ranks take turns: 4 / (2 x 1,000).
    """
    wide = steady(nodes=2, data_parallel=True, cache_bytes=50e6, network_bytes_per_s=1e6)
    share = travelling_share(2, local_batch=32, locality=True)
    assert (wide.limit, wide.epoch_s.value) == ("network", pytest.approx(share / 2 * 150))
    assert share / 2 * 150 == pytest.approx(3.73, abs=0.01)
    costs = {"step_cpu_s": 1e-3, "staging_cpu_s": 1e-4, "delivery_cpu_s": 5e-5}
    rates = round_rates(
        cores=2,
        prep=line((1, 200), (2, 400)),
        storage=line((1, 1e6)),
        **{name: stated(cost, unit="CPU-s") for name, cost in costs.items()},
    )
    four = steady(rates, nodes=2, trials=4, accelerators=2, data_parallel=True)
    assert four.bounds["cores"].value == pytest.approx(1e3 / ((5.1 / 2 + 4 / 2 * 1.05) / 2))
    assert four.bounds["accelerators"].value == pytest.approx(500)


def test_data_parallel_trials_that_do_not_share_cache_what_they_read() -> None:
    """2 trials on 2 nodes: each node reads and prepares half of both trials' samples, and caches them for each rank.

    Prep takes 2 / 2 x 1.25 ms. A rank's 50 of 100 MB hold half of its reads: 0.5 x 0.1 + 2 x 0.5 x 4 ms.
    """
    alone = steady(nodes=2, trials=2, sharing=False, data_parallel=True, cache_bytes=100e6, network_bytes_per_s=1)
    assert alone.bounds["prep"].value == pytest.approx(800)
    assert alone.bounds["fetch"].value == pytest.approx(1e3 / (0.05 + 4))
    assert "network" not in alone.bounds


def test_readers_of_all_nodes_share_a_storage() -> None:
    """1, 2 and 4 readers get 100, 200 and 400 samples/s: 2 nodes with 2 each get 400, and with 4 each no more."""
    rates = round_rates(storage=line((1, 100), (2, 200), (4, 400)))
    found = [steady(rates, nodes=n, readers=r).bounds["fetch"].value for n, r in ((1, 2), (2, 2), (2, 4))]
    assert found == pytest.approx([200, 400, 400])


def test_steps_and_prep_share_cores() -> None:
    """2 cores; prep takes 5 ms, staging 0.1 ms; 4 trials take 0.05 ms of delivery and 1 ms of step each.

    (5.1 + 4 x 1.05) / 2 = 4.65 ms. On synthetic data the steps alone need 4 x 1 / 2 = 2 ms.
    """
    costs = {"step_cpu_s": 1e-3, "staging_cpu_s": 1e-4, "delivery_cpu_s": 5e-5}
    rates = round_rates(
        cores=2,
        prep=line((1, 200), (2, 400)),
        storage=line((1, 1e6)),
        **{name: stated(cost, unit="CPU-s") for name, cost in costs.items()},
    )
    epoch = steady(rates, trials=4)
    assert (split(epoch), epoch.limit) == (pytest.approx([2.0, 2.65, 0.0]), "cores")
    assert steady(rates, trials=4, sharing=False).epoch_s.value == pytest.approx(4 * 6.15 / 2)
    assert steady(rates, trials=4, cores=8).epoch_s.value == pytest.approx(9.3 / 8)


def test_what_runs_all_the_time_leaves_less_of_the_cores() -> None:
    """As above with 0.5 of 2 cores busy: 9.3 / 1.5 ms; with 8 cores 9.3 / 7.5. At least half of the cores remain.

    At half the pace the background load takes 1 of 2 cores, and all other work twice as long: 18.6 ms.
    """
    costs = {"step_cpu_s": 1e-3, "staging_cpu_s": 1e-4, "delivery_cpu_s": 5e-5}
    rates = round_rates(
        cores=2,
        prep=line((1, 200), (2, 400)),
        storage=line((1, 1e6)),
        background_cores=about(0.5, 0.2, "cores"),
        **{name: stated(cost, unit="CPU-s") for name, cost in costs.items()},
    )
    assert steady(rates, trials=4).epoch_s.value == pytest.approx(9.3 / 1.5)
    assert steady(rates, trials=4).epoch_s.high == pytest.approx(9.3 / 1.4)
    assert steady(rates, trials=4, cores=8).epoch_s.value == pytest.approx(9.3 / 7.5)
    assert steady(rates, trials=4, cores=1, prep_workers=2).epoch_s.value == pytest.approx(9.3 / 0.5)
    assert steady(rates.at_pace(0.5), trials=4).epoch_s.value == pytest.approx(18.6)
    with pytest.raises(ConfigError, match=r"background_cores must be 0 or more, got -0.1"):
        replace(rates, background_cores=about(-0.1, 0.0, "cores"))


def test_trials_on_fewer_accelerators_take_turns() -> None:
    """4 trials on 2 accelerators take 4 / (2 x 1,000) = 2 ms, or 1 ms if these are twice as fast."""
    rates = round_rates(storage=line((1, 1e6)))
    epoch = steady(rates, trials=4, accelerators=2)
    assert (split(epoch), epoch.limit) == (pytest.approx([2.0, 0.0, 0.0]), "accelerators")
    assert steady(rates, trials=4, accelerators=2, accelerator_factor=2).compute_s.value == pytest.approx(1.0)


def test_imperfect_overlap() -> None:
    """Parts of 1, 1.25 and 4 ms, overlapped to 80 %.

    1 ms; 0.8 x 1.25 + 0.2 x 2.25 = 1.45 ms; 0.8 x 4 + 0.2 x 6.25 = 4.45 ms.
    """
    assert split(steady(round_rates(overlap=0.8))) == pytest.approx([1.0, 0.45, 3.0])
    assert steady(round_rates(overlap=0.0)).epoch_s.value == pytest.approx(6.25)


def test_reading_takes_cores_too() -> None:
    """2 cores; prep takes 5 ms of CPU, a read 3 ms.

    With nothing cached, samples take (5 + 3) / 2 = 4 ms, with half cached (5 + 1.5) / 2. Storage alone needs 0.5 ms.
    With all cached the cores need 2.5 ms, like prep.
    """
    rates = round_rates(
        cores=2,
        prep=line((1, 200), (2, 400)),
        storage=line((1, 2000)),
        read_cpu_s=stated(0.003, unit="CPU-s"),
    )
    found = [steady(rates, cache_bytes=cached) for cached in (0, 50e6, 100e6)]
    assert [split(epoch) for epoch in found] == [
        pytest.approx([1.0, 1.5, 1.5]),
        pytest.approx([1.0, 1.5, 0.75]),
        pytest.approx([1.0, 1.5, 0.0]),
    ]
    assert [epoch.limit for epoch in found] == ["cores", "cores", "prep"]


def test_samples_that_are_kept_decoded_are_prepared_faster() -> None:
    """300 MB hold all 1,000 samples, half decoded: 100 + 400 x = 300.

    Prep takes 0.5 x 5 / 4 + 0.5 x 0.5 / 4 = 0.6875 ms, and the 4 cores take the same. 50 MB hold a tenth decoded:
    0.9 x 1.25 + 0.1 x 0.125 ms. The first epoch finds nothing cached. With `decoded=False` any cache gives the same
    speed.
    """
    rates = decodable_rates()
    for cache_bytes, epoch_s in ((0, 1.25), (50e6, 1.1375), (300e6, 0.6875), (500e6, 0.125), (900e6, 0.125)):
        found = predict(rates, Setup(cache_bytes=cache_bytes))
        assert found.steady.epoch_s.value == pytest.approx(epoch_s)
        assert found.first.epoch_s.value == pytest.approx(1.25)
        assert steady(rates, cache_bytes=cache_bytes, decoded=False).epoch_s.value == pytest.approx(1.25)
    half = steady(rates, cache_bytes=300e6)
    assert (half.reads.memory, half.reads.decoded_memory) == pytest.approx((1, 0.5))
    assert half.bounds["cores"].value == half.bounds["prep"].value == pytest.approx(1 / 0.0006875)
    # prep reads decoded samples in place, and their P includes that time
    assert half.bounds["fetch"].value == pytest.approx(1 / (0.5 * 0.0001))
    assert "fetch" not in steady(rates, cache_bytes=500e6).bounds


def test_serving_and_cores_count_for_decoded_samples_too() -> None:
    """Serving: (0.5 + 0.5) / 4 ms. A decoded sample takes 1 ms of CPU, and 0.2 ms of staging: 1.2 / 4 ms."""
    costs = {"serving_s": stated(5e-4, unit="s"), "decoded_cpu_s": stated(1e-3, unit="CPU-s")}
    rates = decodable_rates(staging_cpu_s=stated(2e-4, unit="CPU-s"), **costs)
    found = steady(rates, cache_bytes=500e6).bounds
    assert (found["prep"].value, found["cores"].value) == pytest.approx((1 / 0.25e-3, 1 / 0.3e-3))


def test_nodes_keep_decoded_samples_of_their_own_and_private_caches_are_divided() -> None:
    """2 nodes of 150 MB hold half of the samples decoded, like one node of 300 MB, and are twice as fast.

    2 trials that do not share have 200 MB each, which hold a quarter decoded. Each trial takes
    0.75 x 1.25 + 0.25 x 0.125 ms, so both take twice that.
    """
    rates = decodable_rates()
    assert steady(rates, nodes=2, cache_bytes=150e6).epoch_s.value == pytest.approx(0.6875 / 2)
    alone = steady(rates, trials=2, sharing=False, cache_bytes=400e6)
    assert alone.reads.decoded == pytest.approx(0.25)
    assert alone.epoch_s.value == pytest.approx(2 * (0.75 * 1.25 + 0.25 * 0.125))


def test_a_fast_disk_keeps_decoded_samples_and_a_slow_one_does_not() -> None:
    """500 kB take 0.1 ms at 5 GB/s, less than decoding (1.125 ms) and prep (0.125 ms); at 100 MB/s they take 5 ms.

    Reading a sample takes 1 ms of CPU, and a decoded one is five times as large: (0.5 + 5) / 4 ms.
    """
    room = {"disk_bytes": 500e6}
    fast = steady(decodable_rates(disk=about(5e9, unit="bytes/s")), **room)
    assert (fast.reads.disk, fast.reads.decoded_disk) == pytest.approx((1, 1))
    assert (fast.epoch_s.value, fast.bounds["fetch"].value) == (pytest.approx(0.125), pytest.approx(1e4))
    busy = decodable_rates(disk=about(5e9, unit="bytes/s"), read_cpu_s=stated(1e-3, unit="CPU-s"))
    assert steady(busy, **room).epoch_s.value == pytest.approx(5.5 / 4)
    slow = steady(decodable_rates(disk=about(100e6, unit="bytes/s"), storage=line((1, 500))), **room)
    assert (slow.reads.disk, slow.reads.decoded_disk) == (pytest.approx(1), 0)


def test_decoded_rates_are_saved_and_both_or_none_are_given() -> None:
    rates = decodable_rates(decoded_cpu_s=stated(1e-3, unit="CPU-s"))
    assert Rates.from_json(json.loads(json.dumps(rates.to_json()))) == rates
    with pytest.raises(ConfigError, match="decoded_bytes and decoded_prep must both be given, or neither"):
        decodable_rates(decoded_prep=None)
    with pytest.raises(ConfigError, match="decoded_bytes must be above 0 and finite, got 0"):
        decodable_rates(decoded_bytes=0)


def test_a_worker_of_a_feed_also_hands_on_what_it_made() -> None:
    """A sample takes 5 ms alone and 0.5 ms more in a feed. All samples are in memory, and cores are free.

    1 worker takes 5.5 ms, 2 workers 2.5 + 0.25, 4 workers 1.25 + 0.125. 8 workers on 8 cores take half as long as 4,
    like 2 nodes of 4 workers. 4 trials that do not share take 4 x 1.375.
    """
    serving = Quantity(0.0005, low=0.0003, high=0.0007, unit="s")
    rates = round_rates(serving_s=serving, prep_cpu_s=stated(0, unit="CPU-s"), storage=line((1, 1e6)))

    def prep_s(**changes: Any) -> float:
        return 1 / steady(rates, **changes).bounds["prep"].value

    assert [prep_s(prep_workers=n) for n in (1, 2, 4)] == pytest.approx([0.0055, 0.00275, 0.001375])
    assert [prep_s(cores=8), prep_s(nodes=2)] == pytest.approx([0.0006875] * 2)
    assert prep_s(trials=4, sharing=False) == pytest.approx(0.0055)
    assert [1 / rate.value for _, rate in rates.served(rates.prep).points] == pytest.approx([0.0055, 0.00275, 0.001375])
    slow, fast = (getattr(rates.feed_quantity(1), end) for end in ("low", "high"))
    assert (1 / slow, 1 / fast) == pytest.approx((0.0057, 0.0053))


def test_rates_that_were_saved_before_serving_was_measured() -> None:
    plain = {name: value for name, value in round_rates().to_json().items() if name != "serving_s"}
    assert Rates.from_json(plain) == round_rates()


def test_more_cores_are_like_those_measured() -> None:
    """Saturated at 500 samples/s from 2 workers on, with 4 cores. 8 cores give 1,000 from 4 workers on."""
    rates = round_rates(prep=line((1, 250), (2, 500), (3, 500), (4, 500)), prep_cpu_s=stated(0, unit="CPU-s"))
    found = [steady(rates, cores=8, prep_workers=n).bounds["prep"].value for n in (1, 2, 4, 8)]
    assert found == pytest.approx([250, 500, 1000, 1000], rel=1e-3)


def test_batch_size() -> None:
    """64 samples take 64 ms, including a fixed 16 ms: 0.75 + 16 / b ms a sample, so 1.75 ms at 16 and 0.875 at 128."""
    rates = round_rates(storage=line((1, 1e6)), prep=line((1, 1e6)), step_overhead_s=stated(0.016, unit="s"))
    assert [steady(rates, batch_size=b).epoch_s.value for b in (16, 64, 128)] == pytest.approx([1.75, 1.0, 0.875])


def test_the_overhead_of_a_step_from_two_batch_sizes() -> None:
    """0.75 ms a sample plus 16 ms: 28 ms for 16, 64 ms for 64. At 70.4 ms: 28 - 16 (70.4 - 28) / 48 = 13.87 ms."""
    exact = [(16, about(16 / 0.028)), (64, about(64 / 0.064))]
    assert step_overhead(exact).value == pytest.approx(0.016)
    slower = Quantity(1000, low=1000 / 1.1, high=1000, unit="samples/s")
    found = step_overhead([exact[0], (64, slower)])
    assert (found.low, found.high) == (pytest.approx(0.0138667, rel=1e-4), pytest.approx(0.016))
    with pytest.raises(ConfigError, match=r"2 batch sizes at least, got \[64\]"):
        step_overhead([exact[1], exact[1]])


def test_intervals_reach_from_the_slow_to_the_fast_end() -> None:
    """Storage 200 to 300 samples/s, prep 800 +- 10 %, exact step.

    An epoch takes 1/0.3 to 5 s, prep stall 1/0.88 - 1 to 1/0.72 - 1 s. Fetch stall ranges from fast storage with slow
    prep to slow storage with fast prep.
    """
    storage = MeasuredCurve(((1, Quantity(250, low=200, high=300, unit="samples/s")),))
    prep = line((1, 200), (2, 400), (4, 800), spread=0.1)
    epoch = steady(round_rates(storage=storage, prep=prep))
    assert (epoch.epoch_s.low, epoch.epoch_s.high) == (pytest.approx(10 / 3), pytest.approx(5))
    assert (epoch.prep_stall_s.low, epoch.prep_stall_s.high) == (
        pytest.approx(0.13636, rel=1e-3),
        pytest.approx(0.38889, rel=1e-3),
    )
    assert (epoch.fetch_stall_s.low, epoch.fetch_stall_s.high) == (
        pytest.approx(10 / 3 - 1.38889),
        pytest.approx(5 - 1.13636),
    )


def test_limits_at_both_ends() -> None:
    """Storage gives 600 to 1,000 around 790, prep 800: storage sets the pace, except at its best."""
    storage = MeasuredCurve(((1, Quantity(790, low=600, high=1000, unit="samples/s")),))
    assert steady(round_rates(storage=storage)).limits == ("storage", "prep")


def test_the_page_cache_is_shared_by_trials_that_read_the_same_files() -> None:
    """All files fit. In the first epoch 4 trials read each sample once; later epochs read nothing."""
    setup = Setup(trials=4, sharing=False, dram_bytes=100e6)
    assert read_shares(round_rates(), setup, steady=False).storage == pytest.approx(1 / 4)
    assert read_shares(round_rates(), setup, steady=True).storage == 0


@pytest.mark.parametrize(("trials", "first", "steady"), [(1, 0.0, 0.2227), (4, 0.3334, 0.3891)])
def test_a_page_cache_of_half_of_the_dataset(trials: int, first: float, steady: float) -> None:
    """x = 1/2: 0.5 - 1.6 / (T + 1) 0.5 ln 2. In the first epoch, less 0.2227 / T: first reads find nothing."""
    setup = Setup(trials=trials, sharing=False, dram_bytes=50e6)
    assert read_shares(round_rates(), setup, steady=False).memory == pytest.approx(first, abs=1e-4)
    assert read_shares(round_rates(), setup, steady=True).memory == pytest.approx(steady, abs=1e-4)


def test_guesses_are_noted() -> None:
    assert predict(round_rates(), Setup(prep_workers=4)).notes == ()
    (workers,) = predict(round_rates(), Setup(prep_workers=6)).notes
    assert workers == "prep was measured with up to 4 workers on 4 cores; 6 on 4 is a guess"
    cores, readers = predict(round_rates(), Setup(cores=8, readers=3)).notes
    assert "measured on 4 cores; 8 are taken to be as fast each" in cores
    assert readers == "storage was measured with up to 1 readers; 3 are not taken to be faster"
    assert steady(readers=3).epoch_s == steady().epoch_s


@settings(max_examples=30, deadline=None)
@given(any_rates(), any_setup())
def test_the_split_adds_up_to_the_epoch(rates: Rates, setup: Setup) -> None:
    for epoch in (predict(rates, setup).first, predict(rates, setup).steady):
        assert sum(split(epoch)) == pytest.approx(epoch.epoch_s.value)
        assert min(split(epoch)) >= 0


@settings(max_examples=30, deadline=None)
@given(any_rates(), any_setup(), st.floats(1, 10))
def test_more_never_slows_down(rates: Rates, setup: Setup, factor: float) -> None:
    now = predict(rates, setup)
    cores, workers = setup.cores_of(rates.cores), setup.workers_of(rates.cores)
    more = math.ceil(factor * cores)
    for changes in (
        {"cache_bytes": setup.cache_bytes * factor},
        {"disk_bytes": setup.disk_bytes * factor},
        {"dram_bytes": setup.dram_bytes * factor},
        {"storage_factor": factor},
        {"accelerator_factor": factor},
        {"cores": more, "prep_workers": workers},
        {"cores": more, "prep_workers": workers + more - cores},
    ):
        changed: dict[str, Any] = changes
        then = predict(rates, replace(setup, **changed))
        assert then.steady.epoch_s.value <= now.steady.epoch_s.value * CLOSE
        assert then.first.epoch_s.value <= now.first.epoch_s.value * CLOSE


@settings(max_examples=30, deadline=None)
@given(any_rates(), any_setup(pipelines=9), st.floats(1, 10))
def test_more_cache_and_faster_storage_never_slow_several_pipelines_down(
    rates: Rates, setup: Setup, factor: float
) -> None:
    now = predict(rates, setup)
    for changes in ({"cache_bytes": setup.cache_bytes * factor}, {"storage_factor": factor}):
        changed: dict[str, Any] = changes
        assert predict(rates, replace(setup, **changed)).steady.epoch_s.value <= now.steady.epoch_s.value * CLOSE


@settings(max_examples=30, deadline=None)
@given(any_rates(), any_setup(pipelines=9))
def test_sharing_is_never_slower(rates: Rates, setup: Setup) -> None:
    shared, alone = (predict(rates, replace(setup, sharing=sharing)) for sharing in (True, False))
    assert shared.steady.epoch_s.value <= alone.steady.epoch_s.value * CLOSE
    assert shared.first.epoch_s.value <= alone.first.epoch_s.value * CLOSE


@settings(max_examples=30, deadline=None)
@given(any_rates(), any_setup(), st.data())
def test_intervals_hold_for_any_rates_within_theirs(rates: Rates, setup: Setup, data: st.DataObject) -> None:
    assume(rates.prep_cpu_s is None)

    def within(quantity: Quantity) -> Quantity:
        return stated(data.draw(st.floats(quantity.low, quantity.high)), unit=quantity.unit)

    def scaled(curve: MeasuredCurve) -> MeasuredCurve:
        last = curve.points[-1][1]
        factor = data.draw(st.floats(last.low, last.high)) / last.value
        return MeasuredCurve(tuple((n, stated(rate.value * factor, unit=rate.unit)) for n, rate in curve.points))

    assert rates.disk is not None
    truth = replace(
        rates,
        step=within(rates.step),
        prep=scaled(rates.prep),
        storage=scaled(rates.storage),
        cache=within(rates.cache),
        disk=within(rates.disk),
    )
    found, really = predict(rates, setup).steady, predict(truth, setup).steady
    for name in ("trial_per_s", "epoch_s", "compute_s", "prep_stall_s", "fetch_stall_s"):
        interval, value = getattr(found, name), getattr(really, name).value
        slack = 1e-6 * found.epoch_s.value if name.endswith("_s") else 0
        assert interval.low * (1 - 1e-6) - slack <= value <= interval.high * (1 + 1e-6) + slack, name


@settings(max_examples=20, deadline=None)
@given(any_rates(), any_setup())
def test_json(rates: Rates, setup: Setup) -> None:
    assert Rates.from_json(json.loads(json.dumps(rates.to_json(), allow_nan=False))) == rates
    plain = json.loads(json.dumps(predict(rates, setup).to_json(), allow_nan=False))
    assert plain["setup"]["trials"] == setup.trials
    assert plain["steady"]["epoch_s"]["unit"] == "s"


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"step must be above 0, got 0 samples/s"):
        round_rates(step=about(0))
    with pytest.raises(ConfigError, match=r"overlap must be in \[0, 1\], got 1.5"):
        round_rates(overlap=1.5)
    with pytest.raises(ConfigError, match=r"serving_s must be 0 or more, got -1 s"):
        round_rates(serving_s=stated(-1, unit="s"))
    with pytest.raises(ConfigError, match=r"counts that ascend from above 0, got \[2, 1\]"):
        line((2, 400), (1, 200))
    with pytest.raises(ConfigError, match=r"trials must be at least 1, got 0"):
        Setup(trials=0)
    with pytest.raises(ConfigError, match=r"cache_bytes must be 0 or more and finite, got inf"):
        Setup(cache_bytes=math.inf)
    with pytest.raises(ConfigError, match=r"epochs must be at least 1, got 0"):
        predict(round_rates(), Setup()).run_s(0)
