"""Ray nodes on this machine, with separate object stores, that can start, leave, die and pause."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from mbaas.base.units import seconds
from mbaas.errors import ResourceError, WaitTimeoutError
from mbaas.ray_cluster import actor_names, connection, resources
from mbaas.tools.chaos.participants import alive, kill, pause, resume

STORE_BYTES = 200 << 20

UP_S = 90.0
"""Longest wait for a node to start."""

FAST_DETECTION = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
"""Environment of the head: dead nodes are detected after 2 s instead of 15 s."""


class Nodes:
    """A cluster whose head has no CPUs and runs the driver.

    The path of ``folder``, for Ray's files, must be short, because it contains sockets. `there` has the other nodes,
    oldest first.
    """

    def __init__(self, folder: str, *, store_bytes: int = STORE_BYTES, **head: Any) -> None:
        self._common: dict[str, Any] = {"temp_dir": folder, "object_store_memory": store_bytes}
        # no log monitor: its CPU use grows with the number of workers that ever wrote a log
        head |= {**self._common, "num_cpus": 0, "include_dashboard": False, "include_log_monitor": False}
        with _own_sigterm():
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        # A process of the head ends it when this program is killed, and the other nodes then end too. Nodes with their
        # own hooks could only be started in the main thread.
        self._cluster._shutdown_at_exit = False
        self.there: list[Any] = []

    @property
    def address(self) -> str:
        """Host and port of the head."""
        return str(self._cluster.address)

    def connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it logs every address
        head: Any = self._cluster.head_node
        with _own_sigterm():
            ray.init(
                address=self.address,
                namespace=actor_names.NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=head.node_ip_address,
            )

    def add(self, cpus: int = 1, *, wait: bool = True, **options: Any) -> Any:
        """Start another node. Return its handle; its ``node_id`` is the Ray node id.

        Args:
            cpus: CPUs of the node.
            wait: wait until it is up. If false, several can start at once, followed by `wait_for_all`.
            options: of Ray's own test cluster (``ray.cluster_utils.Cluster``) for a node.

        Raises:
            WaitTimeoutError: the node is not up in time; it is removed.
        """
        with _own_sigterm():
            node = self._cluster.add_node(num_cpus=cpus, wait=False, **{**self._common, **options})
        if wait:
            try:
                self._cluster._wait_for_node(node, UP_S)
            except TimeoutError:
                self._cluster.remove_node(node, allow_graceful=False)
                raise WaitTimeoutError(f"a node did not come: waited {seconds(UP_S)} for it to be up") from None
        self.there.append(node)
        return node

    def wait_for_all(self) -> None:
        self._cluster.wait_for_nodes()

    def pids(self, node: Any) -> list[int]:
        """Return the live processes of a node, its raylet first."""
        raylet = self.raylet(node)
        found = [raylet]
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid for child in psutil.Process(raylet).children(recursive=True)]
        found += [info.process.pid for infos in node.all_processes.values() for info in infos]
        return [pid for pid in dict.fromkeys(found) if alive(pid)]

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def kill(self, node: Any) -> None:
        """Kill a node abruptly, with all its processes."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        self._forget(node, allow_graceful=False)

    def kill_raylet(self, node: Any) -> None:
        """Kill only a node's raylet; Ray ends its other processes."""
        kill(self.raylet(node))
        self._forget(node, allow_graceful=False)

    def remove(self, node: Any) -> None:
        """Shut a node down gracefully, as a scheduler or autoscaler does."""
        self._forget(node, allow_graceful=True)

    def drain(self, node: Any, within_s: float) -> None:
        """Announce that a node will leave, as for a spot instance: Ray starts nothing new there.

        Ray does not end the node at the deadline, but once it has no actor and no referenced object. Raises
        ResourceError if Ray rejects the notice.
        """
        if why := resources.drain(self.address, node.node_id, time.time() + within_s):
            raise ResourceError(f"node {node.node_id} must take notice that it will go, Ray says: {why}")

    def _forget(self, node: Any, *, allow_graceful: bool) -> None:
        self.there.remove(node)
        self._cluster.remove_node(node, allow_graceful=allow_graceful)

    def pause(self, node: Any) -> Callable[[], None]:
        """Pause all processes of a node. Return a function that resumes them."""
        pids = self.pids(node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pause(pid)
        return lambda: _resume(pids)

    def end(self) -> None:
        """Disconnect this program, and end all nodes."""
        ray.shutdown()
        for node in self.there:
            _resume(self.pids(node))
        self._cluster.shutdown()


def _resume(pids: list[int]) -> None:
    for pid in pids:
        resume(pid)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this program's SIGTERM handler: Ray installs one that exits without a report."""
    own = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray only sets one there, too
            signal.signal(signal.SIGTERM, own)


def address_kept_in(folder: str) -> dict[str, str]:
    """Return variables that make Ray write a cluster's address into ``folder`` instead of the shared /tmp/ray."""
    (Path(folder) / "ray").mkdir(exist_ok=True)
    return {"RAY_TMPDIR": folder}


@contextlib.contextmanager
def own_token() -> Iterator[None]:
    """Give clusters started inside the context a new token that only their processes have.

    Without tokens, any program that reaches a cluster's ports can run code as the user.
    """
    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}):
            connection.reread_token()
            yield
    finally:
        connection.reread_token()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, for this program and the processes it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
