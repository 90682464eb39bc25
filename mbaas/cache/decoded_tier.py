"""The decoded tier of a node: samples cached decoded, and samples that prep workers should hand in. Pure.

Prep workers decode every sample anyway. In its reply to a worker's fetch, the node requests some samples and reserves
space for them (a *promise*). The worker then hands in the output of a deterministic prefix of its pipeline. Encoded and
decoded samples each have a share of memory (`mbaas.model.forms`), and may use free space beyond it until the other kind
needs it.

When consumers bring new pipelines, the common prefix may become shorter. Samples are then cached in another *form*:
after fewer transforms. Samples in the old form stay readable for pipelines that can use them, until workers hand in
the new form or their memory is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.directory import MinIO, fitting, member_mask
from mbaas.samples.order import Ids, in_share
from mbaas.samples.placement import ENCODED, PartRequest

LAPSE_FETCHES = 256
"""A promise lapses after this many further fetches, because its worker has probably died."""


class HandIn(Struct, frozen=True, eq=False):
    """Decoded samples of one ``form`` to cache in one slab, whose number is positive.

    ``chosen`` and ``to_disk``, bool[n], mark the samples of the hand-in to cache in memory, and others that may go to
    disk. ``sample_ids`` and ``lengths``, int64[k], are the ids and bytes of those cached in memory.
    """

    slab: int
    chosen: NDArray[np.bool_]
    to_disk: NDArray[np.bool_]
    sample_ids: Ids
    lengths: NDArray[np.int64]
    form: int

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())


@dataclass
class _Promise:
    sample_ids: frozenset[int]  # expected samples
    in_memory: frozenset[int]  # the subset for memory; the rest is for disk
    each_bytes: int  # reserved per sample
    since: int  # fetch count of the tier when the promise was last used

    @property
    def nbytes(self) -> int:
        return len(self.in_memory) * self.each_bytes


_NO_PROMISE = _Promise(frozenset(), frozenset(), 0, 0)


@dataclass
class DecodedTier:
    """Byte counts of one node's decoded samples."""

    minio: MinIO  # the node's byte budget, charged with promises and hand-ins
    form: int = ENCODED  # form that workers should hand in; ENCODED for none
    sample_bytes: float = 0.0  # mean bytes of a decoded sample; 0 if none are to be cached
    # target_bytes, disk_free_bytes: memory for decoded samples, and free disk space
    target_bytes: int = 0
    disk_free_bytes: int = 0
    # fraction of samples that DALI prepares alongside the CPU engine; never cached decoded
    undecoded_share: float = 0.0
    # total of all slabs. Above the target if the target fell, or if samples were larger than expected.
    used_bytes: int = 0
    promised_bytes: int = 0  # memory reserved by promises
    slabs: dict[int, int] = field(default_factory=dict)  # slab -> bytes, including slabs in creation
    forms: dict[int, int] = field(default_factory=dict)  # slab -> form of its samples
    unfit: set[int] = field(default_factory=set)  # samples that no worker could hand in; not requested again
    coming: dict[int, HandIn] = field(default_factory=dict)  # slab -> a hand-in that is not readable yet
    _bytes_of: dict[int, int] = field(default_factory=dict)  # form -> bytes of its slabs
    _promises: dict[PartRequest, _Promise] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)  # the samples of all promises and of `coming`
    _fetches: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes left below the target, at least 0."""
        return max(0, self.target_bytes - self.used_bytes - self.promised_bytes)

    @property
    def excess_bytes(self) -> int:
        """Bytes used beyond the target, at least 0."""
        return max(0, self.used_bytes - self.target_bytes)

    @property
    def outdated_bytes(self) -> int:
        """Bytes of the slabs whose samples are not in the current form."""
        return self.used_bytes - self._bytes_of.get(self.form, 0)

    def outdated(self) -> list[int]:
        """Return the slabs whose samples are not in the current form."""
        if not self.outdated_bytes:  # the usual case, without a look at all slabs
            return []
        return [slab for slab, form in self.forms.items() if form != self.form]

    def set_form(self, form: int) -> None:
        """Set the form that workers should hand in. Promises of the old form end."""
        if form != self.form:
            for request in [*self._promises]:
                self.release(request)
            self.form = form
            self.unfit.clear()

    # ---- promises: space reserved for hand-ins ----

    def wanted(self, sample_ids: Ids, room_bytes: int) -> NDArray[np.bool_]:
        """Choose the samples that a worker should hand in, as many as fit into ``room_bytes``: bool[n]."""
        wanted = np.zeros(len(sample_ids), np.bool_)
        most = int(max(0, room_bytes) // self.sample_bytes) if self.sample_bytes else 0
        if most:
            excluded = self.expects(sample_ids) | member_mask(sample_ids, self.unfit)
            excluded |= in_share(sample_ids, self.undecoded_share)
            wanted[np.flatnonzero(~excluded)[:most]] = True
        return wanted

    def promise(self, request: PartRequest, sample_ids: Ids, to_disk: Ids) -> None:
        """Reserve space for hand-ins: `sample_ids` in memory, `to_disk` on disk."""
        if not len(sample_ids) + len(to_disk):
            return
        assert request not in self._promises, f"room for {request} was promised before"
        in_memory = frozenset(sample_ids.tolist())
        expected = in_memory.union(to_disk.tolist())
        promise = _Promise(expected, in_memory, math.floor(self.sample_bytes), self._fetches)
        self._promises[request] = promise
        self._expected |= expected
        self._reserve(promise.nbytes)

    def _reserve(self, nbytes: int) -> None:
        self.promised_bytes += nbytes
        self.minio.used_bytes += nbytes

    def expects(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are promised, or were handed in and are not readable yet: bool[n]."""
        return member_mask(sample_ids, self._expected)

    def promised(self, request: PartRequest) -> tuple[frozenset[int], int]:
        """Return the promised samples of a part, and their expected bytes in total."""
        promise = self._promises.get(request, _NO_PROMISE)
        return promise.sample_ids, len(promise.sample_ids) * promise.each_bytes

    def for_memory(self, request: PartRequest) -> frozenset[int]:
        return self._promises.get(request, _NO_PROMISE).in_memory

    def fetched(self, request: PartRequest) -> None:
        """Record the start of a part's fetch. Old promises lapse."""
        self._fetches += 1
        if (promise := self._promises.get(request)) is not None:
            promise.since = self._fetches
        # Promises are in order of creation, nearly the order of fetches, so the first recent one ends the search.
        while self._promises:
            oldest = next(iter(self._promises))
            if self._fetches - self._promises[oldest].since <= LAPSE_FETCHES:
                return
            self.release(oldest)

    def keep_promise(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.bool_]:
        """End the promise for some samples of a part. Return the samples that had memory reserved: bool[n]."""
        promise = self._promises.get(request)
        if promise is None:
            return np.zeros(len(sample_ids), np.bool_)
        in_memory, handed = member_mask(sample_ids, promise.in_memory), promise.sample_ids & {*sample_ids.tolist()}
        self._reserve(-promise.nbytes)
        self._expected -= handed
        promise.sample_ids, promise.in_memory = promise.sample_ids - handed, promise.in_memory - handed
        self._reserve(promise.nbytes)
        if not promise.sample_ids:
            del self._promises[request]
        return in_memory

    def release(self, request: PartRequest) -> None:
        """End a part's promise, if any: it has no further hand-ins."""
        promise = self._promises.pop(request, _NO_PROMISE)
        self._expected -= promise.sample_ids
        self._reserve(-promise.nbytes)

    # ---- hand-ins ----

    def admit(
        self,
        slab: int,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        *,
        new: NDArray[np.bool_],
        promised: NDArray[np.bool_],
        to_disk: NDArray[np.bool_],
    ) -> HandIn:
        """Choose the samples of a hand-in that are cached in memory, in a new slab, and charge their bytes.

        Args:
            new: bool[n], samples that should be in memory and are not there yet.
            promised: bool[n], samples whose reserved memory was just released; see `keep_promise`.
            to_disk: bool[n], samples that may go to disk if they are not chosen for memory.
        """
        free = self.minio.free_bytes
        new = new & ~self.expects(sample_ids)
        # Samples may be larger than the reserved mean, and no other tier caches them.
        beyond = min(free, max(self.free_bytes, int(2 * promised.sum() * self.sample_bytes)))
        chosen = fitting(np.where(new & promised, lengths, 0), beyond)
        left = min(free, self.free_bytes) - int(lengths[chosen].sum())
        chosen |= fitting(np.where(new & ~promised, lengths, 0), max(0, left))
        hand_in = HandIn(slab, chosen, to_disk & ~chosen, sample_ids[chosen], lengths[chosen], self.form)
        if len(hand_in.sample_ids):
            self.coming[slab] = hand_in
            self._expected.update(hand_in.sample_ids.tolist())
            self.take(slab, hand_in.nbytes, self.form)
            self.minio.used_bytes += hand_in.nbytes
        return hand_in

    def arrived(self, hand_in: HandIn) -> None:
        """Record that a slab is readable."""
        del self.coming[hand_in.slab]
        self._expected.difference_update(hand_in.sample_ids.tolist())

    def failed(self, hand_in: HandIn) -> None:
        """Record that a slab could not be created, and give its bytes back."""
        self.arrived(hand_in)
        self.dropped(hand_in.slab)
        self.minio.used_bytes -= hand_in.nbytes

    # ---- slabs ----

    def take(self, slab: int, nbytes: int, form: int) -> None:
        """Charge a slab."""
        self.slabs[slab], self.forms[slab] = nbytes, form
        self._charge(form, nbytes)

    def shrunk(self, slab: int, nbytes: int) -> None:
        """Reduce a slab's charge by ``nbytes``; at 0 bytes the slab is removed."""
        self.slabs[slab] -= nbytes
        self._charge(self.forms[slab], -nbytes)
        if not self.slabs[slab]:
            del self.slabs[slab], self.forms[slab]

    def dropped(self, slab: int) -> None:
        self._charge(self.forms.pop(slab), -self.slabs.pop(slab))

    def _charge(self, form: int, nbytes: int) -> None:
        self.used_bytes += nbytes
        self._bytes_of[form] = self._bytes_of.get(form, 0) + nbytes

    def validate(self) -> None:
        """Raise AssertionError if a sum is wrong."""
        assert self.used_bytes == sum(self.slabs.values()), self.used_bytes
        assert self.slabs.keys() == self.forms.keys(), (self.slabs, self.forms)
        for form, nbytes in self._bytes_of.items():
            assert nbytes == sum(self.slabs[slab] for slab in self.slabs if self.forms[slab] == form), (form, nbytes)
        assert self.promised_bytes == sum(each.nbytes for each in self._promises.values()), self.promised_bytes
        assert all(each.in_memory <= each.sample_ids for each in self._promises.values()), self._promises
        expected = [i for each in self._promises.values() for i in each.sample_ids]
        expected += [i for each in self.coming.values() for i in each.sample_ids.tolist()]
        assert len(expected) == len(set(expected)), "a sample is expected twice"
        assert set(expected) == self._expected, self._expected ^ set(expected)
