"""Local Ray clusters of several nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from mbaas.errors import MbaasError
from mbaas.tools.chaos.nodes import Nodes, address_kept_in, environment

SETTINGS = {
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Environment of the nodes: memory is freed within milliseconds, and memory use of other programs is ignored."""


class LocalCluster:
    """Context manager for nodes with an object store and CPUs each, and a head without CPUs for this program.

    Args:
        nodes: number of nodes besides the head.
        cpus: CPUs of each node.
        store_bytes: size of the object store of each node and of the head.

    Attributes:
        folder: a temporary folder for all files of Ray and of the benchmark.
        node_ids: Ray's ids of the nodes.
    """

    def __init__(self, nodes: int, *, cpus: int = 1, store_bytes: int) -> None:
        self._number, self._cpus, self._store_bytes = nodes, cpus, store_bytes
        self._nodes: Nodes | None = None
        self.node_ids: tuple[str, ...] = ()

    def __enter__(self) -> LocalCluster:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self.folder = Path(tempfile.mkdtemp(prefix=f"mbaas-{os.getpid()}-", dir="/tmp"))  # sockets need short paths
        self._environment = contextlib.ExitStack()
        self._environment.enter_context(environment(address_kept_in(str(self.folder))))
        try:
            self._nodes = nodes = Nodes(str(self.folder), store_bytes=self._store_bytes)
            added = [nodes.add(self._cpus, wait=False) for _ in range(self._number)]
            nodes.connect()
            nodes.wait_for_all()
            self.node_ids = tuple(sorted(node.node_id for node in added))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def _end(self) -> None:
        try:
            if self._nodes is not None:
                self._nodes.end()
        finally:
            self._environment.close()
            shutil.rmtree(self.folder, ignore_errors=True)


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
