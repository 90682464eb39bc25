"""Descriptions of a modelled feed: its size, the costs of its steps, and its arithmetic bounds.

The model (`benchmarks.scale.model`) follows the steps of the service for each block. A coordinator cuts the block and
sends its parts to the home nodes. Each node reads missing bytes, fetches and prepares. Parts are reported to the
coordinator, which hands the whole block to every trial that asked. The trial's node pulls parts from other nodes. Costs
are measured (`benchmarks.scale.calibration`), decisions are the service's, and queues and waits follow. Deaths and
deadlines are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mbaas.client.stream import WANTED_BLOCKS
from mbaas.errors import ConfigError

OWN_CUTS = 6
"""Computations of the homes of a block for each part: two by the worker, four by its cache node."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds of single steps, and waits.

    Attributes:
        part_s: coordinator: send a part and receive its report.
        ask_s, delivery_s, ref_s: coordinator: receive a call for blocks, deliver a block, and each of its parts.
        part_growth_s, ask_growth_s: additional cost of a part or a call, for each node, each trial, and each
            (node, trial) pair.
        cut_s, cut_node_s: finding the homes of a block, for each node: per sample, and once.
        own_cuts: computations of the homes of a block on a preparing node, before one of its parts can be prepared.
        fetch_s: worker and cache: fetch the bytes of a part.
        prep_s: worker: prepare a sample of the calibration, which is smaller than most.
        open_s, open_part_s: trial: open a block, and each part in it.
        pull_s: least time that a trial waits for parts on other nodes.
        daemon_part_s, daemon_pull_s: Ray's daemons: for a part, and for a part that a node pulls from another.
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
        nodes, trials: their numbers. Trials are spread over the nodes.
        workers: prep workers of a node.
        block_samples: samples in a block.
        prep_s: seconds of a worker for a sample.
        prep_sleeps: whether preparation sleeps instead of using a core.
        sample_bytes, raw_bytes: bytes of a prepared and of a raw sample.
        stored_share: fraction of the samples that is read from storage in every epoch.
        storage_bytes_per_s, link_bytes_per_s: storage bandwidth of a node, and its link in each direction.
        step_s: seconds of a training step per sample; it needs no core.
        ahead_blocks: blocks prepared ahead of the fastest trial.
        staged_blocks: blocks that fit the staging budget.
        want: most blocks in the answer of one call.
        samples: in an epoch.
        cores: number of cores shared by all processes, as if all nodes were on one machine; None: no limit.
        taken_cores: cores used by programs outside the feed.
        even: whether blocks are cut into equal parts, instead of by the homes of their samples.
        seed: of the random order of samples.

    Raises:
        ConfigError: a number below 1, or a time or size below 0.
    """

    nodes: int = 1
    trials: int = 1
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
        counts = ("nodes", "trials", "workers", "block_samples", "ahead_blocks", "staged_blocks", "want")
        least = {**dict.fromkeys(counts, 1), "samples": 1}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 0):
                raise ConfigError(f"{name} must be at least {least.get(name, 0)}, got {value}")

    @property
    def trial_nodes(self) -> int:
        """Number of nodes with trials."""
        return min(self.nodes, self.trials)


def part_cost_s(system: System, costs: Costs) -> float:
    """Return the coordinator's CPU seconds for a part, in a feed of this size."""
    return costs.part_s + growth_s(costs.part_growth_s, system.nodes, system.trials)


def ask_cost_s(system: System, costs: Costs) -> float:
    """Return the coordinator's CPU seconds for a call, in a feed of this size."""
    return costs.ask_s + growth_s(costs.ask_growth_s, system.nodes, system.trials)


def growth_s(more_s: tuple[float, float, float], nodes: int, trials: int) -> float:
    """Return the additional cost of a step in a feed of this size, in CPU seconds."""
    by_node, by_trial, by_pair = more_s
    return by_node * nodes + by_trial * trials + by_pair * nodes * trials


def cut_cost_s(system: System, costs: Costs) -> float:
    """Return the CPU seconds to cut a block once; 0 on a single node."""
    return system.nodes * (costs.cut_node_s + costs.cut_s * system.block_samples) if system.nodes > 1 else 0.0


def coordinator_cost_s(system: System, costs: Costs, *, blocks_a_call: float) -> float:
    """Return the coordinator's CPU seconds for a block."""
    calls = system.trials * ask_cost_s(system, costs) / blocks_a_call
    deliveries = system.trials * (costs.delivery_s + system.nodes * costs.ref_s)
    return cut_cost_s(system, costs) + system.nodes * part_cost_s(system, costs) + calls + deliveries


def bounds(system: System, costs: Costs) -> dict[str, float]:
    """Return the upper bound that each server sets on the feed's samples/s, by arithmetic.

    `benchmarks.scale.model.simulate` never exceeds them. The coordinator's bound assumes the best case: every call
    returns as many blocks as allowed.
    """
    nodes, block = system.nodes, system.block_samples
    own = block / nodes
    seconds = {
        "coordinator": coordinator_cost_s(system, costs, blocks_a_call=system.want),
        "fetch": (costs.fetch_s + costs.own_cuts * cut_cost_s(system, costs)) / system.workers,
        "prep": own * system.prep_s / system.workers,
        "storage": own * system.stored_share * system.raw_bytes / system.storage_bytes_per_s,
        "link in": own * (nodes - 1) * system.sample_bytes / system.link_bytes_per_s,
        "link out": own * _readers_elsewhere(system) * system.sample_bytes / system.link_bytes_per_s,
        "trial": costs.open_s + nodes * costs.open_part_s + block * system.step_s,
    }
    return {name: block / s if s > 0 else math.inf for name, s in seconds.items()}


def _readers_elsewhere(system: System) -> float:
    """Return the mean number of nodes that pull a node's parts."""
    return system.trial_nodes * (system.nodes - 1) / system.nodes
