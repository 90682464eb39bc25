"""Calibration finds the true costs, and costs of the core are measured separately."""

from __future__ import annotations

import pytest

from benchmarks.scale.calibration import (
    CORE_PARTS,
    RUNS,
    CoreCost,
    Growth,
    core_cost,
    cut_costs_s,
    explain,
    fit,
    growth,
)
from benchmarks.scale.real_feeds import FeedRun, Watched
from benchmarks.scale.system import Costs, System, part_cost_s

NO_GROWTH = Growth(0.0, (0.0, 0.0, 0.0))


def watched(run: FeedRun, costs: Costs, *, idle_s: float = 0.01) -> Watched:
    """Measurements of a run whose steps cost exactly ``costs``."""
    blocks_made, blocks = 100, 100 * run.trials
    parts, calls = blocks_made * run.nodes, blocks // (4 if run.block_step_s else 1)
    part_s = part_cost_s(System(nodes=run.nodes, trials=run.trials), costs)
    coordinator = parts * part_s + calls * costs.ask_s + blocks * (costs.delivery_s + run.nodes * costs.ref_s)
    return Watched(
        run=run,
        seconds=3.0,
        parts=parts,
        blocks=blocks,
        blocks_per_s=1.0,
        calls=calls,
        cpu_s={
            "Coordinator": coordinator + 3.0 * idle_s,
            "PrepWorker": parts * (costs.fetch_s + run.block_samples / run.nodes * costs.prep_s),
            "WatchedTrial": blocks * (costs.open_s + run.nodes * costs.open_part_s),
            "raylet": parts * costs.daemon_part_s + blocks * (run.nodes - 1) * costs.daemon_pull_s,
        },
        raw_bytes=1.0,
        others_cores=0.0,
    )


def test_costs_are_found_again() -> None:
    true = Costs(
        part_s=1.3e-3,
        ask_s=0.5e-3,
        delivery_s=0.2e-3,
        ref_s=0.9e-3,
        fetch_s=3e-3,
        prep_s=1e-4,
        open_s=0.8e-3,
        open_part_s=0.6e-3,
        daemon_part_s=1e-3,
        daemon_pull_s=2e-3,
    )
    runs = [watched(run, true) for run in RUNS]
    found, error = explain(runs, part=NO_GROWTH, ask=NO_GROWTH, cut_s=(0.0, 0.0), wait_s=0.007)
    for name in ("part_s", "ask_s", "delivery_s", "ref_s", "fetch_s", "prep_s", "open_s", "open_part_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    assert found.daemon_pull_s == pytest.approx(2e-3, rel=1e-3)
    assert found.pull_s == 0.007
    assert error < 1e-6


def test_what_the_core_costs_is_not_counted_twice() -> None:
    """A part costs 1.3 ms plus 0.01 ms per node, including 0.3 ms and the 0.01 ms for the core."""
    true = Costs(part_s=1.3e-3, part_growth_s=(0.01e-3, 0.0, 0.0), ask_s=1e-3, fetch_s=1e-3)
    found, _ = explain(
        [watched(run, true) for run in RUNS],
        part=Growth(0.3e-3, (0.01e-3, 0.0, 0.0)),
        ask=NO_GROWTH,
        cut_s=(0.0, 0.0),
        wait_s=0.0,
    )
    assert found.part_s == pytest.approx(1.3e-3, rel=1e-3)
    assert found.part_growth_s == (0.01e-3, 0.0, 0.0)


def test_no_cost_is_below_zero() -> None:
    """The best fit would be 3 and -1."""
    assert fit([(1, 1), (1, 2)], [2.0, 1.0]).min() >= 0.0


def test_growth_is_found_again() -> None:
    points = [
        CoreCost(n, m, 1e-5 + 1e-6 * n + 2e-6 * m + 1e-7 * n * m, 1e-5, 200, 200)
        for n, m in ((1, 1), (9, 1), (1, 9), (9, 9))
    ]
    part, ask = growth(points)
    assert part.base_s == pytest.approx(1e-5)
    assert part.more_s == pytest.approx((1e-6, 2e-6, 1e-7))
    assert part.at(100, 10) == pytest.approx(1e-5 + 1e-4 + 2e-5 + 1e-4)
    assert ask.at(100, 10) == pytest.approx(1e-5, rel=1e-3)


def test_the_core_is_driven_at_the_size_that_is_asked_for() -> None:
    """The minimum of five alternating rounds is used, because other load only slows rounds down."""
    rounds = [(core_cost(1, 1), core_cost(48, 8)) for _ in range(5)]
    small, large = (min(costs, key=lambda cost: cost.part_s) for costs in zip(*rounds, strict=True))
    assert (small.nodes, small.trials, small.parts, small.asks) == (1, 1, CORE_PARTS, CORE_PARTS)
    assert (large.nodes, large.trials, large.asks) == (48, 8, 5 * 8)
    assert 4 * 48 <= large.parts <= 5 * 48, "the last block may be incomplete"
    assert 0 < small.part_s < large.part_s < 0.1
    assert 0 < small.ask_s < 0.1


def test_cutting_has_a_price() -> None:
    each_s, once_s = cut_costs_s()
    assert 0 < each_s < 1e-5
    assert 0 <= once_s < 1e-2
