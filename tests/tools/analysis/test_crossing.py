"""The best point to cross to the GPU follows from saved rates and GPU measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stated_rates import about, line, round_rates

from mbaas.errors import ConfigError
from mbaas.model.gpu_stages import GpuRates, OnGpu, crossing
from mbaas.model.rates import Rates, Setup

DECODE = OnGpu(per_s=2000, step_per_s=600, cpu_s=0.0001)
"""A GPU that decodes 2,000 samples/s trains on only 600 of 1,000: each decoded sample takes 0.2 ms."""


def rates(**changes: Any) -> Rates:
    """A step of 1,000 samples/s on 4 cores. Prep takes 5 ms, including 3 ms to decode a sample to 600 kB."""
    decoded = {"decoded_bytes": 600e3, "decoded_prep": line((1, 500))}
    return round_rates(**{**decoded, **changes})


def gpu(**changes: Any) -> GpuRates:
    return GpuRates(**{"gpus": 1, "decode": DECODE, **changes})


def test_a_gpu_decodes_some_of_what_four_cores_cannot() -> None:
    """CPUs alone reach 800 samples/s, and training reaches 833 if the GPU decodes all samples.

    For the fraction x on the GPU: 1 + 0.2 x = (5 (1 - x) + 0.1 x) / 4, so x = 17.5 %.
    """
    found = crossing(rates(), Setup(), gpu())
    assert found.options == {"engine": "dali", "dali_share": 0.18}
    assert found.trial_per_s == pytest.approx(1000 / (1 + 0.2 * 0.18))
    assert "each trial gets 965 samples/s" in found.sentence


def test_where_prep_was_measured_with_dali_the_cpu_engine_has_rates_of_its_own() -> None:
    """5 cores are enough at 5 ms a sample. They are too few at 10 ms, or with half decoded at 10 and 2 ms."""
    five = Setup(cores=5, prep_workers=5)
    assert crossing(rates(), five, gpu(cpu_s=0.01)).options["engine"] == "dali"
    half = replace(five, cache_bytes=rates().dataset_bytes + 0.5 * (600e3 * rates().samples - rates().dataset_bytes))
    plan = crossing(rates(), half, gpu(cpu_s=0.01, decoded_cpu_s=0.002))
    one = crossing(rates(), half, gpu(cpu_s=0.006))
    assert plan.shares["decode"] == pytest.approx(one.shares["decode"], abs=0.01)


def test_a_step_on_a_faster_accelerator_loses_as_large_a_share() -> None:
    twice = crossing(rates(), Setup(cores=9, prep_workers=9, accelerator_factor=2.0), gpu())
    assert twice.trial_per_s == pytest.approx(1 / (1 / 2000 + 0.2e-3 * twice.shares["decode"]))


def test_cpus_suffice_with_more_of_them() -> None:
    found = crossing(rates(), Setup(cores=5, prep_workers=5), gpu())
    assert (found.options, found.limit) == ({"engine": "cpu"}, "steps")
    assert crossing(rates(), Setup(nodes=2, trials=2), gpu()).prep_gpus == 0, "8 cores on two nodes"
    decoded = crossing(rates(), Setup(cache_bytes=1e12), gpu())
    assert decoded.options == {"engine": "cpu"}, "4 cores prepare 2,000 samples/s that are kept decoded"


def test_where_samples_cross_before_resizing() -> None:
    """GPU memory is too small for decoding. At 0.5 GB/s, 600 kB and the trial's 150 kB take 1.5 ms."""
    resize = OnGpu(per_s=5000, step_per_s=900, cpu_s=0.003, memory_bytes=10**9)
    few = Setup(cores=3, prep_workers=3, cache_bytes=1e12, decoded=False)
    decode = OnGpu(per_s=2000, step_per_s=600, cpu_s=0.0001, memory_bytes=3 * 10**9)
    found = crossing(rates(), few, gpu(decode=decode, resize=resize, memory_bytes=2 * 10**9))
    assert (found.shares["resize"], found.trial_per_s) == (1.0, pytest.approx(1000 / 1.02))
    assert found.told[0].startswith("no sample crosses to the GPU before decoding")
    slow = gpu(decode=None, resize=resize, link_bytes_per_s=0.5e9)
    found = crossing(rates(), few, slow)
    assert (found.trial_per_s, found.limit) == (pytest.approx(1000 / 1.5), "to the GPUs")
    found = crossing(rates(), replace(few, cache_bytes=rates().samples * 600e3 - 5e6), slow)
    assert (found.options, found.told) == (
        {"engine": "cpu"},
        ("no sample crosses to the GPU before resizing: to keep all decoded, caches lack 5 MB",),
    )


def test_rates_that_do_not_fit_each_other() -> None:
    fast = OnGpu(per_s=2000, step_per_s=1100, cpu_s=0.0001)
    with pytest.raises(ConfigError, match=r"step_per_s of decode must be at most .* 1,000 samples/s, got 1,100"):
        crossing(rates(), Setup(), gpu(decode=fast))
    without = round_rates(step=about(1000))
    with pytest.raises(ConfigError, match="resize needs the size of decoded samples"):
        crossing(without, Setup(), gpu(resize=DECODE))
