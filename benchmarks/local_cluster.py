"""Local Ray clusters of several nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas.errors import MbaasError
from mbaas.tools.chaos.network import Network
from mbaas.tools.chaos.nodes import Nodes, address_kept_in, environment

SETTINGS = {
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Environment of the nodes: memory is freed within milliseconds, and memory use of other programs is ignored."""


@dataclass(frozen=True)
class LocalCluster:
    """A running cluster; this program is connected.

    Attributes:
        folder: a temporary folder for all files of Ray and of the benchmark.
        node_ids: Ray's ids of the nodes, without the head.
    """

    folder: Path
    node_ids: tuple[str, ...]


@contextlib.contextmanager
def local_cluster(number: int, *, store_bytes: int, mbit_per_s: int | None = None) -> Iterator[LocalCluster]:
    """Start nodes of one CPU with an object store each, and a head without CPUs for this program.

    With ``mbit_per_s``, each node has a network of this rate in each direction, which requires root rights.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        # Sockets need short paths.
        made = tempfile.TemporaryDirectory(prefix="mbaas-", dir="/tmp", ignore_cleanup_errors=True)
        folder = stack.enter_context(made)
        stack.enter_context(environment(address_kept_in(folder)))
        nodes = (Nodes if mbit_per_s is None else Network)(folder, store_bytes=store_bytes)
        stack.callback(nodes.end)
        added = [nodes.add(wait=False) for _ in range(number)]
        nodes.connect()
        nodes.wait_for_all()
        if isinstance(nodes, Network) and mbit_per_s is not None:
            for node in added:
                nodes.limit(node, mbit_per_s)
        yield LocalCluster(Path(folder), tuple(sorted(node.node_id for node in added)))


@contextlib.contextmanager
def actors_on(
    nodes: Sequence[str], kind: Any, arguments: Sequence[tuple[Any, ...]], **options: Any
) -> Iterator[list[Any]]:
    """Start an actor of ``kind`` for each tuple of arguments, on the nodes in turn; kill the actors at the end."""
    actors: list[Any] = []
    try:
        for index, each in enumerate(arguments):
            # Hard affinity: two trials on one node would share a store and leave another node idle.
            strategy = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)
            actors.append(kind.options(scheduling_strategy=strategy).remote(*each, **options))
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def answers(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Return the answers of actors.

    Raises:
        MbaasError: an answer takes longer than ``timeout_s``; the message contains ``what``.
    """
    try:
        found: list[Any] = ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise MbaasError(f"the benchmark waited {timeout_s:g} s for {what}") from None
    return found
