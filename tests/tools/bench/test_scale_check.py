"""The model agrees with a real feed in easy cases, and runs of feeds can be watched."""

from __future__ import annotations

import pytest

from benchmarks.local_cluster import local_cluster
from benchmarks.scale.real_feeds import (
    ID_BYTES,
    SAMPLE_BYTES,
    SLEEP_S,
    STORE_BYTES,
    FeedRun,
    Watched,
    check,
    pull_s,
    system_of,
    watch,
)
from benchmarks.scale.system import Costs


def test_a_run_as_the_model_sees_it() -> None:
    run = FeedRun(nodes=2, trials=3, block_samples=64, block_step_s=0.032, storage_bytes_per_s=1e6)
    seen = Watched(
        run=run,
        seconds=2.0,
        parts=0,
        blocks=30,
        blocks_per_s=5.0,
        calls=9,
        cpu_s={},
        raw_bytes=500.0,
        others_cores=0.5,
    )
    assert seen.samples_per_s == 320.0
    system = system_of(seen, Costs(prep_s=0.002))
    assert (system.nodes, system.trials, system.block_samples) == (2, 3, 64)
    assert (system.step_s, system.prep_s, system.stored_share) == (0.0005, 0.002, 1.0)
    assert (system.raw_bytes, system.sample_bytes, system.taken_cores) == (500.0, SAMPLE_BYTES + ID_BYTES, 0.5)


@pytest.mark.long
def test_a_feed_that_is_watched(no_ray: None) -> None:
    with local_cluster(2, store_bytes=STORE_BYTES) as cluster:
        seen = watch(FeedRun(nodes=2, trials=2, block_samples=16, slow_prep=True, seconds=1.0), cluster)
        assert 0 < pull_s(cluster, repeats=3) < 5.0
    assert seen.blocks >= 2
    assert 0 < seen.calls <= seen.blocks + 4, "a call ahead for each trial, at both ends"
    assert seen.samples_per_s < 1.3 * 2 / SLEEP_S
    assert seen.cpu_of("Coordinator") > 0
    assert seen.cpu_of("Coordinator", "PrepWorker") > seen.cpu_of("Coordinator")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_model_says_what_is_measured(no_ray: None) -> None:
    """If prep or storage is full, costs do not matter, but with no costs at all a feed of one node takes no time.

    A run may be slow because of other programs, so only predictions that are too slow fail.
    """
    for one in check(Costs(prep_s=1e-5), [1, 2], lambda _: None):
        if one.case != "cores":
            assert one.error > -0.15, one
