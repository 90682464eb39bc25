"""Every metric is exported to Prometheus and agrees with the feed's status."""

from __future__ import annotations

import urllib.request

import pytest
import ray
from service_feeds import STAGING_BYTES

import mbaas
from mbaas import transforms as T
from mbaas.coordinator.control import FeedControl
from mbaas.dataset import synthetic
from mbaas.ray_cluster.metrics import METRICS
from support.trials import record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")


def scrape(feed):
    """Exported name -> sum of the feed's series."""
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        text = answer.read().decode()
    sums = {}
    for line in text.splitlines():
        if line.startswith("ray_mbaas_") and f'feed="{feed}"' in line:
            name = line.split("{", 1)[0]
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return sums


def told(status):
    """Exported name -> its value according to the status."""
    return {
        "ray_mbaas_samples_prepared_total": status.prepared_samples,
        "ray_mbaas_samples_delivered_total": status.delivered_samples,
        "ray_mbaas_cache_hits_total": status.fetched.local.samples,
        "ray_mbaas_cache_misses_total": status.fetched.storage.samples,
        "ray_mbaas_decoded_samples_total": status.fetched.decoded.samples,
        "ray_mbaas_cache_hit_bytes_total": status.fetched.local.nbytes,
        "ray_mbaas_storage_bytes_total": status.fetched.storage.nbytes,
        "ray_mbaas_staged_bytes": status.staged_bytes,
        "ray_mbaas_prep_workers": 2,
        "ray_mbaas_inexact_epochs": status.inexact_epochs,
    }


def differences(feed):
    """Exported name -> (Prometheus value, status value), where they differ."""
    sums = scrape(feed.name)
    return {name: (sums.get(name), value) for name, value in told(feed.status()).items() if sums.get(name) != value}


def lasting_differences(feed):
    """Wait until Prometheus agrees with the status. Return the differences that remain."""
    try:
        wait_until(lambda: not differences(feed), "the metrics agree with the status")
    except AssertionError:
        return differences(feed)
    return {}


def test_every_metric_is_exported_and_agrees_with_the_status(feed_name):
    # a separate feed: a dead coordinator's series are exported for a while and would be added
    options = {"batch_size": 64, "prep_workers": 2, "staging_bytes": STAGING_BYTES}
    # Decoding is at least half of the work, so samples are always cached decoded.
    data, pipeline = synthetic(1003, height=64, width=64), T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    with mbaas.serve(feed_name, data, pipeline, **options) as feed:
        with mbaas.join(feed_name, consumer="me", format="numpy") as loader:
            record_epoch(loader)
            FeedControl.of(feed.name).expect(1.0)
            # A counter of 0 is not exported. Samples come from the cache in the second epoch, and from the decoded tier
            # in the first epoch prepared after they were decoded. Two or three blocks are prepared ahead.
            epochs = 1
            while epochs < 2 or not feed.status().fetched.decoded.samples:
                assert epochs < 40, "no sample arrives decoded"
                record_epoch(loader)
                epochs += 1
        assert lasting_differences(feed) == {}
        sums, status = scrape(feed_name), feed.status()
        # these stay 0 with one trial without ranks, one node, no disk tier, no deaths and no bugs
        unused = {
            "mbaas_peer_stall_seconds",
            "mbaas_rank_steps",
            "mbaas_uneven_rank_steps",
            "mbaas_remote_bytes",
            "mbaas_disk_bytes",
            "mbaas_internal_errors",
            "mbaas_coordinator_restarts",
        }
        assert {metric.exported for metric in METRICS if metric.name not in unused} <= set(sums)
        assert status.delivered_samples == epochs * 1003
        assert sums["ray_mbaas_minibatch_wait_seconds_count"] == epochs * 16, "minibatches of 64"
        assert status.cached_samples == 1003
        assert 0.0 < sums["ray_mbaas_prep_worker_samples_per_second"] < 1e6
        stalled_s = sums["ray_mbaas_fetch_stall_seconds_total"] + sums["ray_mbaas_prep_stall_seconds_total"]
        assert 0.0 < stalled_s < status.uptime_s * 100
        assert 0.0 < sums["ray_mbaas_cpu_seconds_total"] < feed.costs().cpu_s, "asked later, it has grown"
