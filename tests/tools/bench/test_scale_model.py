"""The model matches hand calculations, and invariants hold for every system."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.scale.clock import Clock, Cores, Links, Thread
from benchmarks.scale.forecast import Scaling, Site, coordinator_full_at, forecast, tables
from benchmarks.scale.model import simulate
from benchmarks.scale.real_feeds import Checked
from benchmarks.scale.system import Costs, System, bounds, coordinator_cost_s
from mbaas.errors import ConfigError
from mbaas.tools.bench.report import Machine

pytestmark = pytest.mark.slow

EVEN = System(even=True, block_samples=100)


# ---- building blocks ----


def test_threads_serve_in_order_and_cores_are_shared() -> None:
    """One core in turns of 1 s. A: 2 s and 1 s, B: 2 s. They run A B A B A: A ends at 3 and 5 s, B at 4 s."""
    clock = Clock()
    cores = Cores(clock, 1, slice_s=1.0)
    one, other = Thread(clock, cores), Thread(clock, cores)
    ended = []
    for thread, name, cpu_s in ((one, "A1", 2.0), (other, "B", 2.0), (one, "A2", 1.0)):
        thread.do(cpu_s, lambda name=name: ended.append((name, clock.now)))  # type: ignore[misc]
    clock.run(lambda: False)
    assert ended == [("A1", 3.0), ("B", 4.0), ("A2", 5.0)]
    assert cores.busy_s() == 5.0
    assert (one.busy_s(), other.busy_s()) == (5.0, 4.0)


def test_others_slow_the_cores() -> None:
    """With 1.5 of 2 cores taken, 1 s of CPU takes 4 s."""
    clock = Clock()
    Thread(clock, Cores(clock, 2, taken=1.5)).do(1.0, lambda: None)
    clock.run(lambda: False)
    assert clock.now == pytest.approx(4.0)


def test_links_carry_one_transfer_after_the_other() -> None:
    """At 10 bytes/s, 20 bytes and then 10 end after 2 s and 3 s. At 1 s the link was busy for 1 s out of 3."""
    clock = Clock()
    links = Links(clock, 2, 10.0)
    assert links.carry_one(1, 20.0) == 2.0
    assert links.carry_one(1, 10.0) == 3.0
    clock.after(1.0, lambda: None)
    clock.run(lambda: False)
    assert links.busy_s().tolist() == [0.0, 1.0]


# ---- systems by hand ----


def test_prep_alone() -> None:
    """4 nodes, 2 workers each, 4 ms a sample: 8 / 0.004 = 2,000 samples/s, with every worker always busy.

    Blocks finish in pairs, so a line through 60 blocks does not have quite that slope.
    """
    flow = simulate(replace(EVEN, nodes=4, workers=2, prep_s=0.004), Costs())
    assert flow.samples_per_s == pytest.approx(2000.0, rel=1e-3)
    assert (flow.full, flow.busy["prep"]) == ("prep", pytest.approx(1.0))


def test_a_slower_trial_holds_all() -> None:
    """3 trials need 1 ms a sample, prep needs 0.5 ms: 1,000 samples/s for each trial, and prep is half busy."""
    flow = simulate(replace(EVEN, trials=3, prep_s=0.0005, step_s=0.001), Costs())
    assert flow.samples_per_s == pytest.approx(1000.0)
    assert flow.busy["prep"] == pytest.approx(0.5, rel=0.02)


def test_coordinator_alone() -> None:
    """2 nodes, 3 trials, one block a call.

    A block costs 2 parts x 5 ms + 3 calls x 2 ms + 3 deliveries x (1 ms + 2 parts x 2 ms) = 31 ms. The rate is
    100 / 0.031 = 3,226 samples/s.
    """
    system = replace(EVEN, nodes=2, trials=3, want=1)
    costs = Costs(part_s=0.005, ask_s=0.002, delivery_s=0.001, ref_s=0.002)
    assert coordinator_cost_s(system, costs, blocks_a_call=1) == pytest.approx(0.031)
    flow = simulate(system, costs)
    assert flow.samples_per_s == pytest.approx(100 / 0.031, rel=0.02)
    assert flow.full == "coordinator"


def test_nobody_asks_across_the_end_of_an_epoch() -> None:
    """Blocks take 0.1 s, calls 50 ms. Only an epoch's first call is not made ahead: 400 / (0.4 + 0.05) = 889."""
    flow = simulate(replace(EVEN, samples=400, step_s=0.001), Costs(ask_s=0.05))
    assert flow.samples_per_s == pytest.approx(400 / 0.45, rel=0.01)


