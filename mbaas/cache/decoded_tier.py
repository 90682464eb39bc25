"""What a node keeps decoded, and which samples it asks prep workers to hand in. Pure.

A prep worker decodes a sample anyway. If the node is to keep it decoded, the answer to the worker's fetch says so
(*promise*: room is set aside), and the worker hands in what the pipeline's prefix made of it. So nothing is decoded for
the tier alone, and no epoch waits for it to fill.

How much of the node's memory is for which form follows from measured costs (`mbaas.allocation.forms`). Within that a
sample that was admitted stays (MinIO, see `mbaas.cache.directory`). What one form has beyond its part, because there
was room, gives way when the other needs the room for its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.directory import among, fitting
from mbaas.order import Ids, in_share
from mbaas.placement import PartRequest

LAPSE_FETCHES = 256
"""A promise lapses after this many further fetches: the worker to which it was given has died, most likely."""


class HandIn(Struct, frozen=True, eq=False):
    """Decoded samples that come to be kept in one slab.

    Attributes:
        slab: its number, positive.
        chosen: bool[n], which of the samples that were handed in are kept in memory.
        to_disk: bool[n], which of the others may be kept on disk.
        sample_ids: int64[k], those that are kept in memory.
        lengths: int64[k], bytes.
    """

    slab: int
    chosen: NDArray[np.bool_]
    to_disk: NDArray[np.bool_]
    sample_ids: Ids
    lengths: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Size of the slab."""
        return int(self.lengths.sum())


@dataclass
class _Promise:
    """Room that is set aside for what a worker hands in.

    Attributes:
        sample_ids: that are expected.
        in_memory: those of them that are for memory; the others are for the disk.
        each_bytes: of one of them.
        since: how many fetches had begun when the promise was last needed.
    """

    sample_ids: frozenset[int]
    in_memory: frozenset[int]
    each_bytes: int
    since: int

    @property
    def nbytes(self) -> int:
        """Bytes of the room in memory."""
        return len(self.in_memory) * self.each_bytes


