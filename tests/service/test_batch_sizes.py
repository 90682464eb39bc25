"""Minibatches of any size, for any number of ranks, are cut from the same sequence of samples."""

from __future__ import annotations

import numpy as np
import pytest
from service_feeds import SAMPLES

import mbaas
from support.trials import Recorder, record_epoch

pytestmark = pytest.mark.usefixtures("ray_clean")

SIZES = (64, 48, 100, 500, 2000, 1)
"""The feed's size, sizes within a block (192), larger than a block, larger than the dataset, and 1."""


def sizes_of(samples, batch_size):
    whole, rest = divmod(samples, batch_size)
    return (batch_size,) * whole + ((rest,) if rest else ())


def test_consumers_with_batch_sizes_of_their_own_get_the_same_samples_in_the_same_order(plain):
    mbaas.announce(plain.name, [f"size {size}" for size in SIZES])
    before = plain.status().remade_blocks
    loaders = {size: mbaas.join(plain.name, consumer=f"size {size}", batch_size=size, format="numpy") for size in SIZES}
    records = {}
    for size, loader in loaders.items():
        records[size] = record_epoch(loader)
        assert len(loader) == len(records[size].sizes)
        loader.close()
    for size, record in records.items():
        assert record.flaws(range(SAMPLES)) == []
        assert record.sizes == sizes_of(SAMPLES, size)
        assert record.row_digest == records[64].row_digest
    assert plain.status().remade_blocks == before


@pytest.mark.parametrize("batch_size", [64, 100, 2000])
def test_drop_last_leaves_out_what_does_not_fill_a_minibatch(reseeded, batch_size):
    """1,003 samples: 15 minibatches of 64 with 43 left over, 10 of 100 with 3 left over, and none of 2,000."""
    with mbaas.join(reseeded.name, consumer="me", batch_size=batch_size, format="numpy") as loader:
        record = record_epoch(loader)
        assert len(loader) == len(record.sizes) == SAMPLES // batch_size
        assert record.flaws(record.sample_ids) == []
        assert set(record.sizes) <= {batch_size}


def test_epochs_differ_in_order_and_each_is_exact(plain):
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        one, two = record_epoch(loader), record_epoch(loader)
    assert one.flaws(range(SAMPLES)) == two.flaws(range(SAMPLES)) == []
    assert not np.array_equal(one.sample_ids, two.sample_ids)
    assert two.ledger.feed_epoch == one.ledger.feed_epoch + 1


@pytest.mark.parametrize("batch_size", [59, 64], ids=["divides the epoch", "does not"])
def test_the_last_minibatch_of_an_epoch_holds_no_block(plain, batch_size):
    """The trial's variable still refers to the minibatch after the loop."""
    with mbaas.join(plain.name, consumer="me", batch_size=batch_size, format="numpy") as loader:
        for batch in loader:
            size = len(batch["sample_id"])
        assert loader._stream.released() == loader._stream._unread, "no block is held"
        assert size == len(batch["sample_id"]) == (SAMPLES % batch_size or batch_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_of_a_trial_together_get_the_global_minibatch(plain, world_size):
    """100 samples for 3 ranks are 34, 33 and 33. The last minibatch holds 3. On one node each rank gets one run."""
    ranks = range(world_size)
    mbaas.announce(plain.name, ["whole"])
    mbaas.announce(plain.name, ["parallel"])
    assert sorted(member.name for member in plain.status().consumers) == ["parallel", "whole"], "a place for all ranks"
    whole = mbaas.join(plain.name, consumer="whole", batch_size=100, format="numpy")
    parts = [
        mbaas.join(plain.name, consumer="parallel", batch_size=100, format="numpy", rank=rank, world_size=world_size)
        for rank in ranks
    ]
    for batch, *shares in zip(whole, *parts, strict=True):
        sizes = [len(share["sample_id"]) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        for name in batch:
            np.testing.assert_array_equal(batch[name], np.concatenate([share[name] for share in shares]))
        del batch, shares
    for loader in (whole, *parts):
        assert loader.ledger.exact
        loader.close()


def test_another_seed_gives_other_orders_and_other_crops(plain, reseeded):
    """The same samples in the same feed epoch, with seeds 0 and 1."""
    plain_loader = mbaas.join(plain.name, consumer="me", format="numpy", batch_size=SAMPLES)
    other_loader = mbaas.join(reseeded.name, consumer="me", format="numpy", batch_size=SAMPLES)
    one, two = next(iter(plain_loader)), next(iter(other_loader))
    assert not np.array_equal(one["sample_id"], two["sample_id"])
    by_id = [batch["image"][np.argsort(batch["sample_id"])] for batch in (one, two)]
    same = np.all(by_id[0] == by_id[1], axis=(1, 2, 3))
    assert same.mean() < 0.01
    del one, two, by_id
    plain_loader.close()
    other_loader.close()


def test_a_sample_has_the_label_of_its_folder(plain):
    recorder = Recorder()
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        assert loader.class_names == tuple("0123456789")
        for batch in loader:
            recorder.add(batch)
            assert set(batch["label"] - batch["sample_id"] % 10) == {0}
        del batch
