"""The reader's side of slabs: what a fetch answers, and how a process of the node reads it without a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Container
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
from msgspec import Struct, field
from numpy.typing import NDArray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError

from mbaas import units
from mbaas.cache.slab import RowLocations, Slab, views
from mbaas.errors import PlacementGoneError, StateError, WaitTimeoutError
from mbaas.order import Ids
from mbaas.placement import PartRequest

EncodedRows: TypeAlias = list[NDArray[np.uint8]]
"""For each row of a part the encoded sample, uint8[length]: a read-only view into a slab; empty where the sample could
not be read.
"""

NO_ROWS = np.zeros(0, np.int64)
NO_ROWS.flags.writeable = False

RETRY_S = 0.05
"""Pause before a cache node that is being restarted is asked again."""

LOCAL_S = 5.0
"""How long Ray may take to find an object in this machine's memory; after that it never does (seen in Ray 2.60)."""


class KnownSlabs(Struct, frozen=True, eq=False):
    """The permanent slabs that a process has, whose references need not be sent again.

    Attributes:
        incarnation: of the cache node that they belong to.
        bits: uint8, `numpy.packbits` of a flag for each slab number from 0.
    """

    incarnation: int
    bits: NDArray[np.uint8]

    def has(self, slab: int) -> bool:
        """Tell whether the slab of that number is among them."""
        byte, bit = divmod(slab, 8)  # transient slabs have negative numbers, and are never among them
        return 0 <= byte < len(self.bits) and bool(self.bits[byte] & (128 >> bit))

    def without(self, held: Container[int]) -> tuple[int, ...]:
        """List those that are not among ``held``."""
        numbers = np.flatnonzero(np.unpackbits(self.bits)).tolist()
        return tuple(slab for slab in numbers if slab not in held)


class _KeptSlab(NamedTuple):
    """A permanent slab, as a process keeps it.

    Its reference stays, too: where two threads dropped and received references to the same slabs again and again,
    `ray.get` of one never returned, twice in some 500,000 times (Ray 2.60); where they were kept, it always did.
    """

    ref: ray.ObjectRef[Slab]
    view: Slab


class FetchReply(RowLocations, frozen=True, eq=False):
    """The answer to a fetch: where the rows lie, and the slabs that they lie in.

    Attributes:
        incarnation: of the cache node; slab numbers mean nothing to another one.
        slab_refs: the slabs, in the order of `slab_ids`; each is uint8[nbytes] in the object store. None where the
            caller said that it has the slab. While these references or views of them live, so do transient slabs;
            nobody else holds those. Empty if the bytes came packed.
        dropped_slabs: slabs that the caller has and that the node let go, because their samples moved to other nodes or
            are kept in another form.
        hand_in: int64[k], the rows whose decoded samples the node would keep: see `CacheReader.hand_in`.
        hand_in_bytes: how many bytes they have on average, together.
    """

    incarnation: int
    slab_refs: list[ray.ObjectRef[Slab] | None]
    dropped_slabs: tuple[int, ...] = ()
    hand_in: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    hand_in_bytes: int = 0


