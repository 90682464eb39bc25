"""Reads the parts of a block, or a rank's rows in them, in the cheapest way.

Parts on the consumer's own node are read whole from shared memory, because that copies nothing. For rows on another
node a rank makes one call per block to that node's cache node. If it needs most of a part, it copies the whole part,
which is faster per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import ray
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.memory.part_memory import PartMemory, UnreadableError, bring, read, refs_of
from mbaas.memory.slots import Slot
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
    """A consumer's source for each part of a block."""

    own: list[DeliveredPart] = field(default_factory=list)  # parts on the consumer's node with rows for it
    copied: list[DeliveredPart] = field(default_factory=list)  # parts on other nodes that are read whole
    asked: dict[str, RemoteRows] = field(default_factory=dict)  # node id -> rows requested from its cache node


def plan_fetch(
    block: DeliveredBlock, rows: Rows, ids: Ids, *, placement: Placement | None, node: str, helpers: Collection[str]
) -> FetchPlan:
    """Choose the source for each part with some of ``rows``: int64[k], ascending; ``ids`` are their sample ids.

    ``placement`` divides the epoch among ranks; ``helpers`` are nodes with a cache node that sends rows.
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
            or isinstance(part.address, Slot)  # not readable from here; reading it reports that
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
    """The parts of a block, being fetched from other nodes.

    ``rows`` are a rank's rows of the block (int64[k], ascending), None for all rows; parts that are read whole contain
    others, too. ``ask`` sends (node, rows) to the node's cache node, and returns a reference to the answer.
    """

    def __init__(
        self,
        plan: FetchPlan,
        spec: SampleSpec,
        rows: Rows | None = None,
        ask: Callable[[str, RemoteRows], Any] = lambda _node, _rows: None,
    ) -> None:
        self._rows, self._spec = rows, spec
        self._own, self._copied = _held(plan.own), _held(plan.copied)
        self._calls = [_RowCall(asked, ask(node, asked)) for node, asked in plan.asked.items()]
        self._bring()

    def _bring(self) -> None:
        bring([call.ref for call in self._calls] + refs_of(self._copied))

    def read(self, timeout_s: float) -> tuple[list[Arrays], ReadBytes]:
        """Return the arrays of the parts, and their used bytes. May be called again after a timeout.

        Raises:
            UnreadableError: data is not available within ``timeout_s``, or is lost.
        """
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
        return own + remote or [_no_samples(self._spec)], ReadBytes(local_bytes, sum(map(_nbytes, remote)))

    def _used_rows(self, part: Arrays) -> int:
        if self._rows is None:
            return len(part["sample_id"])
        return int(np.isin(part[ROW], self._rows).sum()) if ROW in part else len(self._rows)


def _held(parts: Iterable[DeliveredPart]) -> list[PartMemory | None]:
    return [part.address.held() for part in parts]


def _nbytes(part: Arrays) -> int:
    return sum(array.nbytes for array in part.values())


def _no_samples(spec: SampleSpec) -> Arrays:
    return {**{field.name: field.zeros(0) for field in spec.fields}, ROW: np.empty(0, np.int64)}
