"""The ledger that a loader keeps of an epoch."""

import numpy as np

from mbaas.client.ledger import NOTHING, EpochProgress


def test_a_sample_that_a_state_says_was_bad_and_that_is_there_by_now_is_expected_too() -> None:
    """Of 6 samples, 2 and 4 were left out of the block when the state was saved; 4 is there when it is read again."""
    progress = EpochProgress(0, 1, feed_epoch=0, left_out={2, 4})
    for ids, position in (([0, 1, 3], 4), ([4, 5], 6)):
        progress.count(np.array(ids), position=position, shuffle=None, elsewhere=NOTHING)
    ledger = progress.close(6, 0)
    assert ledger.exact
    assert (ledger.samples, ledger.expected_samples) == (5, 5)
