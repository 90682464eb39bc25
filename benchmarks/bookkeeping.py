"""Cost of order and bookkeeping per sample, from a thousand samples to a hundred million.

It measures only the arithmetic and the pure cores that run for every block, without files, pixels or Ray. Each part is
measured over the same number of blocks for every dataset size, so its cost must stay constant. Tables that grow with
the dataset, or loops over it, would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from mbaas.cache.planner import Planner
from mbaas.client.ledger import NOTHING
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.dataset import Dataset
from mbaas.dataset.readers.synthetic import synthetic
from mbaas.samples.order import SampleOrder, uniforms
from mbaas.samples.placement import PartRequest
from mbaas.tools.bench.render import figure_table

SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)
BLOCK_SAMPLES = 200  # divides every size: a short last block would cost more per sample
CONSUMERS = 8
DRAWS = 23  # random numbers of a random-resized crop and a flip
BLOCK_BYTES = 2**20
SOME = 100  # blocks that are reused in measurements of other parts than the order

Block = Callable[[int], object]
"""Function that does the work of one block, given its number."""


@dataclass(frozen=True)
class Cost:
    """Cost of bookkeeping for a dataset of some size.

    Attributes:
        samples: size of the dataset.
        ns_per_sample: part -> CPU nanoseconds for each prepared sample, median over repeats. Parts: "order" (position
            to sample), "chance" (random numbers of crop and flip), "labels" (and
            lengths), "miss" and "hit" (the cache's plan for a block to read, and for a cached one), "staging" (all
            events of eight consumers in step), "ledger" (count and hash of one consumer), "total" (the sum, an upper
            bound).
    """

    samples: int
    ns_per_sample: dict[str, float]


def measure(sizes: Sequence[int] = SIZES, *, blocks: int = 60, repeats: int = 5) -> list[Cost]:
    """Measure the costs for each of ``sizes``.

    Args:
        sizes: numbers of samples.
        blocks: number of blocks of `BLOCK_SAMPLES` samples in each repeat.
        repeats: measurements of each part; the median counts.
    """
    return [_cost(samples, blocks, repeats) for samples in sizes]


def _cost(samples: int, blocks: int, repeats: int) -> Cost:
    parts = {name: _ns_per_sample(block, blocks, repeats) for name, block in _parts(synthetic(samples))}
    return Cost(samples, {**parts, "total": sum(parts.values())})


def _ns_per_sample(block: Block, blocks: int, repeats: int) -> float:
    """Return the median over repeats, without the first one, which warms up caches."""
    numbers = iter(range(blocks * (repeats + 1)))
    times = [_timed(block, [next(numbers) for _ in range(blocks)]) for _ in range(repeats + 1)]
    return 1e9 * median(times[1:]) / (blocks * BLOCK_SAMPLES)


def _timed(block: Block, numbers: Sequence[int]) -> float:
    began = time.thread_time()  # CPU seconds: other programs on the machine do not count
    for number in numbers:
        block(number)
    return time.thread_time() - began


def _parts(dataset: Dataset) -> Iterator[tuple[str, Block]]:
    order = SampleOrder(len(dataset), 0, min(BLOCK_SAMPLES, len(dataset)))
    some = [order.sample_ids(block) for block in range(SOME)]
    yield "order", order.sample_ids
    yield "chance", lambda g: uniforms(0, order.epoch_of(g), some[g % SOME], substream=1, draws=DRAWS)
    yield "labels", lambda g: (dataset.labels(some[g % SOME]), dataset.lengths(some[g % SOME]))
    yield "miss", _fetch(Planner(order, dataset.lengths, cache_bytes=0, readahead_bytes=0))
    yield "hit", _hits(Planner(order, dataset.lengths, cache_bytes=2**62, readahead_bytes=0))
    yield "staging", _staging(order)
    yield "ledger", lambda g: NOTHING.plus(some[g % SOME])


def _fetch(planner: Planner) -> Block:
    """Return a function that fetches a block, from its plan to its release; reads take no time."""

    def fetch(block: int) -> None:
        wanted = PartRequest(block)
        for load in planner.begin_fetch(wanted):
            planner.filled(load, {})
        planner.locate(wanted)
        planner.end_fetch(wanted)

    return fetch


def _hits(planner: Planner) -> Block:
    fetch = _fetch(planner)
    for block in range(SOME):
        fetch(block)
    return lambda g: fetch(g % SOME)


def _staging(order: SampleOrder) -> Block:
    """Return a function that sends all events of a block: one of two workers makes it, and every consumer takes it."""
    limits = StagingLimits(budget_bytes=16 * BLOCK_BYTES, ahead_blocks=8)
    core = StagingState(limits, order.blocks_per_epoch, lambda _: BLOCK_BYTES)
    tasks: list[int] = []

    def send(event: ev.Event) -> None:
        tasks.extend(made.task for made in core.handle(event, 0.0) if isinstance(made, ev.Prepare))

    for worker in ("worker-0", "worker-1"):
        send(ev.WorkerUp(worker, 2))
    for consumer in range(CONSUMERS):
        send(ev.Join(str(consumer), 1))

    def step(block: int) -> None:
        for consumer in range(CONSUMERS):
            send(ev.Ask(str(consumer), 1, cursor=block, released=block, done=block))
        while not core.window.is_ready(block):
            send(ev.TaskEnded(tasks.pop(0)))

    return step


def table(costs: list[Cost]) -> Table:
    """Return a table with a row for each dataset size."""
    shown = figure_table("order and bookkeeping, ns a sample", ("samples", *costs[0].ns_per_sample))
    for cost in costs:
        shown.add_row(f"{cost.samples:,}", *(f"{ns:.1f}" for ns in cost.ns_per_sample.values()))
    return shown
