"""What the staging core, and the cutting of blocks, cost in feeds of many nodes and trials: the pure parts, no Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

from mbaas.core import events as ev
from mbaas.core.layout import StagingLimits
from mbaas.core.state import StagingState
from mbaas.placement import BlockPart, NodeWeight, Placement

SIZES = ((1, 1), (1, 32), (1, 128), (16, 1), (16, 16), (64, 1), (64, 64), (192, 1), (192, 16))
"""(nodes, trials) at which the core is measured."""

CUT_NODES = 32
CUT_SAMPLES = (64, 1 << 14)


@dataclass(frozen=True)
class CoreCost:
    """CPU seconds of the core in a feed of ``nodes`` with a worker each and ``trials`` in step.

    Attributes:
        part_s: for a part that was made, the orders and deliveries that follow included.
        ask_s: for a call.
    """

    nodes: int
    trials: int
    part_s: float
    ask_s: float


@dataclass(frozen=True)
class Growth:
    """CPU seconds of a step: ``base_s``, and what it costs more for each node, for each trial, and for each pair of
    them.
    """

    base_s: float
    more_s: tuple[float, float, float]

    def at(self, nodes: int, trials: int) -> float:
        """CPU seconds in a feed of this size."""
        by_node, by_trial, by_pair = self.more_s
        return self.base_s + by_node * nodes + by_trial * trials + by_pair * nodes * trials


def core_cost(nodes: int, trials: int, *, blocks: int = 3) -> CoreCost:
    """Drive a staging core through blocks of one part a node, with all trials in step."""
    parts = tuple(BlockPart(f"node-{i}", 1) for i in range(nodes))
    limits = StagingLimits(budget_bytes=8, ahead_blocks=4)
    core = StagingState(limits, 1 << 30, lambda _: 1, lambda _: parts)
    tasks: deque[int] = deque()
    asked, made = _Stopwatch(), _Stopwatch()

    def send(event: ev.Event) -> None:
        tasks.extend(i.task for i in core.handle(event, 0.0) if isinstance(i, ev.Prepare))

    for block_part in parts:
        send(ev.WorkerUp(block_part.home, 2, block_part.home))
    for trial in range(trials):
        send(ev.Join(str(trial), 1))
    for block in range(blocks + 1):
        if block == 1:  # the first one fills the window
            asked, made = _Stopwatch(), _Stopwatch()
        for trial in range(trials):
            with asked:
                send(ev.Ask(str(trial), 1, cursor=block, released=block, done=block))
        while not core.window.is_ready(block):
            with made:
                send(ev.TaskEnded(tasks.popleft()))
    return CoreCost(nodes, trials, made.mean_s, asked.mean_s)


class _Stopwatch:
    """CPU seconds of what happens within it, on average."""

    def __init__(self) -> None:
        self._total_s, self._times = 0.0, 0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *exc_info: object) -> None:
        self._total_s += time.thread_time() - self._began
        self._times += 1

    @property
    def mean_s(self) -> float:
        return self._total_s / max(1, self._times)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Costs, none below 0, that explain measured seconds with the least relative error.

    Args:
        rows: how often each step was made, for each measurement.
        seconds: of each measurement, above 0.
    """
    measured = np.maximum(np.array(seconds, np.float64), 1e-12)
    solved, _ = nnls(np.array(rows, np.float64) / measured[:, None], np.ones(len(measured)))
    return np.asarray(solved, np.float64)


def growth(points: Sequence[CoreCost]) -> tuple[Growth, Growth]:
    """What a part and a call cost, fitted over sizes."""
    rows = [(1.0, p.nodes, p.trials, p.nodes * p.trials) for p in points]
    part, ask = (fit(rows, seconds) for seconds in ([p.part_s for p in points], [p.ask_s for p in points]))
    return _growth(part), _growth(ask)


def _growth(found: NDArray[np.float64]) -> Growth:
    base_s, by_node, by_trial, by_pair = found.tolist()
    return Growth(base_s, (by_node, by_trial, by_pair))


def cut_costs_s() -> tuple[float, float]:
    """CPU seconds to find the homes of a block, for each node: of every sample, and once."""
    few, many = (_homes_s(samples) / CUT_NODES for samples in CUT_SAMPLES)
    each_s = max(0.0, (many - few) / (CUT_SAMPLES[1] - CUT_SAMPLES[0]))
    return each_s, max(0.0, few - CUT_SAMPLES[0] * each_s)


def _homes_s(samples: int, *, repeats: int = 5) -> float:
    """CPU seconds to find the homes of so many samples on `CUT_NODES` nodes, the least of some tries."""
    placement = Placement(1, tuple(NodeWeight(f"node-{i}", 1) for i in range(CUT_NODES)), (inf,) * CUT_NODES)
    ids, times = np.arange(samples), []
    for _ in range(repeats):
        began = time.thread_time()
        placement.of(ids)
        times.append(time.thread_time() - began)
    return min(times)
