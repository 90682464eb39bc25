"""Describes a feed to be modelled: what it is, what its steps cost, and what bounds it by arithmetic.

The model (`benchmarks.scale.model`) makes the steps of the real thing, block by block: a coordinator cuts a block and
sends its parts to the nodes where the bytes are; each node reads what it lacks, fetches and prepares; the coordinator
hears of each part, and hands the whole block to every trial that asks; a trial's node pulls the parts that lie
elsewhere. Costs are measured (`benchmarks.scale.calibration`), decisions are the service's own, and queues and waits
follow from both. It leaves out deaths and the passing of deadlines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mbaas.client.session import WANTED_BLOCKS
from mbaas.errors import ConfigError

OWN_CUTS = 6
"""How often the homes of a block are computed for one part: by the worker twice, by its cache node four times."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds of single steps, and waits.

    Attributes:
        part_s: the coordinator sends a part and hears that it was made.
        ask_s, delivery_s, ref_s: it takes a call for blocks, hands a block to a trial, and each part of it.
        part_growth_s, ask_growth_s: what a part, or a call, costs more for each node and for each trial of the feed,
            and for each pair of them.
        cut_s, cut_node_s: what finding the homes of a block costs for each node: for every sample, and once.
        own_cuts: how often a block is cut before one of its parts can be prepared, by the node that prepares it.
        fetch_s: a worker and its cache fetch a part's bytes.
        prep_s: it prepares a sample of the calibration's own, which is smaller than most.
        open_s, open_part_s: a trial takes a block in hand, and each part of it.
        pull_s: the least time that a trial waits for parts that lie on other nodes.
        daemon_part_s, daemon_pull_s: what Ray's daemons do for a part, and for a part that a node pulls from another.
    """

    part_s: float = 0.0
    ask_s: float = 0.0
    delivery_s: float = 0.0
    ref_s: float = 0.0
    part_growth_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ask_growth_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    cut_s: float = 0.0
    cut_node_s: float = 0.0
    own_cuts: int = OWN_CUTS
    fetch_s: float = 0.0
    prep_s: float = 0.0
    open_s: float = 0.0
    open_part_s: float = 0.0
    pull_s: float = 0.0
    daemon_part_s: float = 0.0
    daemon_pull_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class System:
    """A feed, its nodes and its trials.

    Attributes:
        nodes, trials, lanes: how many there are. Trials are spread over the nodes; block i belongs to lane i mod
            ``lanes``.
        workers: prep workers of a node.
        block_samples: samples in a block.
        prep_s: seconds that a worker needs for a sample.
        prep_sleeps: whether it needs no core for them.
        sample_bytes, raw_bytes: bytes of a prepared sample, and of a raw one.
        stored_share: share of the samples whose bytes come from storage in every epoch.
        storage_bytes_per_s, link_bytes_per_s: what storage gives a node, and its link in each direction.
        step_s: seconds that a trial works on a sample, without a core.
        ahead_blocks: how far prep may run ahead of the furthest trial.
        staged_blocks: blocks that fit the staging budget.
        want: blocks that one call may bring.
        samples: in an epoch.
        cores: the cores that everything shares, as where nodes are simulated on one machine; None: everything has its
            own.
        taken_cores: how many of those programs use that are not part of the feed.
        even: whether blocks are cut in equal parts, not by chance.
        seed: chance follows from it.

    Raises:
        ConfigError: a number below 1, or a time or size below 0.
    """

    nodes: int = 1
    trials: int = 1
    lanes: int = 1
    workers: int = 1
    block_samples: int = 256
    prep_s: float = 0.0
    prep_sleeps: bool = False
    sample_bytes: float = 0.0
    raw_bytes: float = 0.0
    stored_share: float = 0.0
    storage_bytes_per_s: float = math.inf
    link_bytes_per_s: float = math.inf
    step_s: float = 0.0
    ahead_blocks: int = 4
    staged_blocks: int = 8
    want: int = WANTED_BLOCKS
    samples: int = 10**9
    cores: int | None = None
    taken_cores: float = 0.0
    even: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("nodes", "trials", "lanes", "workers", "block_samples", "ahead_blocks", "staged_blocks", "want")
        least = {**dict.fromkeys(counts, 1), "samples": 1}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 0):
                raise ConfigError(f"{name} must be at least {least.get(name, 0)}, got {value}")

    @property
    def trial_nodes(self) -> int:
        """Number of nodes that have trials."""
        return min(self.nodes, self.trials)


def part_cost_s(system: System, costs: Costs) -> float:
    """Return the CPU seconds of the coordinator for a part, in a feed of this size."""
    return costs.part_s + growth_s(costs.part_growth_s, system.nodes, system.trials)


def ask_cost_s(system: System, costs: Costs) -> float:
    """Return the CPU seconds of the coordinator for a call, in a feed of this size."""
    return costs.ask_s + growth_s(costs.ask_growth_s, system.nodes, system.trials)


def growth_s(more_s: tuple[float, float, float], nodes: int, trials: int) -> float:
    """Return what a step costs more in a feed of this size: for each node, for each trial, for each pair of both."""
    by_node, by_trial, by_pair = more_s
    return by_node * nodes + by_trial * trials + by_pair * nodes * trials


def cut_cost_s(system: System, costs: Costs) -> float:
    """Return the CPU seconds that it takes to cut a block once; a single node has nothing to cut."""
    return system.nodes * (costs.cut_node_s + costs.cut_s * system.block_samples) if system.nodes > 1 else 0.0


def coordinator_cost_s(system: System, costs: Costs, *, blocks_a_call: float) -> float:
    """Return the CPU seconds of the coordinator for a block."""
    calls = system.trials * ask_cost_s(system, costs) / blocks_a_call
    deliveries = system.trials * (costs.delivery_s + system.nodes * costs.ref_s)
    return cut_cost_s(system, costs) + system.nodes * part_cost_s(system, costs) + calls + deliveries


def bounds(system: System, costs: Costs) -> dict[str, float]:
    """Return the samples a second of the whole feed that each server allows, by arithmetic.

    `benchmarks.scale.model.simulate` is never above. The coordinator's bound is for the best case, in which every call
    brings as many blocks as it may.
    """
    nodes, block = system.nodes, system.block_samples
    own = block / nodes
    seconds = {
        "coordinator": coordinator_cost_s(system, costs, blocks_a_call=system.want) / system.lanes,
        "fetch": (costs.fetch_s + costs.own_cuts * cut_cost_s(system, costs)) / system.workers,
        "prep": own * system.prep_s / system.workers,
        "storage": own * system.stored_share * system.raw_bytes / system.storage_bytes_per_s,
        "link in": own * (nodes - 1) * system.sample_bytes / system.link_bytes_per_s,
        "link out": own * _readers_elsewhere(system) * system.sample_bytes / system.link_bytes_per_s,
        "trial": costs.open_s + nodes * costs.open_part_s + block * system.step_s,
    }
    return {name: block / s if s > 0 else math.inf for name, s in seconds.items()}


def _readers_elsewhere(system: System) -> float:
    """Return the number of nodes that pull a node's parts, on average over the nodes."""
    return system.trial_nodes * (system.nodes - 1) / system.nodes


def lanes_needed(system: System, costs: Costs, *, most_busy: float = 0.8) -> int:
    """Return the lanes with which no coordinator is busier than ``most_busy`` at the rate that all else allows."""
    others = {name: rate for name, rate in bounds(system, costs).items() if name != "coordinator"}
    blocks_per_s = min(others.values()) / system.block_samples
    if math.isinf(blocks_per_s):
        raise ConfigError("nothing but the coordinator bounds the system: no number of lanes is enough")
    # One block a call is the worst case: where trials wait for prep, no call can bring more.
    return max(1, math.ceil(coordinator_cost_s(system, costs, blocks_a_call=1) * blocks_per_s / most_busy))
