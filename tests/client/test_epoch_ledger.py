"""An epoch's ledger stays exact when a sample that was bad can be read again."""

import numpy as np

from mbaas.client.ledger import NOTHING, EpochProgress


def test_a_sample_that_a_state_says_was_bad_and_that_is_there_by_now_is_expected_too() -> None:
    """Samples 2 and 4 of 6 were bad when the state was saved. Sample 4 can be read now, so 5 are expected."""
    progress = EpochProgress(0, 1, feed_epoch=0, left_out={2, 4})
    for ids, position in (([0, 1, 3], 4), ([4, 5], 6)):
        progress.count(np.array(ids), position=position, shuffle=None, elsewhere=NOTHING)
    ledger = progress.close(6, 0)
    assert ledger.exact
    assert (ledger.samples, ledger.expected_samples) == (5, 5)
