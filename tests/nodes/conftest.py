"""Ray clusters of several nodes on this machine, each with an object store of its own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

STORE_BYTES = 200 << 20

FAST_DETECTION = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
"""A dead node is noticed after two seconds instead of fifteen."""


class Nodes:
    """A cluster whose head has no CPUs, and runs the driver; nodes come and go."""

    def __init__(self, folder: str) -> None:
        self._common = {"temp_dir": folder, "object_store_memory": STORE_BYTES}
        head = {**self._common, "num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)

    def connect(self) -> None:
        address = self._cluster.address
        ray.init(address=address, namespace="mbaas", log_to_driver=False, logging_level=logging.ERROR)

    def add(self, cpus: int = 1, store_bytes: int = STORE_BYTES) -> Any:
        """Another node; its handle, whose ``unique_id`` is Ray's id of it."""
        return self._cluster.add_node(num_cpus=cpus, **{**self._common, "object_store_memory": store_bytes})

    def kill(self, node: Any) -> None:
        """The node is gone at once, with everything on it."""
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A cluster without any CPUs so far, which the test is connected to."""
    for name, value in FAST_DETECTION.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory(prefix="mb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Nodes(folder)
        try:
            cluster.connect()
            yield cluster
        finally:
            ray.shutdown()
            cluster.end()
