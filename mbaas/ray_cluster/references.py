"""References to objects in Ray's store, as bytes that can be sent without Ray.

Ray pickles its references in the same way, but also records them as part of a value.
"""

from __future__ import annotations

from typing import Any

OBJECT_ID_BYTES = 28
"""Size of an object's id."""


def description(ref: Any) -> tuple[bytes, bytes] | None:
    """Return an object's owner and the owner's description of the object; None if this Ray version has no way."""
    import ray  # here: the core imports the addresses of parts, and needs no Ray

    worker: Any = ray._private.worker.global_worker
    try:
        _, owner, status = worker.core_worker.serialize_object_ref(ref)
    except (AttributeError, TypeError, ValueError):
        return None
    return owner, status


def reference(object_id: bytes, owner: bytes, status: bytes) -> Any:
    """Return an ordinary reference to an object, which may be lost."""
    import ray

    of_ray: Any = ray
    ref = of_ray.ObjectRef(object_id, owner)  # first, so that this process counts at least one reference
    of_ray._private.worker.global_worker.core_worker.deserialize_and_register_object_ref(
        object_id, of_ray.ObjectRef.nil(), owner, status
    )
    return ref
