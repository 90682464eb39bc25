"""Reads the parts of a block: all of them, or of each what a rank needs, by the way that costs least.

Parts that lie on the consumer's own node are read from shared memory, whole, because that copies nothing. Of a part on
another node a rank asks that node's cache node for its rows, in one call for each block and node; a part of which it
needs most is copied whole, which is faster a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import ray
from msgspec import Struct
from numpy.typing import NDArray

from mbaas import bugs
from mbaas.client.rpc import UnreadableError, bring, get, read
from mbaas.fields import Arrays
from mbaas.messages import ROW, DeliveredBlock, DeliveredPart, ReadBytes, SampleSpec
from mbaas.order import Ids
from mbaas.placement import WHOLE, Placement

WHOLE_SHARE = 0.8
"""A part of which a rank needs more than this is copied whole: at 0.6 to 0.9 GB/s, where rows come at 0.5 to 0.7."""

UNREAD_S = 0.5
"""Time in which parts of an unreadable block are tried again; those read within it are not made anew."""

Rows: TypeAlias = NDArray[np.int64]


class FetchedBlock(Struct, frozen=True, eq=False):
    """What was read of a block.

    Attributes:
        parts: arrays of its parts, or of some rows of them; empty if the block ended in an error.
        read_bytes: what was needed of parts on the consumer's own node, and what came from other nodes.
    """

    parts: list[Arrays]
    read_bytes: ReadBytes


class BlockFetch(Protocol):
    """What was begun to read a block: bytes on other nodes are on their way."""

    def read(self, timeout_s: float) -> FetchedBlock:
        """Return what is read of the block; may be called again if it is not here yet.

        Raises:
            UnreadableError: something is not here within ``timeout_s``, or never will be.
        """


class WholeFetch:
    """A `BlockFetch` of all parts, whole.

    Args:
        block: as it was delivered.
        remote: the parts that lie on other nodes.
    """

    def __init__(self, block: DeliveredBlock, remote: list[DeliveredPart]) -> None:
        self._block, self._remote = block, remote
        bring([ref for part in remote for ref in part.refs])

    def read(self, timeout_s: float) -> FetchedBlock:
        """See `BlockFetch.read`."""
        parts = read([ref for part in self._block.parts for ref in part.refs], timeout_s)
        remote = sum(part.meta.nbytes for part in self._remote)
        local = sum(part.meta.nbytes for part in self._block.parts) - remote
        return FetchedBlock(parts, ReadBytes(local, remote))


def unreadable_parts(block: DeliveredBlock) -> list[DeliveredPart]:
    """Return the parts of a block that cannot be read now: those that have to be made again."""
    unreadable = []
    for part in block.parts:
        try:
            read(part.refs, UNREAD_S)
        except UnreadableError:
            unreadable.append(part)
    return unreadable


class RemoteRows(Struct, frozen=True, eq=False):
    """Rows that a rank needs of parts on one other node."""

    parts: list[DeliveredPart]
    rows: Rows


@dataclass(eq=False)
class FetchPlan:
    """The ways on which a rank gets its rows of a block.

    Attributes:
        own: parts on the rank's node that have rows of it.
        copied: parts on other nodes that it reads whole.
        asked: node id -> rows that are asked of its cache node.
    """

    own: list[DeliveredPart] = field(default_factory=list)
    copied: list[DeliveredPart] = field(default_factory=list)
    asked: dict[str, RemoteRows] = field(default_factory=dict)


def plan_fetch(
    block: DeliveredBlock, rows: Rows, ids: Ids, *, placement: Placement | None, node: str, helpers: Collection[str]
) -> FetchPlan:
    """Decide where to get ``rows`` of a block.

    Args:
        block: as it was delivered.
        rows: int64[k], rows of the block, ascending.
        ids: int64[k], the samples in these rows.
        placement: the one by which the epoch is shared out between ranks.
        node: the node of the rank.
        helpers: nodes whose cache nodes hand out rows.
    """
    plan = FetchPlan()
    asked: dict[str, list[tuple[DeliveredPart, Rows]]] = {}
    for part, needed in zip(block.parts, _needed(block, rows, ids, placement), strict=True):
        if needed is not None and not len(needed):
            continue
        if part.node == node:  # shared memory: whole, because nothing is copied
            plan.own.append(part)
        elif part.node not in helpers or (needed is not None and len(needed) > WHOLE_SHARE * part.meta.samples):
            plan.copied.append(part)
        else:
            asked.setdefault(part.node, []).append((part, rows if needed is None else needed))
    for other, pairs in asked.items():  # one call for each node, whatever it brings: calls have a fixed cost
        union = np.unique(np.concatenate([needed for _, needed in pairs]))
        plan.asked[other] = RemoteRows([part for part, _ in pairs], union)
    return plan


def _needed(block: DeliveredBlock, rows: Rows, ids: Ids, placement: Placement | None) -> list[Rows | None]:
    """Return for each part which of ``rows`` it has; None if that is unknown, as another placement cut the block."""
    if len(block.parts) == 1:
        return [rows]
    home_of = placement.of(ids) if placement is not None else None
    needed: list[Rows | None] = []
    for part in block.parts:
        if placement is None or part.block_part == WHOLE or placement.version != part.block_part.version:
            needed.append(None)
        else:
            needed.append(rows[home_of == placement.index(part.block_part.home)])
    return needed


@dataclass(eq=False)
class _RowCall:
    """A call to a cache node, and what it answered, once that is here."""

    asked: RemoteRows
    ref: Any
    answer: list[Arrays] | None = None


class PartFetch:
    """A `BlockFetch` of one rank's samples; it may bring others, where a part is read whole.

    Args:
        rows: int64[k], the rows of the block that are the rank's, ascending.
        plan: see `plan_fetch`.
        spec: what a prepared sample looks like.
        ask: sends (node, rows) to the cache node of a node, and returns the reference of what it will answer.
    """

    def __init__(self, rows: Rows, plan: FetchPlan, spec: SampleSpec, ask: Callable[[str, RemoteRows], Any]) -> None:
        self._rows, self._spec = rows, spec
        self._own, self._copied = plan.own, list(plan.copied)
        self._calls = [_RowCall(asked, ask(node, asked)) for node, asked in plan.asked.items()]
        self._bring()

    def _bring(self) -> None:
        """Have what is there come from other nodes, however long that takes: see `bring`."""
        bring([call.ref for call in self._calls] + [part.refs[0] for part in self._copied])

    def read(self, timeout_s: float) -> FetchedBlock:
        """See `BlockFetch.read`."""
        self._bring()
        for call in list(self._calls):
            try:
                call.answer = call.answer or get(
                    call.ref, timeout_s
                )  # kept, if another one is late and it is read again
            except ray.exceptions.GetTimeoutError:
                raise UnreadableError(for_good=False) from None
            except ray.exceptions.RayError as error:
                # That node hands out no rows now; its memory may be there all the same.
                bugs.log_bug(error, "in the cache of another node")
                self._calls.remove(call)
                self._copied += call.asked.parts
        whole = read([part.refs[0] for part in (*self._own, *self._copied)], timeout_s)
        own, remote = whole[: len(self._own)], whole[len(self._own) :]
        remote += [part for call in self._calls for part in call.answer or []]
        local_bytes = sum(_nbytes(part) * self._used_rows(part) // max(len(part["sample_id"]), 1) for part in own)
        read_bytes = ReadBytes(local_bytes, sum(map(_nbytes, remote)))
        return FetchedBlock(own + remote or [_no_samples(self._spec)], read_bytes)

    def _used_rows(self, part: Arrays) -> int:
        """Return how many of the part's rows are the rank's."""
        return int(np.isin(part[ROW], self._rows).sum()) if ROW in part else len(self._rows)


def _nbytes(part: Arrays) -> int:
    return sum(array.nbytes for array in part.values())


def _no_samples(spec: SampleSpec) -> Arrays:
    """Make a part without rows: a rank may have no sample in a block."""
    return {**{field.name: field.zeros(0) for field in spec.fields}, ROW: np.empty(0, np.int64)}
