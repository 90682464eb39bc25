"""The what-if model and the simulator agree wherever both cover all relevant effects."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stated_rates import about, any_rates, any_setup, decodable_rates, line, round_rates

from mbaas.model.pace import predict
from mbaas.model.quantity import stated
from mbaas.model.rates import Rates, Setup
from mbaas.tools.simulator.simulation import simulated_epoch_s
from mbaas.tools.simulator.system import system_of

MB = 1_000_000


@pytest.mark.parametrize(
    ("setup", "epoch_s"),
    [
        (Setup(), 4.0),  # storage: 1,000 / 250
        (Setup(cache_bytes=50 * MB), 2.05),  # half from memory, 0.1 ms a sample
        (Setup(cache_bytes=100 * MB), 1.25),  # prep: 1,000 / 800
        (Setup(cache_bytes=100 * MB, trials=4), 1.25),  # prepared once for all trials
        (Setup(cache_bytes=100 * MB, prep_workers=2), 2.5),
        (Setup(cache_bytes=100 * MB, accelerator_factor=0.5), 2.0),  # the step: 1,000 / 500
        (Setup(nodes=2, cache_bytes=50 * MB), 1.0),  # prep makes 1,600/s, the step takes 1,000/s
        (Setup(storage_factor=2.0), 2.0),
    ],
)
def test_both_models_agree(setup: Setup, epoch_s: float) -> None:
    rates = round_rates()
    assert predict(rates, setup).steady.epoch_s.value == pytest.approx(epoch_s, rel=0.01)
    assert simulated_epoch_s(rates, setup) == pytest.approx(epoch_s, rel=0.06)


def test_both_models_agree_on_a_disk() -> None:
    """30 MB in memory, 50 MB on a disk of 200 MB/s: 0.3 x 0.1 + 0.5 x 0.5 + 0.2 x 4 = 1.08 ms."""
    rates = round_rates(disk=about(200e6, unit="bytes/s"), prep=line((1, 1000), (4, 4000)))
    setup = Setup(cache_bytes=30 * MB, disk_bytes=50 * MB)
    assert predict(rates, setup).steady.epoch_s.value == pytest.approx(1.08)
    assert simulated_epoch_s(rates, setup) == pytest.approx(1.08, rel=0.06)


def test_both_models_agree_on_shared_cores() -> None:
    """2 cores; in ms per sample: prep 5, staging 0.5, delivery 0.25, step 1, read 3.

    Serving adds 0.5 ms to each of 2 workers, which then take 5.5 / 2 = 2.75 ms a sample.
    One trial: (5 + 0.5 + 3 + 0.25 + 1) / 2 = 4.875 ms; with all cached 3.375. 4 trials: (5.5 + 4 x 1.25) / 2 = 5.25.
    Steps twice as fast: 3.125. 8 cores: 0.84 ms, but the step takes 1 ms. Without sharing: 4 x 6.75 / 2 = 13.5.
    """
    costs = {"staging_cpu_s": 5e-4, "delivery_cpu_s": 2.5e-4, "step_cpu_s": 1e-3, "read_cpu_s": 3e-3}
    rates = round_rates(
        cores=2,
        prep=line((1, 200), (2, 400)),
        storage=line((1, 1000)),
        serving_s=stated(5e-4, unit="s"),
        **{name: stated(cost, unit="CPU-s") for name, cost in costs.items()},
    )
    cached = {"cache_bytes": 100 * MB}
    for setup, epoch_s in (
        (Setup(), 4.875),
        (Setup(**cached), 3.375),
        (Setup(trials=4, **cached), 5.25),
        (Setup(accelerator_factor=2, **cached), 3.125),
        (Setup(cores=8, **cached), 1.0),
        (Setup(prep_workers=1, **cached), 5.5),
        (Setup(trials=4, sharing=False, cache_bytes=400 * MB), 13.5),
    ):
        assert predict(rates, setup).steady.epoch_s.value == pytest.approx(epoch_s)
        assert simulated_epoch_s(rates, setup) == pytest.approx(epoch_s, rel=0.06), setup
    busy = replace(rates, background_cores=stated(0.5, unit="cores"))
    assert predict(busy, Setup(trials=4, **cached)).steady.epoch_s.value == pytest.approx(10.5 / 1.5)
    assert simulated_epoch_s(busy, Setup(trials=4, **cached)) == pytest.approx(10.5 / 1.5, rel=0.06)


@pytest.mark.parametrize(("cache_bytes", "epoch_s"), [(0, 1.667), (90e6, 1.0935), (300e6, 0.6875), (500e6, 0.125)])
def test_both_models_agree_on_decoded_samples(cache_bytes: float, epoch_s: float) -> None:
    """Storage takes 1.667 ms a sample, prep 1.25 ms or 0.125 ms; samples have 0.1 MB encoded and 0.5 MB decoded.

    90 MB hold fractions x decoded and y encoded: 5 x + y = 0.9. Storage takes as long for the rest as prep for all:
    1.667 (1 - x - y) = 1.667 (0.1 + 4 x) = 1.25 - 1.125 x. So x = 0.1391, and both take 1.0935 ms. 300 MB hold all
    samples, half decoded.
    """
    rates = decodable_rates(storage=line((1, 600)), cache=about(1e12, unit="bytes/s"))
    setup = Setup(cache_bytes=cache_bytes)
    assert predict(rates, setup).steady.epoch_s.value == pytest.approx(epoch_s, rel=0.01)
    assert simulated_epoch_s(rates, setup) == pytest.approx(epoch_s, rel=0.06)


@settings(max_examples=25, deadline=None)
@given(rates=any_rates(), setup=any_setup(nodes=3, pipelines=9), rounds=st.integers(1, 3))
def test_both_models_agree_on_any_shared_feed(rates: Rates, setup: Setup, rounds: int) -> None:
    """Limited to effects in both: all in fast memory, small minibatches, many steps, as many trials on each node."""
    rates = replace(rates, samples=16_384, batch_size=16, overlap=1.0, cache=about(1e12, unit="bytes/s"))
    setup = replace(
        setup,
        sharing=True,
        accelerators=None,
        cache_bytes=2 * rates.dataset_bytes,
        disk_bytes=0,
        trials=rounds * setup.nodes,
    )
    predicted = predict(rates, setup).steady.epoch_s.value
    assert simulated_epoch_s(rates, setup) == pytest.approx(predicted, rel=0.05)


def test_a_large_dataset_is_simulated_in_part() -> None:
    """1,000 times as many samples, with the same fraction cached, take 1,000 times as long."""
    small, large = round_rates(), round_rates(samples=1_000_000)
    half = Setup(cache_bytes=50 * MB), Setup(cache_bytes=50_000 * MB)
    assert simulated_epoch_s(large, half[1]) == pytest.approx(1000 * simulated_epoch_s(small, half[0]), rel=0.05)
    assert system_of(large, half[1]).dataset.samples == 200_000


def test_storage_is_as_fast_as_it_was_with_most_readers() -> None:
    rates = round_rates(step=about(1e5))
    assert system_of(rates, Setup()).machine.storage.rate(4) == pytest.approx(250 * 100_000)
