"""How a rank gets its samples of a block: from which parts, which rows, and by which way.

What lies on the rank's own node is read from shared memory. What lies elsewhere is asked of that node's cache node, in
one call for each block and node; a part of which a rank needs most is pulled whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas.client.rpc import UnreadableError, bring, get, read
from mbaas.messages import ROW, Arrays, DeliveredBlock, DeliveredPart
from mbaas.order import Ids
from mbaas.placement import WHOLE, Placement

MOST = 0.8
"""A part of which a rank needs more than this share is pulled whole: 0.6 to 0.9 GB/s, rows 0.5 to 0.7 GB/s."""

Rows: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Rows of parts that lie on one other node."""

    parts: list[DeliveredPart]
    rows: Rows


@dataclass(eq=False)
class FetchPlan:
    """By which way the rows of a block come.

    Attributes:
        own: parts on the rank's node that have rows of it.
        pulled: parts on other nodes that it reads whole.
        wishes: node id -> what is asked of its cache node.
    """

    own: list[DeliveredPart] = field(default_factory=list)
    pulled: list[DeliveredPart] = field(default_factory=list)
    wishes: dict[str, RemoteRows] = field(default_factory=dict)


def plan_fetch(
    block: DeliveredBlock, rows: Rows, ids: Ids, *, placement: Placement | None, node: str, helpers: Collection[str]
) -> FetchPlan:
    """Where to get ``rows`` of a block.

    Args:
        block: as it was delivered.
        rows: of the block, ascending: int64[k].
        ids: of the samples in these rows: int64[k].
        homes: by which the epoch is shared out.
        node: the rank's.
        helpers: nodes whose cache nodes hand out rows.
    """
    route = FetchPlan()
    asked: dict[str, list[tuple[DeliveredPart, Rows]]] = {}
    for part, wanted in zip(block.parts, _wanted(block, rows, ids, placement), strict=True):
        if wanted is not None and not len(wanted):
            continue
        if part.node == node:
            route.own.append(part)
        elif part.node not in helpers or (wanted is not None and len(wanted) > MOST * part.meta.samples):
            route.pulled.append(part)
        else:
            asked.setdefault(part.node, []).append((part, rows if wanted is None else wanted))
    for other, wishes in asked.items():
        route.wishes[other] = RemoteRows(
            [part for part, _ in wishes], np.unique(np.concatenate([r for _, r in wishes]))
        )
    return route


def _wanted(block: DeliveredBlock, rows: Rows, ids: Ids, placement: Placement | None) -> list[Rows | None]:
    """For each part, which of ``rows`` it has; None if it was cut by other homes than these."""
    if len(block.parts) == 1:
        return [rows]
    home_of = placement.of(ids) if placement is not None else None
    wanted: list[Rows | None] = []
    for part in block.parts:
        if placement is None or part.block_part == WHOLE or placement.version != part.block_part.version:
            wanted.append(None)
        else:
            wanted.append(rows[home_of == placement.index(part.block_part.home)])
    return wanted


@dataclass(eq=False)
class _Call:
    """A wish that was sent; what was answered, once that is here."""

    wish: RemoteRows
    ref: Any
    answer: list[Arrays] | None = None


class PartFetch:
    """What was begun to get a rank's samples of a block.

    Args:
        block: as it was delivered; one that was made again is another errand.
        rows: of the block, those that are the rank's.
        route: see `plan_fetch`.
        ask: sends a wish to the cache node of a node, and returns the reference of what it will answer.
    """

    def __init__(
        self, block: DeliveredBlock, rows: Rows, route: FetchPlan, ask: Callable[[str, RemoteRows], Any]
    ) -> None:
        self.block, self._rows = block, rows
        self._own, self._pulled = route.own, list(route.pulled)
        self._calls = [_Call(wish, ask(node, wish)) for node, wish in route.wishes.items()]
        self._bring()

    def _bring(self) -> None:
        """Have what is there come from other nodes, however long that takes: see `bring`."""
        bring([call.ref for call in self._calls] + [part.payload[0] for part in self._pulled])

    def fetch(self, timeout_s: float) -> tuple[list[Arrays], list[Arrays]]:
        """Parts that lie on the own node, whole, and parts or rows of parts that came from other nodes.

        Raises:
            UnreadableError: something is not here yet, or never will be.
        """
        self._bring()
        for call in list(self._calls):
            try:
                call.answer = call.answer or get(call.ref, timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise UnreadableError(for_good=False) from None
            except ray.exceptions.RayError:  # that node hands out no rows now; its memory may be there all the same
                self._calls.remove(call)
                self._pulled += call.wish.parts
        whole = read([part.payload[0] for part in (*self._own, *self._pulled)], timeout_s)
        answers = [part for call in self._calls for part in call.answer or []]
        return whole[: len(self._own)], whole[len(self._own) :] + answers

    def own_bytes(self, own: list[Arrays]) -> int:
        """Bytes of the rank's rows among parts on its own node."""
        return sum(nbytes(part) * self._entries(part) // max(len(part["sample_id"]), 1) for part in own)

    def _entries(self, part: Arrays) -> int:
        return int(np.isin(part[ROW], self._rows).sum()) if ROW in part else len(self._rows)


def nbytes(part: Arrays) -> int:
    """Bytes of all arrays of a part."""
    return sum(array.nbytes for array in part.values())
