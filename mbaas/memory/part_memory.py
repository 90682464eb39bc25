"""The memory of a part of a block: an object in Ray's store, or a slot of its worker's memory.

A process that keeps a part has a `PartMemory`. It sends a `PartAddress`, a plain value. The receiver opens the address
with ``held()``.

Ray does not count the references in these addresses. Normally the owner of an object tracks every process that was sent
a reference: it subscribes to each, and each reports when its last reference is dropped. For a block sent to a trial,
this is more than half of the cost on both sides (docs/scaling.md, "CPU time of delivery"). It is also redundant:
consumers report released blocks, and coordinators keep their references until then.

Memory that a process has mapped stays readable until the process unmaps it, whether or not references are counted. If
the owner drops its reference earlier, because it removed the consumer, a read raises `UnreadableError` at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

from msgspec import Meta, Struct

from mbaas.errors import shown
from mbaas.memory.slots import Slot
from mbaas.ray_cluster import references
from mbaas.samples.fields import Arrays

if TYPE_CHECKING:  # every message needs this module, and importing Ray takes a second
    from ray import ObjectRef


class UnreadableError(Exception):
    """Parts of a block are lost (``for_good``) or late. Users never see this error: streams request the block again."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.for_good = for_good


class PartMemory(Protocol):
    """Memory with the arrays of a part, opened by this process."""

    @property
    def ref(self) -> ObjectRef[Arrays] | None:
        """The object in Ray's store, which other nodes can copy; None for a slot."""

    @property
    def is_in_live_worker(self) -> bool:
        """True for the memory of a running worker: all processes on its node should be able to open it."""

    def sent(self) -> PartAddress:
        """Return the address for other processes. They can read while this object exists."""

    def read(self, timeout_s: float) -> Arrays:
        """Return the arrays, read-only; the memory stays valid while any array or view exists.

        Raises `UnreadableError` if they are not available within ``timeout_s``, or are lost.
        """


class StoredObject(Struct, frozen=True, array_like=True, tag=True):
    """Address of an object in Ray's store: its id, its owner, and the owner's description of it, in Ray's encoding."""

    object_id: Annotated[bytes, Meta(min_length=references.OBJECT_ID_BYTES, max_length=references.OBJECT_ID_BYTES)]
    owner: bytes
    status: bytes

    def held(self) -> HeldObject:
        """Return an ordinary reference to the object, which may be lost."""
        return HeldObject(references.reference(self.object_id, self.owner, self.status))


class CountedObject(Struct, frozen=True, array_like=True, tag=True):
    """Address of an object whose reference Ray counts. It cannot be sent without Ray."""

    ref: Any

    def __post_init__(self) -> None:
        import ray

        if not isinstance(self.ref, ray.ObjectRef):  # for example in a message that was sent without Ray
            raise TypeError(f"ref must be a reference of Ray, got {shown(self.ref)}")

    def held(self) -> HeldObject:
        """Return the reference."""
        return HeldObject(self.ref)


PartAddress: TypeAlias = Slot | StoredObject | CountedObject
"""The address of a part. ``held()`` opens it, or returns None if it is lost. A `Slot` can only be read on the node that
made the part."""


class HeldObject:
    """An object in Ray's store, which the reference ``ref`` keeps there."""

    def __init__(self, ref: ObjectRef[Arrays]) -> None:
        self.ref = ref

    @property
    def is_in_live_worker(self) -> bool:
        """See `PartMemory`."""
        return False

    def sent(self) -> StoredObject | CountedObject:
        """See `PartMemory`."""
        if (described := references.description(self.ref)) is None:
            return CountedObject(self.ref)
        return StoredObject(self.ref.binary(), *described)

    def read(self, timeout_s: float) -> Arrays:
        """See `PartMemory`."""
        (arrays,) = read([self], timeout_s)
        return arrays


def read(parts: Sequence[PartMemory | None], timeout_s: float) -> list[Arrays]:
    """Return the arrays of several parts, with one call to Ray for all that are in its store.

    Raises `UnreadableError` if a part is None, is not available within ``timeout_s``, or is lost.
    """
    import ray

    from mbaas.ray_cluster.connection import get

    refs = refs_of(parts)
    try:
        found = dict(zip(refs, get(refs, timeout_s) if refs else (), strict=True))
    except ray.exceptions.GetTimeoutError:
        raise UnreadableError(for_good=False) from None
    except ray.exceptions.ObjectLostError:
        raise UnreadableError(for_good=True) from None
    arrays = []
    for part in parts:
        if part is None:
            raise UnreadableError(for_good=True)
        arrays.append(part.read(timeout_s) if part.ref is None else found[part.ref])
    return arrays


def refs_of(parts: Iterable[PartMemory | None]) -> list[ObjectRef[Arrays]]:
    """Return Ray's references to the parts that are in its store."""
    return [part.ref for part in parts if part is not None and part.ref is not None]


def bring(refs: list[ObjectRef[Any]]) -> None:
    """Have Ray copy existing objects to this node, without waiting.

    `ray.get` with a timeout is not enough: at the timeout Ray discards the received bytes, so a large block would never
    arrive over a slow link. A transfer started by `ray.wait` continues.
    """
    import ray

    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=0)
