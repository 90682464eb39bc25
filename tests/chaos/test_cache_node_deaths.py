"""After a cache node is killed, prep continues with its successor, which fills again."""

from __future__ import annotations

import pytest

import mbaas
from mbaas.tools.chaos.participants import kill
from support.processes import cache_node_pids
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

SAMPLES = 2010


def test_a_cache_node_killed_three_times_costs_no_sample_and_fills_anew(serve_small):
    """101 minibatches; the node gets kill -9 after the 10th, 50th and 90th."""
    killed = []
    with serve_small(SAMPLES, prep_workers=2) as feed, mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        recorder = Recorder()
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            if number in (10, 50, 90):
                (pid,) = wait_until(lambda: cache_node_pids(feed.name), "a cache node is up")
                kill(pid)
                killed.append(pid)
                wait_until(lambda: set(cache_node_pids(feed.name)) - set(killed), "it has a successor")
        del batch
        assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert len(set(killed)) == 3
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        wait_until(lambda: feed.status().cached_samples == SAMPLES, "the successor's cache is full")
        assert feed.status().failed is None