class SlabViews:
    """What turns a `FetchReply` into bytes without copying them; may be used by several threads.

    It keeps permanent slabs, which stay in the node's memory anyway, and no transient ones: those go when the caller
    drops the reply and the rows. Slabs of a cache node that died are dropped when its successor answers for the first
    time; rows that were handed out stay readable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incarnation = 0  # of the node that all of _permanent come from
        self._permanent: dict[int, _KeptSlab] = {}  # by number; replaced, not changed, when the incarnation is new

    def known(self) -> KnownSlabs:
        """Tell what the cache node must know for the next fetch."""
        with self._lock:
            incarnation, slabs = self._incarnation, list(self._permanent)
        flags = np.zeros(max(slabs, default=0) + 1, dtype=np.bool_)
        flags[slabs] = True
        return KnownSlabs(incarnation, np.packbits(flags))

    def rows(self, reply: FetchReply) -> EncodedRows:
        """Find the encoded sample of each row.

        Raises:
            ray.exceptions.ObjectLostError: the cache node died; fetch again.
            StateError: it died, and the slabs that the reply left out because they were known are dropped already; or
                Ray does not find a slab within `LOCAL_S`. Fetch again.
        """
        return views(self._slabs(reply), reply.slab, reply.offset, reply.length)

    def _slabs(self, reply: FetchReply) -> list[Slab]:
        """Find the slabs of a reply, in the order of its `slab_ids`."""
        known = self._of(reply.incarnation)
        refs = dict(zip(reply.slab_ids, reply.slab_refs, strict=True))
        new = {slab: ref for slab, ref in refs.items() if ref is not None and slab not in known}
        # Without the lock, so that a thread whose slabs are there need not wait for another's. If two ask for the same
        # slab, both get the same memory.
        try:
            found = dict(zip(new, ray.get(list(new.values()), timeout=LOCAL_S), strict=True))
        except GetTimeoutError:
            raise StateError(f"slabs {sorted(new)} were not found within {units.seconds(LOCAL_S)}") from None
        with self._lock:
            known.update({slab: _KeptSlab(new[slab], view) for slab, view in found.items() if slab > 0})
            for slab in reply.dropped_slabs:  # a reference here would keep their memory from Ray
                known.pop(slab, None)
            found.update({slab: known[slab].view for slab in refs if slab in known and slab not in found})
        if len(found) < len(refs):
            missing = sorted(set(refs) - set(found))
            raise StateError(f"slabs {missing} went with the cache node that held them")
        return [found[slab] for slab in reply.slab_ids]

    def _of(self, incarnation: int) -> dict[int, _KeptSlab]:
        """Return the permanent slabs of an incarnation; those of any other are dropped."""
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._permanent = incarnation, {}
            return self._permanent


class CacheReader:
    """A reader of blocks from one cache node, which outlives the node's deaths; for several threads.

    Args:
        node: handle of a `CacheNode`.
        timeout_s: how long one read may take, restarts of the node included.

    Attributes:
        node: the same.
    """

    def __init__(self, node: Any, *, timeout_s: float = 60.0) -> None:
        self.node = node
        self._timeout_s = timeout_s
        self._views = SlabViews()

    def read(self, request: PartRequest) -> tuple[FetchReply, EncodedRows]:
        """Read the encoded samples of a part, and tell where they came from. They stay readable if the node dies.

        Raises:
            WaitTimeoutError: the node did not answer in time, or was away for that long.
            ray.exceptions.ActorDiedError: the node is gone for good.
            PlacementGoneError: the part is one of a coordinator that died, and so did the node that knew of it.
            Exception: what kept the node from reading the block; samples that fail are in `errors` instead.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                asked = self.node.fetch.remote(request, self._views.known())
                reply = ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
                return reply, self._views.rows(reply)
            except GetTimeoutError:
                raise self._too_late(request.block, "it did not answer") from None
            except PlacementGoneError:
                raise
            # A node that is being restarted, that died between its answer and the look at its slabs, or that has not
            # heard of the placement yet: the next answer may be a good one.
            except (ActorUnavailableError, ObjectLostError, StateError) as error:
                if time.monotonic() > deadline:
                    raise self._too_late(request.block, f"it is restarting ({type(error).__name__})") from error
                time.sleep(RETRY_S)

    def hand_in(
        self,
        request: PartRequest,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        packed: Slab,
        unfit: list[int],
        *,
        is_last: bool,
    ) -> ray.ObjectRef[None]:
        """Hand decoded samples of a part to the node, which keeps those for which it has room.

        Args:
            request: the part, in the answer to whose fetch the node asked for them.
            sample_ids: int64[n].
            lengths: int64[n], bytes of each.
            packed: the samples end to end. They are copied to the object store before this returns.
            unfit: samples that it asked for and that cannot be kept decoded.
            is_last: whether nothing more comes of this part.

        Returns:
            What tells that the node has copied them.
        """
        done: ray.ObjectRef[None] = self.node.keep_decoded.remote(request, sample_ids, lengths, packed, unfit, is_last)
        return done

    def read_packed(self, request: PartRequest) -> tuple[FetchReply, EncodedRows]:
        """Read from another node: one call brings all bytes, and nothing else of the slabs that they lie in.

        Raises:
            WaitTimeoutError: the node did not answer in time.
            ray.exceptions.RayError: the node is away, perhaps for good; this is not waited for.
        """
        try:
            reply, packed = ray.get(self.node.fetch_packed.remote(request), timeout=self._timeout_s)
        except GetTimeoutError:
            raise self._too_late(request.block, "it did not answer") from None
        ends = np.cumsum(reply.length).tolist()
        return reply, [packed[end - n : end] for end, n in zip(ends, reply.length.tolist(), strict=True)]

    def _too_late(self, block: int, why: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"waited {units.seconds(self._timeout_s)} for the cache node's block {block}: {why}")
