"""The what-if model and the simulator, told the same, say the same where both know all that counts."""

from __future__ import annotations

import pytest
from stated_rates import about, round_rates

from mbaas.analysis.setup import Setup
from mbaas.analysis.simulated import simulated_epoch_s, system_for
from mbaas.analysis.whatif import predict

MB = 1_000_000


@pytest.mark.parametrize(
    ("setup", "epoch_s"),
    [
        (Setup(), 4.0),  # storage: 1,000 / 250
        (Setup(cache_bytes=50 * MB), 2.05),  # half from memory, 0.1 ms a sample
        (Setup(cache_bytes=100 * MB), 1.25),  # prep: 1,000 / 800
        (Setup(cache_bytes=100 * MB, trials=4), 1.25),  # once for all
        (Setup(cache_bytes=100 * MB, prep_workers=2), 2.5),
        (Setup(cache_bytes=100 * MB, accelerator_factor=0.5), 2.0),  # the step: 1,000 / 500
        (Setup(nodes=2, cache_bytes=50 * MB), 1.0),  # 1,600 are prepared, the step takes 1,000
        (Setup(storage_factor=2.0), 2.0),
    ],
)
def test_both_models_agree(setup: Setup, epoch_s: float) -> None:
    rates = round_rates()
    assert predict(rates, setup).steady.epoch_s.value == pytest.approx(epoch_s, rel=0.01)
    assert simulated_epoch_s(rates, setup) == pytest.approx(epoch_s, rel=0.06)


def test_a_large_dataset_is_simulated_in_part() -> None:
    """1,000 times as many samples, of which as large a share is cached, take 1,000 times as long."""
    small, large = round_rates(), round_rates(samples=1_000_000)
    half = Setup(cache_bytes=50 * MB), Setup(cache_bytes=50_000 * MB)
    assert simulated_epoch_s(large, half[1]) == pytest.approx(1000 * simulated_epoch_s(small, half[0]), rel=0.05)
    assert system_for(large, half[1]).dataset.samples == 200_000


def test_storage_is_as_fast_as_it_was_with_most_readers() -> None:
    rates = round_rates(step=about(1e5))
    assert system_for(rates, Setup()).machine.pfs.rate(4) == pytest.approx(250 * 100_000)
