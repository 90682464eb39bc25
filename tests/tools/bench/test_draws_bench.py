"""The benchmark of samples drawn by weight, on a small dataset."""

from __future__ import annotations

import pytest

from benchmarks.draws import measure, table


@pytest.mark.long
def test_a_cache_that_knows_the_weights_reads_less(no_ray: None) -> None:
    """With a tenth of the samples in half of the draws, a cache of a tenth saves half of the reads.

    So few samples are one block, which reads each sample once however often it is drawn, so the gain is small here.
    """
    found = measure(samples=2_000, cached=(0.1,), warm=4, epochs=2)
    balanced, ranked = found.reads
    assert balanced.by_weight == pytest.approx(0.5, abs=0.01)
    for each in (balanced, ranked):
        assert each.by_weight < 0.96 * each.by_arrival
    assert table(found).row_count == 2
