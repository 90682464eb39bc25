"""Explanations for users: why a consumer waits, and why a block is staged."""

from __future__ import annotations

from collections.abc import Sequence

from mbaas.base.units import size
from mbaas.core.staging.keeping import WHY
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.streams import block_name, shown_block


def why_kept(core: StagingState, number: int) -> str:
    """Return the reason for which a block is staged, and a clause that explains it; "" if it is not staged."""
    block = core.window.find(number)
    if block is None:
        return ""
    reason = core.keeping.reason(block)
    return f"{reason.name}: {WHY[reason]}"


def wait(core: StagingState, name: str, awaited: Sequence[str] = ()) -> str:
    """Return one clause on why a consumer waits; the first cause that applies.

    ``awaited`` lists the workers and cache nodes that the feed waits for, according to the supervisor.
    """
    epochs, consumers, tasks, window = core.epochs, core.consumers, core.tasks, core.window
    consumer = consumers.by_name.get(name)
    if consumer is None:
        return "it is not a consumer of the feed"
    here = block_name(consumer.cursor)
    # From the nearest to the most remote cause: the first one makes the later ones irrelevant.
    block = window.find(consumer.cursor)
    if block is not None and block.is_put_off:
        return f"{here}: {block.waits_for}"
    if window.is_ready(consumer.cursor) and not epochs.is_written(consumer.cursor):
        number = epochs.shuffle_of(consumer.cursor).epoch
        return f"the shuffle of epoch {number} is not stored on the cluster's head yet"
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
    if not core.keeping.could_free(core.streams.bytes_of(consumer.cursor)):
        # A consumer that holds blocks keeps their bytes, whichever its cohort.
        holders = {other.name for other in consumers.by_name.values() if other.released < other.cursor}
        who = ", ".join(sorted(holders)) or "blocks that are being made"
        return f"the staging budget of {size(window.budget_bytes)} is held by {who}"
    return f"{here} waits for a prep worker"
