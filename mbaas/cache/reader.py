"""The reader's side of slabs: what a fetch answers, and how a process of the node reads it without a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError

from mbaas.cache.slab import Rows
from mbaas.errors import StateError, WaitTimeoutError
from mbaas.placement import PartRequest

Slab = NDArray[np.uint8]
"""uint8[nbytes], read-only, in the shared memory of the node."""

Raw = list[NDArray[np.uint8]]
"""One read-only uint8[length] per row, a view into a slab; empty where the sample could not be read."""

RETRY_S = 0.05
"""Pause before a cache node that is restarting is asked again."""

LOCAL_S = 5.0
"""How long an object may take that lies in the memory of this machine; then Ray has lost it."""


@dataclass(frozen=True, eq=False)
class Held:
    """The permanent slabs that a process has already: their references need not be sent again.

    Attributes:
        incarnation: of the cache node that they belong to.
        bits: uint8, `numpy.packbits` of a flag for each slab number from 0.
    """

    incarnation: int
    bits: NDArray[np.uint8]

    def holds(self, slab: int) -> bool:
        byte, bit = divmod(slab, 8)
        return 0 <= byte < len(self.bits) and bool(self.bits[byte] & (128 >> bit))


class Kept(NamedTuple):
    """A slab that a process keeps. Its reference stays, too: where two threads dropped and received references to the
    same slabs again and again, `ray.get` of one never returned, twice in some 500,000 times (Ray 2.60); where they were
    kept, it always did.
    """

    ref: ray.ObjectRef[Slab]
    view: Slab


@dataclass(frozen=True, eq=False)
class Fetched(Rows):
    """The answer to a fetch: `Rows`, and the slabs they lie in.

    Attributes:
        incarnation: of the cache node; slab numbers mean nothing to another one.
        slab_refs: the slabs, in the order of `slab_ids`; each is uint8[nbytes] in the object store. None
            where the caller said that it holds the slab. While these references or views of them live, so do
            transient slabs; nobody else holds those. Empty if the bytes came packed.
        gone: permanent slabs that the node let go, because their samples moved to other nodes.
    """

    incarnation: int
    slab_refs: list[ray.ObjectRef[Slab] | None]
    gone: tuple[int, ...] = ()


class SlabViews:
    """Turns `Fetched` into bytes, without copying them; may be used by several threads.

    Keeps permanent slabs, which stay for life anyway, and no transient ones: those go when the caller drops the
    `Fetched` and the rows. Slabs of a cache node that died are dropped when its successor answers for the first time;
    rows that were handed out stay readable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incarnation = 0  # of the node that all of _permanent come from
        self._permanent: dict[int, Kept] = {}  # by number; replaced, not changed, when the incarnation is new

    def held(self) -> Held:
        """What to tell the cache node in the next fetch."""
        with self._lock:
            incarnation, slabs = self._incarnation, list(self._permanent)
        flags = np.zeros(max(slabs, default=0) + 1, dtype=np.bool_)
        flags[slabs] = True
        return Held(incarnation, np.packbits(flags))

    def rows(self, fetched: Fetched) -> Raw:
        """The bytes of each row.

        Raises:
            ray.exceptions.ObjectLostError: the cache node died; fetch again.
            StateError: it died, and the slabs that `fetched` left out because they were held are dropped
                already; or Ray does not find a slab within `LOCAL_S`. Fetch again.
        """
        slabs = self._slabs(fetched)
        spans = zip(fetched.slab.tolist(), fetched.offset.tolist(), fetched.length.tolist(), strict=True)
        nothing = np.empty(0, dtype=np.uint8)
        nothing.flags.writeable = False
        return [slabs[s][o : o + n] if s >= 0 else nothing for s, o, n in spans]

    @contextmanager
    def open(self, fetched: Fetched) -> Iterator[Raw]:
        """`rows`, let go at the end of the block."""
        rows = self.rows(fetched)
        try:
            yield rows
        finally:
            rows.clear()

    def _slabs(self, fetched: Fetched) -> list[Slab]:
        """The slabs of `fetched`, in the order of its `slab_ids`."""
        known = self._of(fetched.incarnation)
        refs = dict(zip(fetched.slab_ids, fetched.slab_refs, strict=True))
        new = {slab: ref for slab, ref in refs.items() if ref is not None and slab not in known}
        try:
            views = dict(zip(new, ray.get(list(new.values()), timeout=LOCAL_S), strict=True))
        except GetTimeoutError:
            raise StateError(f"slabs {sorted(new)} were not found within {LOCAL_S:g} s") from None
        with self._lock:
            known.update({slab: Kept(new[slab], view) for slab, view in views.items() if slab > 0})
            for slab in fetched.gone:
                known.pop(slab, None)
            views.update({slab: known[slab].view for slab in refs if slab in known and slab not in views})
        if len(views) < len(refs):
            gone = sorted(set(refs) - set(views))
            raise StateError(f"slabs {gone} went with the cache node that held them")
        return [views[slab] for slab in fetched.slab_ids]

    def _of(self, incarnation: int) -> dict[int, Kept]:
        """The permanent slabs of an incarnation; those of any other are dropped."""
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._permanent = incarnation, {}
            return self._permanent


class CacheReader:
    """Reads blocks from the cache node of this machine, and outlives the node's deaths; for several threads.

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

    def read(self, request: PartRequest) -> tuple[Fetched, Raw]:
        """The bytes of every row of a share, and where they came from. They stay readable if the node dies.

        Raises:
            WaitTimeoutError: the node did not answer in time, or was away for so long.
            ray.exceptions.ActorDiedError: the node is gone for good.
            Exception: what kept the node from reading the block; samples that fail are in `errors` instead.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._read(request, max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                raise self._too_late(request.block, "it did not answer") from None
            except (ActorUnavailableError, ObjectLostError, StateError) as error:
                if time.monotonic() > deadline:
                    raise self._too_late(request.block, f"it is restarting ({type(error).__name__})") from error
                time.sleep(RETRY_S)

    def read_packed(self, request: PartRequest) -> tuple[Fetched, Raw]:
        """As `read`, from another node: one call brings all bytes, and nothing else of the slabs they lie in.

        Raises:
            WaitTimeoutError: the node did not answer in time.
            ray.exceptions.RayError: the node is away, perhaps for good; this is not waited for.
        """
        try:
            return self._read_packed(request, self._timeout_s)
        except GetTimeoutError:
            raise self._too_late(request.block, "it did not answer") from None

    def _read(self, request: PartRequest, timeout_s: float) -> tuple[Fetched, Raw]:
        fetched = ray.get(self.node.fetch.remote(request, self._views.held()), timeout=timeout_s)
        return fetched, self._views.rows(fetched)

    def _read_packed(self, request: PartRequest, timeout_s: float) -> tuple[Fetched, Raw]:
        fetched, packed = ray.get(self.node.fetch_packed.remote(request), timeout=timeout_s)
        ends = np.cumsum(fetched.length).tolist()
        return fetched, [packed[end - n : end] for end, n in zip(ends, fetched.length.tolist(), strict=True)]

    def _too_late(self, block: int, why: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"waited {self._timeout_s:g} s for the cache node's block {block}: {why}")