def test_growth_is_what_a_part_costs_more() -> None:
    """A part: 1 ms + 4 x 1 ms + 2 x 2 ms + 8 x 0.5 ms = 13 ms for 4 nodes and 2 trials; 4 parts: 52 ms."""
    system, costs = (
        replace(EVEN, nodes=4, trials=2),
        Costs(part_s=0.001, part_growth_s=(0.001, 0.002, 0.0005)),
    )
    assert coordinator_cost_s(system, costs, blocks_a_call=1) == pytest.approx(0.052)


def test_storage_of_which_half_is_kept() -> None:
    """2 nodes of 1 MB/s, samples of 10 kB, half from storage: 2 x 1e6 / 5e3 = 400 samples/s."""
    system = replace(EVEN, nodes=2, raw_bytes=1e4, stored_share=0.5, storage_bytes_per_s=1e6)
    flow = simulate(system, Costs())
    assert (flow.samples_per_s, flow.full) == (pytest.approx(400.0), "storage")


def test_links_of_the_node_with_the_trial() -> None:
    """4 nodes, one trial: 3/4 of each block of 100 x 1 kB arrive over a link of 1 MB/s in 75 ms.

    A pull begins when the previous block is used up, so nothing hides it: 100 / 0.075 = 1,333 samples/s.
    """
    flow = simulate(replace(EVEN, nodes=4, sample_bytes=1e3, link_bytes_per_s=1e6), Costs())
    assert (flow.samples_per_s, flow.full) == (pytest.approx(100 / 0.075), "link in")


def test_trials_of_a_node_share_what_was_pulled() -> None:
    """As above with 8 trials on 4 nodes: each node still pulls a block only once."""
    flow = simulate(replace(EVEN, nodes=4, trials=8, sample_bytes=1e3, link_bytes_per_s=1e6), Costs())
    assert flow.samples_per_s == pytest.approx(100 / 0.075, rel=0.02)


def test_cutting_costs_each_node_all_samples() -> None:
    """10 nodes: a cut takes 100 samples x 1 us x 10 nodes + 10 x 100 us = 2 ms.

    A worker's part waits for 6 cuts, 12 ms a block; the coordinator cuts once, 2 ms.
    """
    flow = simulate(replace(EVEN, nodes=10), Costs(cut_s=1e-6, cut_node_s=1e-4))
    assert flow.samples_per_s == pytest.approx(100 / 0.012)
    assert (flow.full, flow.busy["coordinator"]) == ("fetch", pytest.approx(2 / 12))


def test_chance_costs_nothing_where_parts_can_be_taken_over() -> None:
    """Idle workers take over parts of nodes with more of a block; if links are too slow for that, nodes wait."""
    even = simulate(replace(EVEN, nodes=8, prep_s=0.001), Costs())
    uneven = replace(EVEN, nodes=8, prep_s=0.001, even=False, raw_bytes=1e3)
    assert simulate(uneven, Costs()).samples_per_s == pytest.approx(even.samples_per_s, rel=0.02)
    slow = simulate(replace(uneven, link_bytes_per_s=2e5), Costs())
    assert 0.75 * even.samples_per_s < slow.samples_per_s < 0.98 * even.samples_per_s


def test_settings_check_themselves() -> None:
    with pytest.raises(ConfigError, match="nodes must be at least 1, got 0"):
        System(nodes=0)
    with pytest.raises(ConfigError, match="prep_s must be at least 0, got -1"):
        System(prep_s=-1.0)


# ---- invariants of every system ----

