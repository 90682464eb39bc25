"""Trials of a search share minibatches that are prepared once, and each gets every sample once per epoch."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.client import part_fetch
from mbaas.client.stream import LOCAL_READ_S, WANTED_BLOCKS
from mbaas.core.layout import CREDIT, READY_AHEAD
from mbaas.dataset import synthetic
from mbaas.memory import part_memory
from mbaas.memory.part_memory import UnreadableError
from mbaas.model.sharing import Repeats
from support.trials import Trials, result

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES = 5_003


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "count"), [(4, 3), pytest.param(8, 5, marks=pytest.mark.long)])
def test_trials_share_exact_epochs_of_minibatches_that_were_prepared_once(feed_name, number, count):
    """5,003 samples are 78 minibatches of 64 and one of 11. The staging budget holds a tenth of an epoch."""
    budget = SAMPLES * (8 * 8 * 3 + 16) // 10
    data = synthetic(SAMPLES)
    pipeline = T.Pipeline([T.DecodeImage()])
    names = [f"trial-{each}" for each in range(number)]
    with (
        mbaas.serve(feed_name, data, pipeline, batch_size=64, prep_workers=2, staging_bytes=budget) as feed,
        Trials(feed_name) as trials,
    ):
        mbaas.announce(feed.name, names)
        joined = [trials.join(name) for name in names]
        assert all(trial.pid for trial in joined), "on a busy machine reservations expire before processes start"
        waiting = [trial.epochs(count) for trial in joined]
        records = []
        while waiting:
            done, waiting = ray.wait(waiting, timeout=0.1)
            records += [result(ref) for ref in done]
            status = feed.status()
            assert status.staged_bytes <= budget
        ahead = (CREDIT * 2 + READY_AHEAD + WANTED_BLOCKS) * status.block_samples
        assert count * SAMPLES <= status.prepared_samples <= count * SAMPLES + ahead
        assert status.remade_blocks == 0
        assert status.inexact_epochs == 0
    for epochs in records:
        assert [record.flaws(range(SAMPLES)) for record in epochs] == [[]] * count
        assert [record.sizes for record in epochs] == [(64,) * 78 + (11,)] * count
        assert [record.digests for record in epochs] == [record.digests for record in records[0]]
    orders = [record.sample_ids for record in records[0]]
    assert not any(np.array_equal(one, two) for one, two in itertools.pairwise(orders))


@pytest.mark.timeout(120)
def test_a_part_on_its_own_node_that_cannot_be_read_is_asked_for_again_in_seconds(feed_name, monkeypatch):
    """As if Ray had lost a part in its store: the part is prepared again, and the epoch stays exact."""
    forgotten: list[Any] = []
    armed = False

    def read(parts, timeout_s):
        refs = [part.ref or part.slot for part in parts]
        if armed and not forgotten:
            forgotten.extend(refs)
        if any(ref in forgotten for ref in refs):
            time.sleep(timeout_s)
            raise UnreadableError(for_good=False)
        return part_memory.read(parts, timeout_s)

    monkeypatch.setattr(part_fetch, "read", read)
    data, pipeline = synthetic(SAMPLES), T.Pipeline([T.DecodeImage()])
    budget = SAMPLES * (8 * 8 * 3 + 16) // 10
    with (
        mbaas.serve(feed_name, data, pipeline, batch_size=64, prep_workers=1, staging_bytes=budget) as feed,
        mbaas.join(feed_name, format="numpy") as loader,
    ):
        ids, arrivals = [], [time.monotonic()]
        for number, batch in enumerate(loader):
            armed = number >= 20
            arrivals.append(time.monotonic())
            ids += batch["sample_id"].tolist()
            del batch
        assert forgotten, "no block followed the 20th minibatch"
        assert sorted(ids) == [*range(SAMPLES)]
        assert LOCAL_READ_S < max(np.diff(arrivals)) < 3 * LOCAL_READ_S
        status = feed.status()
        assert status.remade_blocks == 1
        assert status.repeats == Repeats(lost=status.block_samples)
