"""On several nodes, each rank of a trial gets its node's rows, and together they get the global minibatch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import ray
from node_feeds import BATCH, OPTIONS, SAMPLES, augmented
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import mbaas
from mbaas.client import part_fetch
from mbaas.wire.consumers import ConsumerReport
from support.ranks import union_flaws
from support.trials import EpochRecord, Recorder, TrialProcess, result
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # trials cannot import it

ROW_BYTES = 32 * 32 * 3 + 24


class Ranks:
    """A trial with one process per rank, on given nodes."""

    def __init__(self, feed: mbaas.Feed, nodes: list[Any], **options: Any) -> None:
        self._feed, self._size = feed, len(nodes)
        self.actors = [
            TrialProcess.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
            for node in nodes
        ]
        mbaas.announce(feed.name, ["trial"])
        options = {"world_size": self._size, **options}
        result(self.each(lambda rank, actor: actor.join.remote(feed.name, "trial", {"rank": rank, **options})))

    def each(self, ask: Any) -> list[Any]:
        return [ask(rank, actor) for rank, actor in enumerate(self.actors)]

    def begin(self, epochs: int) -> list[Any]:
        return self.each(lambda _, actor: actor.epochs.remote(epochs))

    def reports(self) -> list[ConsumerReport]:
        result(self.each(lambda _, actor: actor.flush.remote()))
        members = {member.name: member.report for member in self._feed.status().consumers}
        return [members[f"trial[{rank}]"] for rank in range(self._size)]

    def close(self) -> None:
        result(self.each(lambda _, actor: actor.close.remote()))
        for actor in self.actors:
            ray.kill(actor)


class Whole:
    """A second consumer that reads everything."""

    def __init__(self, feed: mbaas.Feed) -> None:
        self._loader = mbaas.join(feed.name, consumer="whole", format="numpy")

    def epoch(self) -> dict[str, NDArray[Any]]:
        """All samples of an epoch by id."""
        batches = [{name: array.copy() for name, array in batch.items()} for batch in self._loader]
        ids = np.concatenate([batch["sample_id"] for batch in batches])
        return {name: np.concatenate([batch[name] for batch in batches])[np.argsort(ids)] for name in batches[0]}

    def close(self) -> None:
        self._loader.close()


def digests(record: EpochRecord, epoch: dict[str, NDArray[Any]]) -> tuple[str, ...]:
    """Expected digests of a record's minibatches, from the arrays of the whole epoch."""
    recorder = Recorder()
    for ids in np.split(record.sample_ids, np.cumsum(record.sizes)[:-1]):
        recorder.add({name: array[ids] for name, array in epoch.items()})
    return recorder.record(None).digests


def run(feed: mbaas.Feed, trial: Ranks, whole: Whole, epochs: int) -> None:
    """Run some epochs of a trial and check every byte."""
    begun = trial.begin(epochs)
    seen = [whole.epoch() for _ in range(epochs)]
    for records, epoch in zip(zip(*result(begun), strict=True), seen, strict=True):
        assert union_flaws(records, range(SAMPLES), batch_size=BATCH) == []
        for record in records:
            assert record.digests == digests(record, epoch)
    assert feed.status().inexact_epochs == 0


def read_no_part_whole(_: Any) -> None:
    """In a trial's process, request every byte from other nodes as rows, never as a whole part."""
    part_fetch.WHOLE_SHARE = 1.0


