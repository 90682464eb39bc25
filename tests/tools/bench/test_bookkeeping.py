"""Order and bookkeeping cost the same for ten thousand samples and for a hundred million."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.bookkeeping import Cost, measure, table

pytestmark = pytest.mark.slow


def test_cost_is_flat() -> None:
    """In CPU time, so other programs hardly matter. A walk over the dataset would cost thousands of times more."""
    small, large = measure((10**4, 10**8), blocks=10, repeats=3)
    assert small.ns_per_sample.keys() == large.ns_per_sample.keys()
    for part in ("order", "miss", "hit", "staging", "total"):
        assert large.ns_per_sample[part] < 4 * small.ns_per_sample[part] + 200, part


def test_total_is_the_sum() -> None:
    (cost,) = measure((1000,), blocks=2, repeats=1)
    parts = {name: ns for name, ns in cost.ns_per_sample.items() if name != "total"}
    assert abs(sum(parts.values()) - cost.ns_per_sample["total"]) < 1e-6


def test_table_of_costs() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(table([Cost(10**8, {"order": 70.25, "total": 99.0})]))
    assert "100,000,000" in out.getvalue()
    assert "70.2" in out.getvalue()
