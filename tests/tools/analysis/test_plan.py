"""Planned workers, threads, caches and nodes match hand calculations, and every plan stays within its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.balance import travelling_share
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import Quantity
from mbaas.tools.plan.jobs import Bounds, Cluster, Node, Samples, TrainingJob
from mbaas.tools.plan.planner import plan, plan_on
from mbaas.tools.plan.supply import CachePlan, Fleet, fair_split, fetches, fill_caches

Points = Sequence[tuple[float, float]]
Spread = tuple[float, float]
"""Ends of an interval relative to the value."""

TINY = Samples(name="tiny", samples=1000, dataset_bytes=1_000_000)
LARGE = Samples(name="large", samples=24_000, dataset_bytes=2_400_000_000)


def cluster(*, nodes: tuple[int, int] = (1, 1), storage: Points = ((1, 20e6),), **node: Any) -> Cluster:
    """Nodes of 8 cores with an object store of 3 GB: 2.1 GB are usable, and each job stages 450 MB."""
    given: dict[str, Any] = {"cores": 8, "memory_bytes": 10_000_000_000, **node}
    curve = MeasuredCurve.of(storage, unit="bytes/s")
    return Cluster(nodes=Bounds(least=nodes[0], most=nodes[1]), node=Node(**given), storage=curve)


def per_s(rate: float, spread: Spread = (1, 1)) -> Quantity:
    return Quantity(rate, low=rate * spread[0], high=rate * spread[1], unit="samples/s")


def curve(points: Points, spread: Spread = (1, 1)) -> MeasuredCurve:
    return MeasuredCurve(tuple((float(count), per_s(rate, spread)) for count, rate in points))


def job(
    name: str = "a",
    dataset: Samples = TINY,
    *,
    step_per_s: float = 250,
    prep: Points = ((1, 100),),
    decoded_prep: Points = (),
    step_spread: Spread = (1, 1),
    prep_spread: Spread = (1, 1),
    decoded_spread: Spread = (1, 1),
    **changes: Any,
) -> TrainingJob:
    """A job whose prep workers prepare 100 samples/s each."""
    given: dict[str, Any] = {
        "step": per_s(step_per_s, step_spread),
        "prep": curve(prep, prep_spread),
        "decoded_prep": curve(decoded_prep, decoded_spread) if decoded_prep else None,
        "batch_size": 64,
        "pixel_bytes": 150_000,
    }
    return TrainingJob(name=name, dataset=dataset, **{**given, **changes})


def cached(
    dataset: str, memory_bytes: int, disk_bytes: int, memory: float, disk: float, *, epochs_per_h: float = 0.0
) -> CachePlan:
    return CachePlan(
        dataset=dataset,
        dataset_bytes=2_000_000_000,
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        memory_share=memory,
        disk_share=disk,
        epochs_per_h=epochs_per_h,
    )


def test_enough_workers_for_everybody() -> None:
    """2 x 8 cores less 3 trials leave 13 workers. a needs 1,000 / 100 = 10, b needs 2.5."""
    made = plan([job("a", step_per_s=1000, trials=2), job("b")], cluster(nodes=(2, 2)))
    assert (made.pool, made.idle_workers) == (13, 0)
    a, b = made.jobs
    assert (a.workers, a.limit, a.trial_per_s, a.epoch_s) == (10, "training", 1000, 1.0)
    assert (b.workers, b.needed, b.trial_per_s) == (3, pytest.approx(2.5), 250)
    assert b.reason == (
        "trains at full speed, 250 samples/s in each trial: 3 workers prepare 300 samples/s, caches and storage bring "
        "20,000,000 samples/s"
    )


def test_too_few_workers() -> None:
    """8 cores less 3 trials leave 5 workers, and 13 are needed. b drops from 3 to 1, a from 10 to 4 (A-Dloader)."""
    a, b = plan([job("a", step_per_s=1000, trials=2), job("b")], cluster()).jobs
    assert (a.workers, b.workers) == (4, 1)
    assert (a.limit, a.trial_per_s) == ("pool", pytest.approx(400))
    assert a.reason == (
        "4 workers prepare 400 samples/s; training could take 1,000 samples/s, but the pool of 5 has no more workers "
        "for it"
    )
    assert a.scaler_workers == 5  # it would request 10, but the pool has 5


def test_what_an_epoch_of_each_trial_costs() -> None:
    """1,000 samples of 10 ms are 1/360 of an hour, shared by four trials."""
    (known,) = plan([job(trials=4)], cluster(cpu_price_per_h=7.2)).jobs
    assert (known.cpu_s, known.alone_cpu_s) == pytest.approx((2.5, 10))
    assert (known.price, known.alone_price) == pytest.approx((0.005, 0.02))
    (unknown,) = plan([job(trials=4)], cluster()).jobs
    assert (unknown.price, unknown.alone_price) == (None, None)


def test_intervals_of_what_was_measured() -> None:
    """4 workers prepare 400 samples/s (360 to 420).

    3 workers prepare 300 (150 to 600), and the step takes 250 (240 to 260): a trial gets 150 to 260.
    """
    spread = {"prep_spread": (0.9, 1.05), "step_spread": (0.96, 1.04)}
    a, b = plan(
        [job("a", step_per_s=1000, trials=2, **spread), job("b", **spread)], cluster(nodes=(2, 2), cores=4)
    ).jobs
    assert (a.workers, b.workers) == (4, 1)
    assert (a.trial_low_per_s, a.trial_per_s, a.trial_high_per_s) == pytest.approx((360, 400, 420))
    enough = plan([job("b", prep_spread=(0.5, 2.0), step_spread=(0.96, 1.04))], cluster()).jobs[0]
    assert (enough.workers, enough.trial_low_per_s, enough.trial_high_per_s) == (
        3,
        pytest.approx(150),
        pytest.approx(260),
    )
    exact = plan([job()], cluster()).jobs[0]
    assert exact.trial_low_per_s == exact.trial_per_s == exact.trial_high_per_s


def test_what_memory_for_decoded_samples_would_bring() -> None:
    """4 workers prepare 400 encoded samples/s, or 4,000 decoded ones (3,200 to 4,800): 10 times as many.

    24,000 samples of 500 kB are 12 GB. The caches of a node may use 1.65 GB, and each of two nodes needs half. 1,000
    samples of 500 kB fit.
    """
    given: dict[str, Any] = {
        "step_per_s": 1e5,
        "decoded_prep": ((1, 1000), (2, 2000), (4, 4000)),
        "decoded_bytes": 500_000,
        "decoded_spread": (0.8, 1.2),
    }
    (made,) = plan([job("a", LARGE, **given)], cluster()).jobs
    assert made.decoding == (
        "decoding is 90 % of prep; 10.4 GB more memory for caches on each node would keep all samples decoded: prep 10 "
        "(8 to 12) times as fast"
    )
    # Two nodes cache all samples encoded. 450 of the missing 4,800 MB each are left: 9.375 % take 1 ms, the others 10.
    (two,) = plan([job("a", LARGE, **given)], cluster(nodes=(2, 2))).jobs
    assert two.decoded_share == pytest.approx(0.09375)
    assert two.decoding == (
        "decoding is 90 % of prep, and 9.4 % of the samples are kept decoded; 4.35 GB more memory for caches on each "
        "node would keep all samples decoded: prep 9.16 (7.31 to 11) times as fast"
    )
    (small,) = plan([job("b", TINY, **given)], cluster()).jobs
    assert small.decoding == "decoding is 90 % of prep, and all samples are kept decoded"
    _, beside = plan([job("a", LARGE, **given), job("b", TINY, **given)], cluster()).jobs
    assert "; 499 MB more memory" in beside.decoding  # the other dataset takes all memory except 1 MB
    little = plan([job("a", decoded_bytes=500_000, decoded_prep=((1, 102),))], cluster()).jobs[0]
    assert little.decoding == "decoding is only 2.0 % of prep, so no samples are kept decoded"
    assert plan([job()], cluster()).jobs[0].decoding == ""
    with pytest.raises(ConfigError, match="decoded_prep and decoded_bytes must both be given, or neither"):
        job(decoded_bytes=5)


def test_rates_and_costs_with_decoded_samples() -> None:
    """Half of 1,000 samples take 1 ms instead of 10: 5.5 ms on average, so 7 workers prepare 1,273 samples/s."""
    given: dict[str, Any] = {"decoded_prep": ((1, 1000),), "decoded_bytes": 499_000, "staging_bytes": 100_000_000}
    roomy, tight = cluster(memory_bytes_per_s=2e9), cluster(object_store_bytes=500_000_000)
    (whole,) = plan([job(step_per_s=2500, **given)], roomy).jobs
    assert (whole.decoded_share, whole.workers, whole.limit, whole.scaler_workers) == (1, 3, "training", 3)
    assert whole.fetch_per_s == pytest.approx(2e9 / 499_000)
    assert whole.threads.fetch_s == pytest.approx(64 * 499_000 / 2e9)
    assert (whole.cpu_s, whole.alone_cpu_s) == pytest.approx((1, 10))
    # 70 % of the store less staging are 250 MB: all samples encoded (1 MB), and half of the missing 498 MB
    made = plan([job(step_per_s=2500, decoded_spread=(0.5, 2.0), **given)], tight)
    (half,) = made.jobs
    assert half.decoded_share == pytest.approx(0.5)
    assert (half.workers, half.limit, half.prep_per_s) == (7, "pool", pytest.approx(7 / 5.5e-3))
    assert (half.trial_low_per_s, half.trial_high_per_s) == pytest.approx((7 / 6e-3, 7 / 5.25e-3))
    assert half.cpu_s == pytest.approx(5.5)
    assert (made.caches[0].memory_bytes, made.caches[0].memory_share) == (250_000_000, 1)
    # jobs cannot share decoded samples, and both need the encoded ones
    first, second = plan([job("a", **given), job("b", **given)], cluster(object_store_bytes=1_000_000_000)).jobs
    assert (first.decoded_share, second.decoded_share) == (1, 0)
    # no samples are decoded unless all fit in memory encoded
    assert plan([job("a", LARGE, step_per_s=2500, **given)], cluster()).jobs[0].decoded_share == 0


def test_prep_that_has_a_peak() -> None:
    """320 samples/s from 4 workers on; two nodes reach twice that."""
    saturated = job(step_per_s=1000, prep=tuple((n, min(80.0 * n, 320.0)) for n in range(1, 9)))
    (one,) = plan([saturated], cluster()).jobs
    assert (one.workers, one.limit, one.reason) == (
        4, "prep", "4 workers prepare 320 samples/s, and more would not be faster; training could take 1,000 samples/s"
    )  # fmt: skip
    (two,) = plan([saturated], cluster(nodes=(2, 2))).jobs
    assert (two.workers, two.trial_per_s) == (8, pytest.approx(640, rel=1e-3))
    assert (one.fit.points, one.fit.worst_error, one.fit.r_squared) == (8, pytest.approx(0, abs=1e-6), pytest.approx(1))


def test_a_node_with_more_cores_than_were_measured_takes_more_workers() -> None:
    """2 cores: 180 samples/s from 2 workers on. 8 cores could run 8 workers, less one for the trial: 630."""
    measured = job(step_per_s=1000, prep=((1, 90), (2, 180), (3, 180), (4, 180)), prep_cores=2)
    (made,) = plan([measured], cluster()).jobs
    assert (made.workers, made.limit, made.trial_per_s) == (7, "pool", pytest.approx(630, rel=0.01))
    (narrow,) = plan([job(step_per_s=1000, prep=((1, 90), (2, 180), (3, 180), (4, 180)))], cluster()).jobs
    assert (narrow.workers, narrow.limit, narrow.trial_per_s) == (2, "prep", pytest.approx(180, rel=0.01))


def test_storage_limits_what_is_not_cached() -> None:
    """1.65 of 2.4 GB are cached: 0.6875 x 100 kB / 10 GB/s + 0.3125 x 100 kB / 20 MB/s = 6.9 us + 1.5625 ms."""
    made = plan([job("a", LARGE, step_per_s=1000)], cluster(cores=16))
    (a,), (cache,) = made.jobs, made.caches
    assert made.cache_memory_bytes == pytest.approx(1_650_000_000, abs=1)
    assert (cache.memory_bytes, cache.memory_share) == (made.cache_memory_bytes, pytest.approx(0.6875))
    assert (a.limit, a.trial_per_s) == ("storage", pytest.approx(1 / 1.569375e-3))
    assert (a.workers, a.scaler_workers) == (7, 7)  # training could use 10 workers, storage feeds 7
    assert a.reason == (
        "caches and storage bring 637 samples/s, 31 % of its samples from storage; 7 workers prepare 700 samples/s, "
        "training could take 1,000 samples/s"
    )


def test_the_dataset_that_is_read_most_often_gets_the_fastest_tier() -> None:
    """Reads per hour are 100 and 300: the second dataset goes to memory completely, and the first gets the rest."""
    slow, quick = (Samples(name=n, samples=1, dataset_bytes=2_000_000_000) for n in ("slow", "quick"))
    kept = fill_caches([(slow, 100), (quick, 300)], nodes=1, memory_bytes=2_500_000_000, disk_bytes=1_000_000_000)
    assert kept == {
        "quick": cached("quick", 2_000_000_000, 0, 1.0, 0.0, epochs_per_h=300 * 3600),
        "slow": cached("slow", 500_000_000, 1_000_000_000, 0.25, 0.5, epochs_per_h=100 * 3600),
    }
    assert kept["slow"].stored_share == 0.25


def test_jobs_on_one_dataset_share_its_cache_and_add_up() -> None:
    """Two jobs of 250 samples/s on 24,000 samples: 2 x 37.5 epochs an hour. Both stage 450 MB of 2.1 GB."""
    made = plan([job("a", LARGE), job("b", LARGE)], cluster(cores=16))
    (cache,) = made.caches
    assert cache.epochs_per_h == pytest.approx(75)
    assert cache.memory_bytes == made.cache_memory_bytes == pytest.approx(1_200_000_000, abs=1)


def test_a_share_is_what_one_needs_or_the_same_for_all() -> None:
    """60 for needs of 10 + 30 + 60: 10, then 25 each. 80 for needs of 10 + 30: twice the needs."""
    assert fair_split({"c": 60, "a": 10, "b": 30}, 60) == {"a": 10, "b": 25, "c": 25}
    assert fair_split({"a": 10, "b": 30}, 80) == {"a": 20, "b": 60}
    assert fair_split({"a": 0}, 5) == {"a": 0}


def test_storage_makes_up_for_slow_memory() -> None:
    """a may take 1 / 300 s a sample.

    Memory of 50 MB/s takes 0.6875 x 2 = 1.375 ms, so storage has 1.958 ms for 31.25 kB: 15.96 MB/s. b needs 4 MB/s, 40
    samples/s of 100 kB. The sum is 19.96 of 20 MB/s, so both get all they need.
    """
    slow, other = job("a", LARGE), job("b", Samples(name="other", samples=1000, dataset_bytes=100_000_000))
    kept = {"large": cached("large", 0, 0, 0.6875, 0.0), "other": cached("other", 0, 0, 0.0, 0.0)}
    found = fetches(
        Fleet([slow, other], cluster(memory_bytes_per_s=50e6), 1),
        kept=kept,
        decoded={"a": 0.0, "b": 0.0},
        demands={"a": 300, "b": 40},
    )
    assert found["a"].per_s == pytest.approx(300, rel=2e-3)
    assert found["b"].per_s == pytest.approx(40, rel=3e-3)


def test_the_network_limits_what_travels() -> None:
    """Half of 2 x 1,000 x 150 kB/s is 150 MB/s; with 100 MB/s each job gets 50 / 0.075 MB = 667 samples/s."""
    wide = cluster(nodes=(2, 2), cores=16, network_bytes_per_s=100e6)
    for made in plan([job("a", step_per_s=1000), job("b", step_per_s=1000)], wide).jobs:
        assert (made.limit, made.trial_per_s) == ("network", pytest.approx(2000 / 3))
        assert made.reason.startswith("the network brings each node 667 samples/s of finished pixels")


def test_data_parallel_trials_receive_only_the_imbalance() -> None:
    """2 nodes with 32 samples of a minibatch each: 0.0497 of the samples travel, and each node receives half of them.

    With 1 MB/s, 1e6 / (0.0497 / 2 x 150,000) = 268 samples/s arrive, against 13.3 for a trial on one node.
    """
    narrow = cluster(nodes=(2, 2), cores=16, network_bytes_per_s=1e6)
    (ranks,) = plan([job("a", step_per_s=1000, batch_size=64, data_parallel=True)], narrow).jobs
    (single,) = plan([job("a", step_per_s=1000, batch_size=64)], narrow).jobs
    share = travelling_share(2, local_batch=32, locality=True)
    assert share == pytest.approx(0.0497, abs=1e-4)
    assert (ranks.limit, ranks.trial_per_s) == ("network", pytest.approx(1e6 / (share / 2 * 150_000)))
    assert single.trial_per_s == pytest.approx(1e6 / 75_000)


def test_threads_that_read_go_where_most_is_read() -> None:
    """Only a reads storage, at 1 MB/s a thread: b has one fetch thread, a 7. Prep threads never exceed workers."""
    busy, quiet = job("a", LARGE, step_per_s=40), job("b")
    made = plan([busy, quiet], cluster(storage=((1, 1e6), (8, 8e6)), object_store_bytes=1_000_000_000))
    a, b = (each.threads for each in made.jobs)
    assert (a.fetch, b.fetch) == (7, 1)
    assert (a.prep, b.prep) == (1, 3)
    assert a.fetch_s > a.prep_s


def test_as_few_nodes_as_are_as_good() -> None:
    """a needs 20 workers: 2 nodes have 16 cores less one trial, 3 have 23."""
    made = plan([job(step_per_s=2000)], cluster(nodes=(1, 9)))
    assert (made.nodes, made.jobs[0].limit) == (3, "training")
    assert made.why_nodes == (
        "3 nodes: jobs reach 100 % of full speed; with 2 jobs would reach only 75 %; up to 9 make them hardly any "
        "faster"
    )
    assert plan_on(Fleet([job(step_per_s=2000)], cluster(nodes=(1, 9)), 2)).jobs[0].trial_per_s == pytest.approx(1500)


def test_nodes_for_the_trials() -> None:
    """5 trials with one GPU each need 3 nodes of 2 GPUs."""
    gpus = job(trials=5, gpus_per_trial=1)
    made = plan([gpus], cluster(nodes=(1, 3), gpus=2))
    assert made.nodes == 3
    assert "2 would not do, because trials need 5 GPUs, 2 nodes have 4; the most there may be" in made.why_nodes


@pytest.mark.parametrize(
    ("jobs", "sentence"),
    [
        ([], r"a plan needs at least 1 job, got 0"),
        ([job("a"), job("a")], r"names of jobs must differ, got a, a"),
        ([job(gpus_per_trial=1)], r"trials need 1 GPUs, 1 node has 0"),
        ([job("a", trials=7), job("b")], r"8 cores and every job one more for a prep worker, 10 in all, 1 node has 8"),
        ([job(staging_bytes=3_000_000_000)], r"staging of all jobs needs 3 GB on each node, which may use 2.1 GB"),
    ],
)  # fmt: skip
def test_what_does_not_fit(jobs: list[TrainingJob], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(jobs, cluster())


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"1 <= least <= most, got least 3, most 2"):
        cluster(nodes=(3, 2))
    with pytest.raises(ConfigError, match=r"disk_bytes of 5 needs disk_bytes_per_s, got none"):
        cluster(disk_bytes=5)
    with pytest.raises(ConfigError, match=r"needs points \(count, rate\), all above 0 and finite, got \[\(0, 1\)\]"):
        cluster(storage=((0, 1),))
    with pytest.raises(ConfigError, match=r"step_per_s must be above 0, got 0"):
        job(step_per_s=0)
    with pytest.raises(ConfigError, match=r"batch_size must be at least 1, got 0"):
        job(batch_size=0)


@st.composite
def some_jobs(draw: st.DrawFn) -> list[TrainingJob]:
    sizes = st.integers(10**6, 10**10)
    datasets = [Samples(name=f"d{i}", samples=7919, dataset_bytes=draw(sizes)) for i in range(2)]
    return [
        job(
            f"j{i}",
            draw(st.sampled_from(datasets)),
            step_per_s=draw(st.floats(1, 5000)),
            prep=((1, 90), (3, draw(st.floats(91, 270)))),
            trials=draw(st.integers(1, 2)),
            reserved_workers=draw(st.integers(1, 3)),
            staging_bytes=1_000_000,
        )
        for i in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=25, deadline=None)
@given(some_jobs(), st.integers(2, 5), st.floats(1e6, 1e9), st.floats(1e6, 1e9))
def test_every_plan_keeps_within_what_there_is(
    jobs: list[TrainingJob], nodes: int, storage: float, network: float
) -> None:
    """Workers fit the pool, with at least one a job; caches fit memory and disk; storage and network limits hold."""
    wide = cluster(
        nodes=(1, nodes), storage=((1, storage),), network_bytes_per_s=network, disk_bytes=10**9, disk_bytes_per_s=1e9
    )
    made = plan(jobs, wide)
    assert 1 <= made.nodes <= nodes
    assert sum(each.workers for each in made.jobs) + made.idle_workers == made.pool
    assert all(each.workers >= 1 for each in made.jobs)
    assert sum(cache.memory_bytes for cache in made.caches) <= made.cache_memory_bytes
    assert sum(cache.disk_bytes for cache in made.caches) <= 10**9
    assert all(cache.memory_share + cache.disk_share <= 1 for cache in made.caches)
    assert all(each.trial_per_s <= each.step_per_s for each in made.jobs)
    stored = {cache.dataset: 1 - cache.memory_share - cache.disk_share for cache in made.caches}
    pairs = list(zip(jobs, made.jobs, strict=True))
    read = sum(each.trial_per_s * stored[j.dataset.name] * j.dataset.sample_bytes for j, each in pairs)
    assert read <= storage * (1 + 1e-5)
    travels = sum(each.trial_per_s * j.pixel_bytes for j, each in pairs) * (made.nodes - 1) / made.nodes
    assert travels <= network * (1 + 1e-5)
    for each in made.jobs:
        assert 1 <= each.threads.prep <= math.ceil(each.workers / made.nodes)
        assert each.threads.fetch >= 1
        assert each.limit == "training" or each.trial_per_s < each.step_per_s
    assert json.loads(json.dumps(made.to_json(), allow_nan=False))["nodes"] == made.nodes