@dataclass
class DecodedTier:
    """The bytes of decoded samples on one node.

    Attributes:
        sample_bytes: of a decoded sample, on average; 0 if none is to be kept.
        target_bytes: the node's memory that is for decoded samples.
        disk_free_bytes: what the node's disk has left for decoded samples.
        undecoded_share: of the samples, which DALI makes beside the cpu engine, and of which none is kept decoded.
        promised_bytes: room that is set aside.
        used_bytes: of all slabs. Beyond the target if that fell, or if samples were larger than was expected.
        slabs: slab -> its bytes; all slabs of decoded samples, those included that are being made.
        unfit: samples that no worker could hand in; they are not asked for again.
        coming: by slab, what was handed in and is not readable yet.
    """

    sample_bytes: float = 0.0
    target_bytes: int = 0
    disk_free_bytes: int = 0
    undecoded_share: float = 0.0
    used_bytes: int = 0
    promised_bytes: int = 0
    slabs: dict[int, int] = field(default_factory=dict)
    unfit: set[int] = field(default_factory=set)
    coming: dict[int, HandIn] = field(default_factory=dict)
    _promises: dict[PartRequest, _Promise] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)  # the samples of all promises, and of all that are coming
    _fetches: int = 0

    @property
    def free_bytes(self) -> int:
        """What is left of the target; 0 if there is more than that."""
        return max(0, self.target_bytes - self.used_bytes - self.promised_bytes)

    @property
    def excess_bytes(self) -> int:
        """What decoded samples have beyond the target."""
        return max(0, self.used_bytes - self.target_bytes)

    # ---- promises ----

    def wanted(self, sample_ids: Ids, room_bytes: int) -> NDArray[np.bool_]:
        """Choose the samples that a worker is to hand in, as many as there is room for: bool[n]."""
        wanted = np.zeros(len(sample_ids), np.bool_)
        most = int(max(0, room_bytes) // self.sample_bytes) if self.sample_bytes else 0
        if most:
            fit = (
                ~self.expects(sample_ids) & ~among(sample_ids, self.unfit) & ~in_share(sample_ids, self.undecoded_share)
            )
            wanted[np.flatnonzero(fit)[:most]] = True
        return wanted

    def promise(self, request: PartRequest, sample_ids: Ids, to_disk: Ids) -> int:
        """Set room aside for samples of a part that a worker is to hand in. Returns its bytes in memory.

        Args:
            request: the part.
            sample_ids: that are to be kept in memory.
            to_disk: others, that are to be kept on disk.
        """
        if not len(sample_ids) + len(to_disk):
            return 0
        assert request not in self._promises, f"room for {request} was promised before"
        in_memory = frozenset(sample_ids.tolist())
        expected = in_memory.union(to_disk.tolist())
        promise = _Promise(expected, in_memory, math.floor(self.sample_bytes), self._fetches)
        self._promises[request] = promise
        self._expected |= expected
        self.promised_bytes += promise.nbytes
        return promise.nbytes

    def expects(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples are to be handed in, or were and are not readable yet: bool[n]."""
        return among(sample_ids, self._expected) if self._expected else np.zeros(len(sample_ids), np.bool_)

    def promised(self, request: PartRequest) -> tuple[frozenset[int], int]:
        """Return the samples of a part that are to be handed in, and the bytes that are expected of them."""
        promise = self._promises.get(request)
        if promise is None:
            return frozenset(), 0
        return promise.sample_ids, len(promise.sample_ids) * promise.each_bytes

    def for_memory(self, request: PartRequest) -> frozenset[int]:
        """Return the samples of a part that are to be handed in, and kept in memory."""
        promise = self._promises.get(request)
        return frozenset() if promise is None else promise.in_memory

    def fetched(self, request: PartRequest) -> int:
        """Note that a fetch of a part begins. Returns the bytes of promises that lapse."""
        self._fetches += 1
        if (promise := self._promises.get(request)) is not None:
            promise.since = self._fetches
        # In the order in which promises were made, which is nearly that in which parts are fetched: the first that
        # is young enough ends the search.
        lapsed = 0
        while self._promises:
            oldest = next(iter(self._promises))
            if self._fetches - self._promises[oldest].since <= LAPSE_FETCHES:
                break
            lapsed += self.release(oldest)
        return lapsed

    def keep_promise(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.bool_]:
        """End the promise for some samples of a part: bool[n], for which room in memory was."""
        promise = self._promises.get(request)
        if promise is None:
            return np.zeros(len(sample_ids), np.bool_)
        in_memory, handed = among(sample_ids, promise.in_memory), promise.sample_ids & {*sample_ids.tolist()}
        self.promised_bytes -= promise.nbytes
        self._expected -= handed
        promise.sample_ids, promise.in_memory = promise.sample_ids - handed, promise.in_memory - handed
        self.promised_bytes += promise.nbytes
        if not promise.sample_ids:
            del self._promises[request]
        return in_memory

    def release(self, request: PartRequest) -> int:
        """End a promise, if there is one. Returns the bytes that were set aside."""
        promise = self._promises.pop(request, None)
        if promise is None:
            return 0
        self._expected -= promise.sample_ids
        self.promised_bytes -= promise.nbytes
        return promise.nbytes

    # ---- what is handed in ----

    def admit(
        self,
        slab: int,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        *,
        new: NDArray[np.bool_],
        promised: NDArray[np.bool_],
        to_disk: NDArray[np.bool_],
        free: int,
    ) -> HandIn:
        """Choose of what was handed in the samples that are kept in memory, and charge them.

        Args:
            slab: number of the slab that they get.
            sample_ids: int64[n].
            lengths: int64[n], bytes.
            new: bool[n], those that memory is to keep, and does not yet.
            promised: bool[n], those for which there was room in memory, which is free again: see `keep_promise`.
            to_disk: bool[n], those that the disk may keep if memory does not.
            free: bytes of the node's memory, beside all that is used or promised.
        """
        new = new & ~self.expects(sample_ids)
        # Samples may be larger than the mean, for which room was promised, and are kept nowhere else.
        beyond = min(free, max(self.free_bytes, int(2 * promised.sum() * self.sample_bytes)))
        chosen = fitting(np.where(new & promised, lengths, 0), beyond)
        left = min(free, self.free_bytes) - int(lengths[chosen].sum())
        chosen |= fitting(np.where(new & ~promised, lengths, 0), max(0, left))
        hand_in = HandIn(slab, chosen, to_disk & ~chosen, sample_ids[chosen], lengths[chosen])
        if len(hand_in.sample_ids):
            self.coming[slab] = hand_in
            self._expected.update(hand_in.sample_ids.tolist())
            self.take(slab, hand_in.nbytes)
        return hand_in

    def arrived(self, hand_in: HandIn) -> None:
        """Note that a slab is readable, or that it could not be made: then `dropped` follows."""
        del self.coming[hand_in.slab]
        self._expected.difference_update(hand_in.sample_ids.tolist())

    # ---- slabs ----

    def take(self, slab: int, nbytes: int) -> None:
        """Charge a slab."""
        self.slabs[slab] = nbytes
        self.used_bytes += nbytes

    def shrunk(self, slab: int, nbytes: int) -> None:
        """Note that a slab has so many bytes fewer; it is gone if none are left."""
        self.slabs[slab] -= nbytes
        self.used_bytes -= nbytes
        if not self.slabs[slab]:
            del self.slabs[slab]

    def dropped(self, slab: int) -> None:
        """Note that a slab went."""
        self.used_bytes -= self.slabs.pop(slab)

    def validate(self) -> None:
        """Check the sums.

        Raises:
            AssertionError: one of them is wrong.
        """
        assert self.used_bytes == sum(self.slabs.values()), self.used_bytes
        assert self.promised_bytes == sum(each.nbytes for each in self._promises.values()), self.promised_bytes
        assert all(each.in_memory <= each.sample_ids for each in self._promises.values()), self._promises
        expected = [i for each in self._promises.values() for i in each.sample_ids]
        expected += [i for each in self.coming.values() for i in each.sample_ids.tolist()]
        assert len(expected) == len(set(expected)), "a sample is expected twice"
        assert set(expected) == self._expected, self._expected ^ set(expected)