@pytest.mark.slow
def test_two_ranks_read_what_lies_on_their_nodes(three_nodes, data, feed_name):
    """Homes are even, so each of the two nodes that prepare has about half of a minibatch.

    With 32 samples a rank, 0.4 / sqrt(32) = 7 % move, plus the samples that an idle worker took over. Ranks read no
    part whole here, so that every byte is accounted for. Ids, label and row take 24 bytes a sample.
    """
    with mbaas.serve(feed_name, data, augmented(), prep_workers=2, **OPTIONS) as feed:
        whole = Whole(feed)
        whole.epoch()
        preparing = {node.node for node in feed.status().nodes}
        trial = Ranks(feed, [node for node in three_nodes.there if node.node_id in preparing])
        result(trial.each(lambda _, actor: actor.__ray_call__.remote(read_no_part_whole)))
        run(feed, trial, whole, 2)
        reports, taken_over = trial.reports(), feed.status().fetched.remote.samples
        assert sum(report.samples for report in reports) == 2 * SAMPLES
        for report in reports:
            read = report.read_bytes
            assert read.local + read.remote == report.samples * ROW_BYTES
            assert 0 < read.remote < 0.15 * read.local + taken_over * ROW_BYTES
        whole.close()
        trial.close()


@pytest.mark.long
def test_ranks_without_prep_and_ranks_that_share_a_node(nodes, data, feed_name):
    """Homes on A and B; ranks on A, A and C; batches of 64 for 3.

    C reads its third and hardly more, although it pulls some small parts whole. The ranks of A need two thirds. Half of
    the samples are there, so they read a sixth from B.
    """
    first, second = nodes.add(), nodes.add()
    with mbaas.serve(feed_name, data, augmented(), prep_workers=2, **OPTIONS) as feed:
        third = nodes.add()
        assert sorted(node.workers for node in feed.status().nodes) == [1, 1]
        whole, trial = Whole(feed), Ranks(feed, [first, first, third])
        run(feed, trial, whole, 2)
        reports = trial.reports()
        on_first, third = reports[0].read_bytes.remote + reports[1].read_bytes.remote, reports[2].read_bytes
        assert third.local == 0
        assert third.remote == pytest.approx(reports[2].samples * ROW_BYTES, rel=0.05)
        assert on_first == pytest.approx(2 * SAMPLES * ROW_BYTES / 6, rel=0.5)
        assert {node.node for node in feed.status().nodes} == {first.node_id, second.node_id}
        whole.close()
        trial.close()


@pytest.mark.long
def test_a_node_dies_and_its_parts_are_made_elsewhere(nodes, data, feed_name):
    """Ranks on A and B, homes on B and C. C dies in the first epoch: B prepares all, and that epoch keeps its plan."""
    first, second, doomed = nodes.add(0), nodes.add(), nodes.add()
    with mbaas.serve(feed_name, data, augmented(), prep_workers=2, **OPTIONS) as feed:
        trial = Ranks(feed, [first, second])
        result(trial.each(lambda _, actor: actor.take.remote(3)))
        nodes.kill(doomed)
        for records in zip(*result(trial.begin(2)), strict=True):
            assert union_flaws(records, range(SAMPLES), batch_size=BATCH) == []
        wait_until(lambda: [node.node for node in feed.status().nodes] == [second.node_id], "C is gone")
        trial.close()


@pytest.mark.long
def test_rows_are_asked_for_one_block_ahead(nodes, data, feed_name):
    """Both ranks are on the head, which prepares nothing.

    While a trial works on the second-to-last minibatch of a block, the next block may arrive. Its rows are then
    requested at the end of the step.
    """
    nodes.add()
    nodes.add()
    with (
        mbaas.serve(feed_name, data, augmented(), prep_workers=2, **OPTIONS) as feed,
        mbaas.join(feed.name, "trial", format="numpy", rank=0, world_size=2) as first,
        mbaas.join(feed.name, "trial", format="numpy", rank=1, world_size=2) as second,
    ):
        begun, session = [], first._stream
        per_block = session.info.order.block_samples // BATCH
        assert per_block > 1
        for _ in range(2):
            for step, batches in enumerate(zip(first, second, strict=True), 1):
                # No request crosses an epoch's end, so there is nothing to wait for in its last block.
                if session.received or not session.is_beginning(session.following):
                    wait_until(lambda: session.received or session._in_flight.is_answered(), "one is there")
                    if step % per_block == 0:
                        begun.append(bool(session.received) and session.received[0].fetch is not None)
                del batches
        assert first.ledger.exact
        assert second.ledger.exact
        assert begun
        assert all(begun)
