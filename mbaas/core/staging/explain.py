"""Checks across the tables of the staging core: why a consumer waits, and whether the tables are consistent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mbaas.base.units import size
from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.epochs import EpochTable
from mbaas.core.staging.streams import block_name, shown_block
from mbaas.core.staging.tasks import TaskTable
from mbaas.core.staging.transitions import PartState
from mbaas.core.staging.window import Window
from mbaas.core.story import InvariantError


def wait(
    name: str,
    epochs: EpochTable,
    consumers: ConsumerTable,
    tasks: TaskTable,
    window: Window,
    has_room: Callable[[int], bool],
    awaited: Sequence[str] = (),
) -> str:
    """Return one clause on why a consumer waits; the first cause that applies.

    ``has_room`` maps a block number to whether there is, or can be, room for it. ``awaited`` lists the workers and
    cache nodes that the feed waits for, according to the supervisor.
    """
    consumer = consumers.by_name.get(name)
    if consumer is None:
        return "it is not a member of the feed"
    here = block_name(consumer.cursor)
    # From the nearest to the most remote cause: the first one makes the later ones irrelevant.
    block = window.find(consumer.cursor)
    if block is not None and block.is_put_off:
        return f"{here}: {block.waits_for}"
    if window.is_ready(consumer.cursor) and not epochs.is_written(consumer.cursor):
        number = epochs.shuffle_of(consumer.cursor).epoch
        return f"it is still to be written down, with the cluster's head, how epoch {number} is shuffled"
    makers = tasks.makers(window.staged_as(consumer.cursor))
    if makers:
        return f"{here} is being prepared by {', '.join(makers)}"
    if not tasks.workers:
        # Only workers with the placement count here; the supervisor knows why none have it.
        return "; ".join(["no prep worker is up", *awaited])
    cohort = consumers.cohorts[consumer.cohort]
    slowest = min(cohort.active or cohort.members, key=lambda m: m.cursor)  # all may rest if its call was given up
    if slowest.cursor < consumer.cursor:
        at, own = shown_block(slowest.cursor), shown_block(consumer.cursor)
        return f"the slowest consumer, {slowest.name}, is at block {at}, this one at {own}"
    if not has_room(consumer.cursor):
        # A consumer that holds blocks keeps their bytes, whichever its cohort.
        holders = {other.name for other in consumers.by_name.values() if other.released < other.cursor}
        who = ", ".join(sorted(holders)) or "blocks that are being made"
        return f"the staging budget of {size(window.budget_bytes)} is held by {who}"
    return f"{here} waits for a prep worker"


def check_links(epochs: EpochTable, consumers: ConsumerTable, tasks: TaskTable, window: Window) -> None:
    """Check the invariants between the tables, each of which is valid by itself."""
    making = {
        (block.number, number)
        for block in window.blocks.values()
        for number, part in enumerate(block.parts)
        if part.state is PartState.MAKING
    }
    if making != tasks.in_hand():
        odd = {number for number, _ in making ^ tasks.in_hand()}
        stories = [window.blocks[number].story for number in sorted(odd & window.blocks.keys())]
        stories += [worker.story for worker in tasks.workers.values()]
        # It is unknown which side is wrong, so show both stories.
        raise InvariantError(f"parts in MAKING are {making}, on workers' lists {tasks.in_hand()}", *stories)
    if blamed := (tasks.deaths.keys() | tasks.failures.keys()) - window.blocks.keys():
        raise InvariantError(f"blocks {sorted(blamed)} are not staged, and deaths or errors are counted against them")
    for consumer in consumers.by_name.values():
        block = window.find(consumer.cursor)
        if consumer.waiting and block is not None and block.is_ready and epochs.is_written(consumer.cursor):
            raise InvariantError(f"{consumer.name} waits for {block}, which is ready", consumer.story, block.story)
