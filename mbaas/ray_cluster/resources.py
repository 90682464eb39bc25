"""CPUs, GPUs, object stores and nodes of the cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from mbaas.errors import ResourceError

HEAD_RESOURCE = "node:__internal_head__"
"""The resource that only the head node has."""


def _alive() -> dict[str, Any]:
    """Return the resources of the nodes that are alive, by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def store_bytes(*, with_cpus: bool = False) -> dict[str, int]:
    """Return the bytes of the object store of each of the cluster's nodes, by node id.

    Args:
        with_cpus: only nodes that offer CPUs, if there are any. Prep workers and caches run only there: a head that
            runs Ray's services often has a small store and no CPUs.
    """
    alive = _alive()
    chosen = {node: each for node, each in alive.items() if each.get("CPU", 0) > 0} if with_cpus else {}
    return {node: int(each.get("object_store_memory", 0)) for node, each in (chosen or alive).items()}


def cpus() -> int:
    """Return the number of CPUs of the cluster."""
    return int(ray.cluster_resources().get("CPU", 0))


def free_cpus() -> dict[str, float]:
    """Return the unreserved CPUs of each node, by node id."""
    return {node: each.get("CPU", 0.0) for node, each in ray._private.state.available_resources_per_node().items()}


def gpus() -> int:
    """Return the number of GPUs of the cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray will give up soon, such as reclaimed spot instances and evicted pods.

    Ray's only public API for this is for Ray Train workers. Empty if this Ray version lacks the private one.
    """
    look: Callable[[], Mapping[str, int]] | None = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(look()) if look is not None else frozenset()


def drain(address: str, node: str, deadline_s: float) -> str:
    """Tell Ray that a node will be given up at ``deadline_s``, Unix time. Return why Ray refuses, "" if it does not."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.core.generated import autoscaler_pb2

    reasons: Any = autoscaler_pb2
    reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    taken, why = GcsClient(address=address).drain_node(node, reason, "it is reclaimed", int(deadline_s * 1000))
    return "" if taken else why or "no reason given"


def spilled_bytes() -> int:
    """Return the bytes written to disk by the cluster's nodes since their start, due to a full object store."""
    # Ray has no public API for this: its metrics are for a server that scrapes them.
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return int(reply.store_stats.spilled_bytes_total)


def gpus_of(node: str) -> int:
    """Return the number of GPUs of a node, by its id."""
    return next((int(each["Resources"].get("GPU", 0)) for each in ray.nodes() if each["NodeID"] == node), 0)


def labels_of_gpu_nodes(label: str) -> set[str | None]:
    """Return the values of a label on the nodes with GPUs; None for nodes without it."""
    nodes = (node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0))
    return {node.get("Labels", {}).get(label) for node in nodes}


def cpus_per_gpu() -> float:
    """Return the smallest ratio of CPUs to GPUs among nodes with GPUs; 0 without GPUs."""
    return min((each.get("CPU", 0.0) / each["GPU"] for each in _alive().values() if each.get("GPU", 0)), default=0.0)


def gpu_marker() -> dict[str, float]:
    """Return resources that place an actor on a node with GPUs without reserving any; empty if Ray has no such
    resource.

    Ray gives GPU nodes a resource named after their GPU type for this purpose. With several types, the most frequent
    one is used.
    """
    return {name: 0.001 for name, _ in _gpus_by_type().most_common(1)}


def markable_gpus() -> int:
    """Return the number of GPUs that `gpu_marker` places actors on: all of one type."""
    return sum(amount for _, amount in _gpus_by_type().most_common(1)) or gpus()


def _gpus_by_type() -> Counter[str]:
    found: Counter[str] = Counter()
    for each in _alive().values():
        found += Counter({name: int(each.get("GPU", 0)) for name in each if name.startswith("accelerator_type:")})
    return found


def check_cpus(name: str, prep_workers: int) -> None:
    """Raise a `ResourceError` if the cluster has fewer CPUs than prep workers."""
    if prep_workers > cpus():
        raise ResourceError(
            f"feed {name!r} asks for {prep_workers} prep workers of 1 CPU each, the cluster has {cpus()} CPUs"
        )


def lasting_node(*, detached: bool) -> str:
    """Return the id of the safest node for a feed's coordinator, which is least likely to die alone.

    For a detached feed this is the head, which the cluster cannot do without; otherwise it is this program's node.
    """
    heads = [node for node, each in _alive().items() if HEAD_RESOURCE in each] if detached else []
    return heads[0] if heads else str(ray.get_runtime_context().get_node_id())


# ---- values of this machine, also without a cluster ----


def default_cpus() -> float:
    """Return the number of CPUs that Ray would count on this machine."""
    return float(ray._private.utils.get_num_cpus(override_docker_cpu_warning=True))


def default_store_bytes() -> int:
    """Return the bytes of the object store that Ray would create on this machine now."""
    utils: Any = ray._private.utils
    return int(utils.resolve_object_store_memory(utils.estimate_available_memory()))


def temp_folder() -> str:
    """Return the folder of Ray's sessions on this machine, of this process's cluster or of one that Ray would start."""
    if ray.is_initialized():
        worker: Any = ray._private.worker
        return str(worker._global_node.get_temp_dir_path())
    return str(Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray")


def has_token() -> bool:
    """Return whether this program has a token for clusters, whatever RAY_AUTH_MODE is."""
    raylet: Any = ray._raylet
    loader = raylet.AuthenticationTokenLoader.instance()
    try:
        return bool(loader.has_token(ignore_auth_mode=True))
    finally:
        loader.reset_cache()  # with a token it would refuse calls that have none, although RAY_AUTH_MODE is disabled
