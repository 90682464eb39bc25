"""Starts a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from mbaas import runtime
from mbaas.errors import MbaasError

SETTINGS = {
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Environment of the nodes: memory comes back in milliseconds, and no node minds what others of this machine use."""


class LocalCluster:
    """A context manager of nodes with an object store and CPUs each, and a head without CPUs, where this program is.

    Args:
        nodes: how many there are beside the head.
        cpus: CPUs of each node.
        store_bytes: size of each node's object store, and of the head's.

    Attributes:
        folder: a temporary folder, with everything that Ray and others write.
        node_ids: Ray's ids of the nodes.
    """

    def __init__(self, nodes: int, *, cpus: int = 1, store_bytes: int) -> None:
        self._nodes, self._cpus, self._store_bytes = nodes, cpus, store_bytes
        self._cluster: Cluster | None = None
        self.node_ids: tuple[str, ...] = ()

    def __enter__(self) -> LocalCluster:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self.folder = Path(tempfile.mkdtemp(prefix="mbaas-", dir="/tmp"))  # sockets need short paths
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it tells of every address
        common = {"temp_dir": str(self.folder), "include_dashboard": False}
        head = {**common, "num_cpus": 0, "object_store_memory": self._store_bytes}
        self._cluster = cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._nodes):  # all start at once, and are waited for below
            cluster.add_node(
                num_cpus=self._cpus, object_store_memory=self._store_bytes, temp_dir=str(self.folder), wait=False
            )
        ray.init(address=cluster.address, namespace=runtime.NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        cluster.wait_for_nodes()
        here = ray.get_runtime_context().get_node_id()
        self.node_ids = tuple(sorted(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here))

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def _end(self) -> None:
        try:
            ray.shutdown()
            if self._cluster is not None:
                self._cluster.shutdown()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def answers(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Wait for what actors answer.

    Raises:
        MbaasError: one does not within ``timeout_s``; the message says for what the benchmark waited.
    """
    try:
        found: list[Any] = ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise MbaasError(f"the benchmark waited {timeout_s:g} s for {what}") from None
    return found
