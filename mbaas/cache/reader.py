"""Reading from a cache node: fetch replies, and zero-copy access to slabs by any process of the machine."""

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

from mbaas.base import units
from mbaas.cache.slab import RowLocations, Slab, views
from mbaas.errors import PlacementGoneError, StateError, WaitTimeoutError
from mbaas.samples.order import Ids
from mbaas.samples.placement import ENCODED, PartRequest

EncodedRows: TypeAlias = list[NDArray[np.uint8]]
"""The encoded sample of each row of a part, uint8[length]: a read-only view into a slab, empty if unreadable."""

NO_ROWS = np.zeros(0, np.int64)
NO_ROWS.flags.writeable = False

RETRY_S = 0.05
"""Pause before retrying a cache node that is restarting."""

LOCAL_S = 5.0
"""Timeout for Ray to find an object in this machine's memory; an object not found by then never is (Ray 2.60)."""


REUSED_S = 1.0
"""Time for which a decoded part may be read again without a call. Until then, the reader keeps slabs alive that the
node may have dropped, as an idle reader does until its next read.
"""

REUSED_PARTS = 4
"""Number of parts that may be read again. Pipelines are a few blocks apart, and parts take no memory beyond slabs."""


class KnownSlabs(Struct, frozen=True, eq=False):
    """A process's permanent slabs from one incarnation of a cache node; ``bits`` is a packed flag per slab number."""

    incarnation: int
    bits: NDArray[np.uint8]

    def has(self, slab: int) -> bool:
        byte, bit = divmod(slab, 8)  # transient slabs have negative numbers and are never in the set
        return 0 <= byte < len(self.bits) and bool(self.bits[byte] & (128 >> bit))

    def without(self, held: Container[int]) -> tuple[int, ...]:
        numbers = np.flatnonzero(np.unpackbits(self.bits)).tolist()
        return tuple(slab for slab in numbers if slab not in held)


class _HeldSlab(NamedTuple):
    # Kept because of a hang in Ray 2.60: with two threads dropping and receiving references to the same slabs,
    # `ray.get` never returned in two of about 500,000 calls.
    ref: ray.ObjectRef[Slab]
    view: Slab


class FetchReply(RowLocations, frozen=True, eq=False):
    """The reply to a fetch: the locations of the rows, and their slabs."""

    incarnation: int  # incarnation of the cache node; slab numbers are only valid within it
    # the slabs, in the order of `slab_ids`, each uint8[nbytes]. None for slabs that the caller already has; empty if
    # the bytes came packed. Only these references and views keep transient slabs alive.
    slab_refs: list[ray.ObjectRef[Slab] | None]
    dropped_slabs: tuple[int, ...] = ()  # slabs that the caller has and the node dropped
    # int64[k], rows whose decoded samples the node would cache; see `CacheReader.hand_in`
    hand_in: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    hand_in_form: int = ENCODED  # the form to hand them in
    hand_in_bytes: int = 0  # their expected bytes in total


class SlabViews:
    """Zero-copy access to the rows of a `FetchReply`; thread-safe.

    It holds permanent slabs of one incarnation of the cache node; rows already returned stay readable after a restart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incarnation = 0  # of all slabs in _permanent
        self._permanent: dict[int, _HeldSlab] = {}  # by number; replaced by a new dict for each incarnation

    def known(self) -> KnownSlabs:
        """Return the slabs to list in the next fetch."""
        with self._lock:
            incarnation, slabs = self._incarnation, list(self._permanent)
        flags = np.zeros(max(slabs, default=0) + 1, dtype=np.bool_)
        flags[slabs] = True
        return KnownSlabs(incarnation, np.packbits(flags))

    def rows(self, reply: FetchReply) -> EncodedRows:
        """Return the encoded sample of each row.

        Raises:
            ObjectLostError: the cache node died; fetch again.
            StateError: known slabs were lost with the node, or not found within `LOCAL_S`; fetch again.
        """
        return views(self._slabs(reply), reply.slab, reply.offset, reply.length)

    def _slabs(self, reply: FetchReply) -> list[Slab]:
        known = self._of(reply.incarnation)
        refs = dict(zip(reply.slab_ids, reply.slab_refs, strict=True))
        new = {slab: ref for slab, ref in refs.items() if ref is not None and slab not in known}
        # Without the lock, so that threads do not wait for each other's slabs. Two requests for the same slab return
        # the same memory.
        try:
            found = dict(zip(new, ray.get(list(new.values()), timeout=LOCAL_S), strict=True))
        except GetTimeoutError:
            raise StateError(f"slabs {sorted(new)} were not found within {units.seconds(LOCAL_S)}") from None
        with self._lock:
            known.update({slab: _HeldSlab(new[slab], view) for slab, view in found.items() if slab > 0})
            for slab in reply.dropped_slabs:  # a reference here would keep their memory allocated
                known.pop(slab, None)
            found.update({slab: known[slab].view for slab in refs if slab in known and slab not in found})
        if len(found) < len(refs):
            missing = sorted(set(refs) - set(found))
            raise StateError(f"slabs {missing} were lost when their cache node died; fetch again")
        return [found[slab] for slab in reply.slab_ids]

    def _of(self, incarnation: int) -> dict[int, _HeldSlab]:
        """Return the permanent slabs of an incarnation, and drop all others."""
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._permanent = incarnation, {}
            return self._permanent


class _ReadPart(NamedTuple):
    reply: FetchReply
    rows: EncodedRows
    until: float


class RecentParts:
    """Replies for parts whose samples are all cached decoded, for the next pipelines; thread-safe.

    A part stays for `REUSED_S`, or until the node drops slabs. ``now`` is any clock in seconds that only grows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[PartRequest, _ReadPart] = {}  # the oldest first

    def find(self, request: PartRequest, now: float) -> tuple[FetchReply, EncodedRows] | None:
        """Return the part's reply and rows; None if the node must be asked."""
        with self._lock:
            part = self._parts.get(request)
        return None if part is None or part.until <= now else (part.reply, part.rows)

    def add(self, request: PartRequest, reply: FetchReply, rows: EncodedRows, now: float) -> None:
        """Add a part that was just read, if it may be reused, and forget expired ones."""
        counts, samples = reply.counts, len(rows)
        may_be_reused = counts.local.samples == counts.decoded.samples == samples and not len(reply.hand_in)
        with self._lock:
            if reply.dropped_slabs:  # rows would keep them in memory
                self._parts.clear()
            for each in [each for each, part in self._parts.items() if part.until <= now]:
                del self._parts[each]
            if may_be_reused:
                self._parts[request] = _ReadPart(reply, rows, now + REUSED_S)
            while len(self._parts) > REUSED_PARTS:
                del self._parts[next(iter(self._parts))]


