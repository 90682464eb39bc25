"""References to objects in Ray's object store that are sent to another process without Ray counting them there.

The owner of an object keeps book of every process that was sent a reference to it: it subscribes to each of them, and
each tells it when the last one is dropped. For a block that a coordinator hands to a trial this is more than half of
what both spend on it (docs/scaling.md, "What made delivery cheaper"), and it is done twice: consumers say which blocks
they have let go of, and coordinators keep their references until then.

What a process has mapped stays readable until it lets go of it, whoever holds references, and whether or not they are
counted. If the owner drops its reference before, because it gave the consumer up, reading raises an
`ray.exceptions.ObjectLostError` at once, as for any object that is gone.
"""

from __future__ import annotations

from typing import Any

import ray


class Uncounted:
    """A reference to be sent within a value: who receives the value finds an ordinary reference in its place.

    Args:
        ref: of an object that this process keeps for as long as the receiver may begin to read it.
    """

    def __init__(self, ref: ray.ObjectRef[Any]) -> None:
        self._ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        # Not public: Ray pickles its references in the same way, and notes beside that they are part of a value. Where
        # another version of Ray has no such thing the reference goes as it is, and is counted.
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
    ref = of_ray.ObjectRef(binary, owner)  # before the next line, so that this process counts at least one
    worker = of_ray._private.worker.global_worker
    worker.core_worker.deserialize_and_register_object_ref(binary, of_ray.ObjectRef.nil(), owner, status)
    return ref
