"""Reads the parts of a block, or a rank's rows in them, in the cheapest way.

Parts on the consumer's own node are read whole from shared memory, because that copies nothing. For rows on another
node a rank makes one call per block to that node's cache node. If it needs most of a part, it copies the whole part,
which is faster per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import ray
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.memory.part_memory import PartMemory, UnreadableError, bring, read, refs_of
from mbaas.ray_cluster import bugs
from mbaas.ray_cluster.connection import get
from mbaas.samples.fields import Arrays
from mbaas.samples.order import Ids
from mbaas.samples.placement import WHOLE, Placement
from mbaas.wire.blocks import ROW, DeliveredBlock, DeliveredPart
from mbaas.wire.consumers import ReadBytes
from mbaas.wire.samples import SampleSpec

WHOLE_SHARE = 0.8
"""Fraction of a part above which a rank copies all of it: whole parts arrive at 0.6 to 0.9 GB/s, rows at 0.5 to 0.7."""

UNREAD_S = 0.5
"""Timeout in seconds to retry each part of an unreadable block; parts read within it are not made again."""

Rows: TypeAlias = NDArray[np.int64]


class FetchedBlock(Struct, frozen=True, eq=False):
    """The arrays read for a block.

    Attributes:
        parts: arrays of its parts, or of some of their rows.
        read_bytes: bytes used of parts on the consumer's own node, and bytes from other nodes.
    """

    parts: list[Arrays]
    read_bytes: ReadBytes


class BlockFetch(Protocol):
    """A block whose parts are being fetched from other nodes."""

    def read(self, timeout_s: float) -> FetchedBlock:
        """Return the arrays of the block. May be called again after a timeout.

        Raises:
            UnreadableError: data is not available within ``timeout_s``, or is lost.
        """


class WholeFetch:
    """A `BlockFetch` of whole parts; ``remote`` are the parts on other nodes."""

    def __init__(self, block: DeliveredBlock, remote: list[DeliveredPart]) -> None:
        self._block, self._remote = block, remote
        self._memory = _held(block.parts)
        bring(refs_of(memory for part, memory in zip(block.parts, self._memory, strict=True) if part in remote))

    def read(self, timeout_s: float) -> FetchedBlock:
        """See `BlockFetch.read`."""
        parts = read(self._memory, timeout_s)
        remote = sum(part.meta.nbytes for part in self._remote)
        local = sum(part.meta.nbytes for part in self._block.parts) - remote
        return FetchedBlock(parts, ReadBytes(local, remote))


def unreadable_parts(block: DeliveredBlock) -> list[DeliveredPart]:
    """Return the parts of a block that cannot be read now and must be made again."""
    unreadable = []
    for part in block.parts:
        try:
            read([part.address.held()], UNREAD_S)
        except UnreadableError:
            unreadable.append(part)
    return unreadable


class RemoteRows(Struct, frozen=True, eq=False):
    """Rows that a rank needs from parts on one other node."""

    parts: list[DeliveredPart]
    rows: Rows


@dataclass(eq=False)
class FetchPlan:
    """A rank's source for each part of a block.

    Attributes:
        own: parts on the rank's node with rows for it.
        copied: parts on other nodes that are read whole.
        asked: node id -> rows requested from its cache node.
    """

    own: list[DeliveredPart] = field(default_factory=list)
    copied: list[DeliveredPart] = field(default_factory=list)
    asked: dict[str, RemoteRows] = field(default_factory=dict)


def plan_fetch(
    block: DeliveredBlock, rows: Rows, ids: Ids, *, placement: Placement | None, node: str, helpers: Collection[str]
) -> FetchPlan:
    """Choose the source for each part with some of ``rows``.

    Args:
        rows: int64[k], rows of the block, ascending.
        ids: int64[k], their sample ids.
        placement: placement that divides the epoch among ranks.
        helpers: nodes with a cache node that sends rows.
    """
    plan = FetchPlan()
    asked: dict[str, list[tuple[DeliveredPart, Rows]]] = {}
    for part, needed in zip(block.parts, _needed(block, rows, ids, placement), strict=True):
        if needed is not None and not len(needed):
            continue
        if part.node == node:  # shared memory: read whole, because nothing is copied
            plan.own.append(part)
        elif (
            part.node not in helpers
            or part.address.is_on_one_node  # not readable from here; reading it reports that
            or (needed is not None and len(needed) > WHOLE_SHARE * part.meta.samples)
        ):
            plan.copied.append(part)
        else:
            asked.setdefault(part.node, []).append((part, rows if needed is None else needed))
    for other, pairs in asked.items():  # one call per node, because calls have a fixed cost
        union = np.unique(np.concatenate([needed for _, needed in pairs]))
        plan.asked[other] = RemoteRows([part for part, _ in pairs], union)
    return plan


def _needed(block: DeliveredBlock, rows: Rows, ids: Ids, placement: Placement | None) -> list[Rows | None]:
    """Return the rows needed from each part; None if unknown because another placement cut the block."""
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
    asked: RemoteRows
    ref: Any
    answer: list[Arrays] | None = None


class PartFetch:
    """A `BlockFetch` of one rank's samples. Parts that are read whole contain other samples too.

    ``rows`` are the rank's rows of the block (int64[k], ascending). ``ask`` sends (node, rows) to the node's cache
    node, and returns a reference to the answer.
    """

    def __init__(self, rows: Rows, plan: FetchPlan, spec: SampleSpec, ask: Callable[[str, RemoteRows], Any]) -> None:
        self._rows, self._spec = rows, spec
        self._own, self._copied = _held(plan.own), _held(plan.copied)
        self._calls = [_RowCall(asked, ask(node, asked)) for node, asked in plan.asked.items()]
        self._bring()

    def _bring(self) -> None:
        bring([call.ref for call in self._calls] + refs_of(self._copied))

    def read(self, timeout_s: float) -> FetchedBlock:
        """See `BlockFetch.read`."""
        self._bring()
        for call in list(self._calls):
            try:
                # Kept for the next `read` if another part is late.
                call.answer = call.answer or get(call.ref, timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise UnreadableError(for_good=False) from None
            except ray.exceptions.RayError as error:
                # The node sends no rows now, but its memory may still be readable.
                bugs.log_bug(error, "in the cache of another node")
                self._calls.remove(call)
                self._copied += _held(call.asked.parts)
        whole = read(self._own + self._copied, timeout_s)
        own, remote = whole[: len(self._own)], whole[len(self._own) :]
        remote += [part for call in self._calls for part in call.answer or []]
        local_bytes = sum(_nbytes(part) * self._used_rows(part) // max(len(part["sample_id"]), 1) for part in own)
        read_bytes = ReadBytes(local_bytes, sum(map(_nbytes, remote)))
        return FetchedBlock(own + remote or [_no_samples(self._spec)], read_bytes)

    def _used_rows(self, part: Arrays) -> int:
        return int(np.isin(part[ROW], self._rows).sum()) if ROW in part else len(self._rows)


def _held(parts: Iterable[DeliveredPart]) -> list[PartMemory | None]:
    return [part.address.held() for part in parts]


def _nbytes(part: Arrays) -> int:
    return sum(array.nbytes for array in part.values())


def _no_samples(spec: SampleSpec) -> Arrays:
    return {**{field.name: field.zeros(0) for field in spec.fields}, ROW: np.empty(0, np.int64)}