systems = st.builds(
    System,
    nodes=st.integers(1, 6),
    trials=st.integers(1, 6),
    workers=st.integers(1, 3),
    block_samples=st.integers(30, 200),
    prep_s=st.sampled_from([0.0, 1e-4, 1e-3]),
    sample_bytes=st.just(1000.0),
    raw_bytes=st.just(1000.0),
    stored_share=st.sampled_from([0.0, 0.5, 1.0]),
    storage_bytes_per_s=st.sampled_from([1e6, 1e8]),
    link_bytes_per_s=st.sampled_from([1e6, 1e8, math.inf]),
    step_s=st.sampled_from([0.0, 1e-4]),
    ahead_blocks=st.integers(2, 8),
    seed=st.integers(0, 99),
)
costs_of = st.builds(
    Costs,
    part_s=st.floats(1e-4, 1e-3),
    ask_s=st.floats(0, 1e-3),
    delivery_s=st.floats(0, 1e-3),
    ref_s=st.floats(0, 1e-3),
    fetch_s=st.floats(0, 1e-3),
    open_s=st.floats(0, 1e-3),
    pull_s=st.sampled_from([0.0, 5e-3]),
    cut_s=st.sampled_from([0.0, 1e-6]),
)
some = settings(max_examples=20, deadline=None)


@some
@given(systems, costs_of)
def test_nothing_is_busier_than_always_nor_faster_than_its_bound(system: System, costs: Costs) -> None:
    """All staged blocks may already be prepared when a window of 60 blocks begins."""
    flow = simulate(system, costs, blocks=60)
    assert max(flow.busy.values()) <= 1 + 1e-9
    exact = simulate(replace(system, even=True), costs, blocks=60)
    assert exact.samples_per_s <= min(bounds(system, costs).values()) * (1 + system.staged_blocks / 60)


@some
@given(systems, costs_of)
def test_twice_the_trials_never_get_more_each(system: System, costs: Costs) -> None:
    once, twice = (simulate(replace(system, trials=n), costs).samples_per_s for n in (system.trials, 2 * system.trials))
    assert twice <= 1.02 * once


@some
@given(systems, costs_of)
def test_the_same_system_flows_the_same(system: System, costs: Costs) -> None:
    assert simulate(system, costs, blocks=10) == simulate(system, costs, blocks=10)


# ---- large systems ----


def test_a_hundred_nodes_and_a_billion_samples() -> None:
    """A part costs the coordinator 5 ms, and 1 ms per delivery: 0.7 s for a block of 100 parts and 2 trials.

    One core allows 1 / 0.7 blocks/s. All other limits are higher, so the coordinator would need more cores.
    """
    seen = forecast(Site(trial_samples_per_s=1e6), 100, 2, Costs(part_s=5e-3, ref_s=1e-3))
    assert seen.full == "coordinator"
    assert seen.samples_per_s == pytest.approx(seen.block_samples / 0.7, rel=0.05)
    assert seen.epoch_s == pytest.approx(1e9 / seen.samples_per_s)
    assert seen.needed_cores == pytest.approx(0.7 * seen.otherwise_samples_per_s / seen.block_samples)
    assert seen.needed_cores > 1


def test_where_one_coordinator_is_full() -> None:
    """A trial takes 3,000 samples/s. With 16 nodes or more a block has 2,816 samples, and 19 are in flight, in 8 GiB.

    A trial uses up a block in 0.94 s, which is 94 nodes at 10 ms a part.
    """
    costs = Costs(part_s=0.01)
    assert coordinator_full_at(Site(), 1, costs) == 94
    assert coordinator_full_at(Site(), 1, Costs(part_s=1e-6)) is None


def test_the_table_of_the_model() -> None:
    costs = Costs(part_s=0.00123, ref_s=0.001)
    checked = Checked("prep", 4, 1000.0, 1100.0, "prep", 0.1)
    looks = (forecast(Site(), 4, 4, costs),)
    out = io.StringIO()
    scaling = Scaling(Machine(), costs, 0.07, (checked,), Site(), looks, {1: 268, 0: None})
    Console(file=out, width=160).print(tables(scaling))
    text = out.getvalue()
    for figure in ("part 1.23 ms", "explained to 7%", "+10%", "1 trial, from 268 nodes", "as nodes: never full"):
        assert figure in text, figure