class CacheReader:
    """Reads blocks from one `CacheNode`, including its restarts, within ``timeout_s`` per read; thread-safe.

    Pipelines of one feed need the same samples one after the other. If all of a part's samples are cached decoded, the
    next pipelines get the reply of the first: a call costs the node 1 to 2 ms of CPU time.
    """

    def __init__(self, node: Any, *, timeout_s: float = 60.0) -> None:
        self.node = node
        self._timeout_s = timeout_s
        self._views = SlabViews()
        self._recent = RecentParts()

    def read(self, request: PartRequest, pipeline: str = "") -> tuple[FetchReply, EncodedRows]:
        """Read the samples of a part, for a pipeline. They stay readable if the node dies.

        Raises:
            WaitTimeoutError: the node did not reply in time, or was unavailable for that long.
            ray.exceptions.ActorDiedError: the node is permanently gone.
            PlacementGoneError: the part's placement version died with its coordinator and this node.
            Exception: an error that prevented the block from being read; samples that fail are in `errors` instead.
        """
        began = time.monotonic()
        deadline = began + self._timeout_s
        if (found := self._recent.find(request, began)) is not None:
            return found
        while True:
            try:
                asked = self.node.fetch.remote(request, self._views.known(), pipeline)
                reply = ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
                rows = self._views.rows(reply)
                self._recent.add(request, reply, rows, time.monotonic())
                return reply, rows
            except GetTimeoutError:
                raise self._too_late(request.block, "it did not answer") from None
            except PlacementGoneError:
                raise
            # The node is restarting, died before its slabs were read, or does not have the placement yet: retry.
            except (ActorUnavailableError, ObjectLostError, StateError) as error:
                if time.monotonic() > deadline:
                    raise self._too_late(request.block, f"it is restarting ({type(error).__name__})") from error
                time.sleep(RETRY_S)

    def hand_in(
        self,
        request: PartRequest,
        form: int,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        packed: Slab,
        unfit: list[int],
        *,
        is_last: bool,
    ) -> ray.ObjectRef[None]:
        """Hand decoded samples to the node, which caches those that fit. Return a reference to await the copy.

        Args:
            request, form: a part whose fetch reply requested them, and the requested form.
            sample_ids, lengths, packed: int64[n], bytes; the samples end to end, copied to the object store at once.
            unfit: requested samples that cannot be cached decoded.
            is_last: no further hand-in follows for this part.
        """
        done: ray.ObjectRef[None] = self.node.cache_decoded.remote(
            request, form, sample_ids, lengths, packed, unfit, is_last
        )
        return done

    def read_packed(self, request: PartRequest, pipeline: str = "") -> tuple[FetchReply, EncodedRows]:
        """Read from another node: one call transfers only the samples' bytes, not their slabs. Not retried.

        Raises WaitTimeoutError or ray.exceptions.RayError if the node does not reply.
        """
        try:
            reply, packed = ray.get(self.node.fetch_packed.remote(request, pipeline), timeout=self._timeout_s)
        except GetTimeoutError:
            raise self._too_late(request.block, "it did not answer") from None
        ends = np.cumsum(reply.length).tolist()
        return reply, [packed[end - n : end] for end, n in zip(ends, reply.length.tolist(), strict=True)]

    def _too_late(self, block: int, why: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"waited {units.seconds(self._timeout_s)} for the cache node's block {block}: {why}")
