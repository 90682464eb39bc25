"""Forecasts of the model for larger clusters than this machine: up to 256 nodes and trials, 10^9 samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks import rows
from benchmarks.scale.calibration import calibrate
from benchmarks.scale.model import simulate
from benchmarks.scale.real_feeds import Checked, check
from benchmarks.scale.system import Costs, System, bounds, coordinator_cost_s
from mbaas.base.units import counted
from mbaas.core.layout import block_samples, blocks_in_budget, blocks_in_flight
from mbaas.tools.bench.render import machine_line
from mbaas.tools.bench.report import Machine

SIZES = ((1, 1), (1, 8), (1, 256), (4, 4), (16, 1), (16, 16), (64, 8), (64, 64), (256, 1), (256, 8))
"""Simulated (nodes, trials): 256 nodes take half a minute each, a thousand more than five."""

MOST = 1000
"""Upper bound of the nodes in `coordinator_full_at`."""

EXACT_NODES, EXACT_PAIRS = 64, 1000
"""Up to these numbers of nodes and of (node, trial) pairs, 60 blocks are simulated; beyond them, `FEW_BLOCKS`. In
larger feeds every event costs the staging core more time, also in the simulation.
"""

FEW_BLOCKS = 12


@dataclass(frozen=True, kw_only=True)
class Site:
    """The modelled cluster and samples, by default photographs as in ImageNet.

    Attributes:
        samples: size of the dataset; all nodes together keep it in memory.
        sample_bytes: bytes of a prepared sample.
        batch: samples in a minibatch.
        workers: prep workers of a node.
        prep_s: seconds of a worker for a sample.
        trial_samples_per_s: training rate of a trial that never waits.
        link_bytes_per_s: bandwidth of a node's link in each direction.
        staging_bytes: the feed's budget.
    """

    samples: int = 10**9
    sample_bytes: int = 150_544
    batch: int = 256
    workers: int = 8
    prep_s: float = 1 / 400
    trial_samples_per_s: float = 3000.0
    link_bytes_per_s: float = 3.125e9
    staging_bytes: int = 8 << 30

    def system(self, nodes: int, trials: int) -> System:
        """Describe a feed on these nodes, with blocks of the size that `mbaas.serve` would choose."""
        return System(
            nodes=nodes,
            trials=trials,
            workers=self.workers,
            block_samples=block_samples(
                num_samples=self.samples,
                batch_size=self.batch,
                sample_bytes=self.sample_bytes,
                staging_bytes=self.staging_bytes,
                workers=self.workers,
                most_workers=self.workers,
                sample_s=self.prep_s,
                nodes=nodes,
            ),
            prep_s=self.prep_s,
            sample_bytes=self.sample_bytes,
            step_s=1 / self.trial_samples_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            ahead_blocks=blocks_in_flight(self.workers) - 1,
            staged_blocks=blocks_in_budget(self.workers),
        )


@dataclass(frozen=True)
class Forecast:
    """Forecast for one size.

    Attributes:
        nodes, trials, block_samples: the size.
        samples_per_s: rate of each trial, with one coordinator.
        busy: server -> fraction of the time that its busiest instance is busy.
        full: the busiest server.
        otherwise_samples_per_s: rate without the limit of the coordinator.
        otherwise_full: the server that limits this rate.
        needed_cores: cores that the coordinator would need at this rate.
        epoch_s: seconds of an epoch, with one coordinator.
    """

    nodes: int
    trials: int
    block_samples: int
    samples_per_s: float
    busy: dict[str, float]
    full: str
    otherwise_samples_per_s: float
    otherwise_full: str
    needed_cores: float
    epoch_s: float


@dataclass(frozen=True)
class Scaling:
    """All results of the model.

    Attributes:
        machine, costs, cost_error: the measured machine, its costs, and the error of their fit.
        checked: the model against real runs; empty if not requested.
        site: the modelled cluster.
        forecasts: one for each size.
        full_at: trials (0: as many as nodes) -> least number of nodes at which one coordinator is the first limit; None
            if it never is.
    """

    machine: Machine
    costs: Costs
    cost_error: float
    checked: tuple[Checked, ...]
    site: Site
    forecasts: tuple[Forecast, ...]
    full_at: dict[int, int | None]


def run(check_nodes: Sequence[int] = (), report: Callable[[str], None] = print) -> Scaling:
    """Calibrate, check on ``check_nodes`` local nodes, and forecast all `SIZES`."""
    calibration = calibrate(report)
    costs, site = calibration.costs, Site()
    checked = check(costs, check_nodes, report) if check_nodes else ()
    report("simulating larger systems")
    return Scaling(
        machine=Machine(),
        costs=costs,
        cost_error=calibration.error,
        checked=checked,
        site=site,
        forecasts=tuple(forecast(site, nodes, trials, costs) for nodes, trials in SIZES),
        full_at={trials: coordinator_full_at(site, trials, costs) for trials in (1, 8, 64, 0)},
    )


def forecast(site: Site, nodes: int, trials: int, costs: Costs) -> Forecast:
    """Forecast one size."""
    system = site.system(nodes, trials)
    few = nodes > EXACT_NODES or nodes * trials > EXACT_PAIRS
    flow = simulate(system, costs, blocks=FEW_BLOCKS if few else 60, warm_blocks=8 if few else 12)
    others = _others(system, costs)
    slowest = min(others, key=lambda name: others[name])
    return Forecast(
        nodes=nodes,
        trials=trials,
        block_samples=system.block_samples,
        samples_per_s=flow.samples_per_s,
        busy=flow.busy,
        full=flow.full,
        otherwise_samples_per_s=others[slowest],
        otherwise_full=slowest,
        needed_cores=coordinator_cost_s(system, costs, blocks_a_call=1) * others[slowest] / system.block_samples,
        epoch_s=site.samples / flow.samples_per_s,
    )


def _others(system: System, costs: Costs) -> dict[str, float]:
    return {name: rate for name, rate in bounds(system, costs).items() if name != "coordinator"}


def coordinator_full_at(site: Site, trials: int, costs: Costs) -> int | None:
    """Return the least number of nodes at which one coordinator limits the feed; ``trials`` 0: as many as nodes."""
    for nodes in range(1, MOST + 1):
        system = site.system(nodes, trials or nodes)
        # one block a call is the worst case: if trials wait for prep, no call can return more
        blocks_per_s = min(_others(system, costs).values()) / system.block_samples
        if math.isfinite(blocks_per_s) and coordinator_cost_s(system, costs, blocks_a_call=1) * blocks_per_s > 1:
            return nodes
    return None


def tables(scaling: Scaling) -> RenderableType:
    """Return tables of the costs, of the check against real runs, and of the forecasts."""
    return Group(*_table_parts(scaling))


def _table_parts(scaling: Scaling) -> Iterator[RenderableType]:
    yield Text(machine_line(scaling.machine))
    yield _costs_text(scaling)
    if scaling.checked:
        yield _check_table(scaling.checked)
    yield _forecast_table(scaling.forecasts)
    site = scaling.site
    for trials, nodes in scaling.full_at.items():
        who = "as many trials as nodes" if not trials else counted(trials, "trial")
        yield Text(f"one coordinator is full: {who}, from {nodes} nodes on" if nodes else f"{who}: never full")
    yield Text(
        f"A node: {site.workers} prep workers of {1 / site.prep_s:.0f} samples/s, a link of "
        f"{site.link_bytes_per_s / 1e9:.3g} GB/s; all caches together hold the dataset of {site.samples:,} samples; "
        f"{site.staging_bytes / 2**30:.0f} GiB of staging. A trial alone trains on "
        f"{site.trial_samples_per_s:.0f} samples/s. full: the busiest server. "
        "coordinator: its load. otherwise: the rate without the coordinator's limit. cores: needed at that rate.",
        style="dim",
    )


def _costs_text(scaling: Scaling) -> Text:
    costs = scaling.costs
    shown = {
        "part": costs.part_s,
        "call": costs.ask_s,
        "delivery": costs.delivery_s,
        "part in a delivery": costs.ref_s,
        "fetch": costs.fetch_s,
        "block in a trial": costs.open_s,
        "part in a trial": costs.open_part_s,
        "pull": costs.pull_s,
    }
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in shown.items())
    return Text(
        f"{times}; cutting a block: {1e6 * costs.cut_node_s:.0f} us and {1e9 * costs.cut_s:.0f} ns a sample, for each "
        f"node. The coordinator's CPU seconds are explained to {scaling.cost_error:.0%}."
    )


def _check_table(checked: tuple[Checked, ...]) -> Table:
    columns: dict[str, Callable[[Checked], str]] = {
        "full": lambda each: each.case,
        "nodes": lambda each: str(each.nodes),
        "real": lambda each: f"{each.real_samples_per_s:,.0f}",
        "model": lambda each: f"{each.said_samples_per_s:,.0f}",
        "error": lambda each: f"{each.error:+.0%}",
        "cores of others": lambda each: f"{each.others_cores:.1f}",
    }
    title = "the model against real feeds on this machine, samples/s of each trial"
    return rows(title, sorted(checked, key=lambda each: each.case), columns, words=("full",))


def _forecast_table(forecasts: tuple[Forecast, ...]) -> Table:
    columns: dict[str, Callable[[Forecast], str]] = {
        "nodes": lambda each: f"{each.nodes:,}",
        "trials": lambda each: f"{each.trials:,}",
        "rate": lambda each: f"{each.samples_per_s:,.0f}",
        "full": lambda each: each.full,
        "coordinator": lambda each: f"{each.busy['coordinator']:.0%}",
        "otherwise": lambda each: f"{each.otherwise_samples_per_s:,.0f}",
        "cores": lambda each: f"{each.needed_cores:.1f}",
        "epoch": lambda each: f"{each.epoch_s / 3600:,.0f} h",
    }
    return rows("larger systems, samples/s of each trial with one coordinator", forecasts, columns, words=("full",))
