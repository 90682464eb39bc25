"""Data on draining nodes, such as spot instances, moves before the nodes leave."""

from __future__ import annotations

import pytest
from node_feeds import OPTIONS, SAMPLES, augmented, digests

import mbaas
from mbaas.tools.chaos.participants import alive
from support.trials import record_epoch
from support.waiting import wait_until

NOTICE_S = 120.0


@pytest.mark.usefixtures("own_workers")
def test_nothing_is_read_or_prepared_again_that_lay_on_a_node_which_was_given_notice(nodes, data, feed_name):
    """The feed's only worker and cache are on one node. The node exits on its own, so it holds no actor or object."""
    first = nodes.add()
    with mbaas.serve("one", data, augmented(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 3)
    with (
        mbaas.serve(feed_name, data, augmented(), prep_workers=1, **OPTIONS) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        records = [record_epoch(loader)]
        wait_until(lambda: feed.status().cached_samples == SAMPLES, "all samples are kept")
        read_before = feed.status().fetched.storage.nbytes
        nodes.add()
        nodes.drain(first, NOTICE_S)
        records += [record_epoch(loader), record_epoch(loader)]
        wait_until(lambda: not alive(nodes.raylet(first)), "the node has gone")
        status = feed.status()
        assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * 3
        assert [record.row_digest for record in records] == alone
        assert status.fetched.storage.nbytes == read_before, "cached samples moved from memory to memory"
        assert status.remade_blocks == 0
        assert any("will be gone soon" in note for note in status.notes)
        assert not any("is gone" in note for note in status.notes), "it was of no use to the feed any more"
