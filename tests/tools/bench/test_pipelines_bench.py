"""The benchmark of trials with pipelines of their own, on a small dataset."""

from __future__ import annotations

import pytest

from benchmarks.pipelines import measure, table


@pytest.mark.long
@pytest.mark.timeout(400)
def test_pipelines_read_together_and_equal_ones_prepare_once(no_ray: None) -> None:
    found = measure(samples=12_000, cached=0.5, staged=0.25, pipelines=(1, 3), epochs=4)
    assert found.reads[1] == pytest.approx(0.5, abs=0.05)
    assert found.reads[3] < 1.2, "of 1.5 without shared reads"
    assert found.prepared_equal == pytest.approx(found.prepared_alone, rel=0.2)
    assert found.rate_beside > 0.5 * found.rate_alone
    assert table(found).row_count == 7
