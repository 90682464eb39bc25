"""References to objects in Ray's object store that are sent to another process without reference counting by Ray.

The owner of an object tracks every process that was sent a reference: it subscribes to each, and each reports when its
last reference is dropped. For a block sent to a trial, this is more than half of the cost on both sides
(docs/scaling.md, "CPU time of delivery"). It is also redundant: consumers report released blocks, and
coordinators keep their references until then.

Memory that a process has mapped stays readable until the process unmaps it, whether or not references are counted. If
the owner drops its reference earlier, because it removed the consumer, a read raises `ray.exceptions.ObjectLostError`
at once, as for any lost object.
"""

from __future__ import annotations

from typing import Any

import ray


class Uncounted:
    """A reference to be sent inside of a value; the receiver gets an ordinary reference instead.

    Args:
        ref: of an object that this process keeps for as long as the receiver may begin to read it.
    """

    def __init__(self, ref: ray.ObjectRef[Any]) -> None:
        self._ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        # Not public: Ray pickles its references in the same way, and also records them as part of a value. If another
        # Ray version lacks this API, the reference is sent as usual, and counted.
        worker: Any = ray._private.worker.global_worker
        try:
            _, owner, status = worker.core_worker.serialize_object_ref(self._ref)
        except (AttributeError, TypeError, ValueError):
            return _as_it_is, (self._ref,)
        return _received, (self._ref.binary(), owner, status)


def _as_it_is(ref: Any) -> Any:
    return ref


def _received(binary: bytes, owner: bytes, status: bytes) -> Any:
    of_ray: Any = ray
    ref = of_ray.ObjectRef(binary, owner)  # first, so that this process counts at least one reference
    worker = of_ray._private.worker.global_worker
    worker.core_worker.deserialize_and_register_object_ref(binary, of_ray.ObjectRef.nil(), owner, status)
    return ref
