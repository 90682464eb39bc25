"""Ray nodes on this machine, each with an object store of its own; they come, go, die and stand still."""

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
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from mbaas import runtime
from mbaas.chaos.participants import alive, kill, pause_all, resume_all
from mbaas.errors import ResourceError, WaitTimeoutError
from mbaas.units import seconds

STORE_BYTES = 200 << 20

UP_S = 90.0
"""How long a node may take until it is up."""

FAST_DETECTION = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
"""Environment of the head: a dead node is noticed after two seconds instead of fifteen."""


class Nodes:
    """A cluster whose head has no CPUs, and runs the driver.

    Args:
        folder: where Ray keeps its files; a short path, for there are sockets in it.
        store_bytes: size of the object store of the head, and of nodes of which nothing else is said.

    Attributes:
        there: the handles of the nodes beside the head, in the order in which they came.
    """

    def __init__(self, folder: str, *, store_bytes: int = STORE_BYTES) -> None:
        self._common: dict[str, Any] = {"temp_dir": folder, "object_store_memory": store_bytes}
        # without the monitor of logs, which takes the more of the CPU the more workers ever wrote one
        head = {**self._common, "num_cpus": 0, "include_dashboard": False, "include_log_monitor": False}
        with _own_sigterm():
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        # The head has a process that ends it when this program is killed, and then the nodes end by themselves. With
        # hooks of their own they could come in the main thread only.
        self._cluster._shutdown_at_exit = False
        self.there: list[Any] = []

    @property
    def address(self) -> str:
        """Host and port of the head."""
        return str(self._cluster.address)

    def connect(self) -> None:
        """Make this program a driver on the head."""
        logging.getLogger("ray").setLevel(logging.ERROR)  # it tells of every address
        with _own_sigterm():
            ray.init(
                address=self.address, namespace=runtime.NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
            )

    def add(self, cpus: int = 1, store_bytes: int | None = None, *, wait: bool = True) -> Any:
        """Start another node; return its handle, whose ``node_id`` is Ray's id of it.

        Args:
            cpus: that it gives out.
            store_bytes: size of its object store; default: as that of the head.
            wait: until it is up; without, `wait_for_all` does, and several start at once.

        Raises:
            WaitTimeoutError: it is not up in time; nothing of it is left.
        """
        own = {} if store_bytes is None else {"object_store_memory": store_bytes}
        with _own_sigterm():
            node = self._cluster.add_node(num_cpus=cpus, wait=False, **{**self._common, **own})
        if wait:
            try:
                self._cluster._wait_for_node(node, UP_S)
            except TimeoutError:
                self._cluster.remove_node(node, allow_graceful=False)
                raise WaitTimeoutError(f"a node did not come: waited {seconds(UP_S)} for it to be up") from None
        self.there.append(node)
        return node

    def wait_for_all(self) -> None:
        """Wait until all nodes are up that were added."""
        self._cluster.wait_for_nodes()

    def pids(self, node: Any) -> list[int]:
        """Return the processes of a node that live, its raylet first."""
        raylet = self.raylet(node)
        found = [raylet]
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid for child in psutil.Process(raylet).children(recursive=True)]
        found += [info.process.pid for infos in node.all_processes.values() for info in infos]
        return [pid for pid in dict.fromkeys(found) if alive(pid)]

    def raylet(self, node: Any) -> int:
        """Return the process id of a node's raylet."""
        return int(node.all_processes["raylet"][0].process.pid)

    def kill(self, node: Any) -> None:
        """Have a node gone at once, with everything on it."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        self._forget(node, allow_graceful=False)

    def kill_raylet(self, node: Any) -> None:
        """Kill a node's raylet alone; Ray ends the rest of the node."""
        kill(self.raylet(node))
        self._forget(node, allow_graceful=False)

    def remove(self, node: Any) -> None:
        """Have a node leave in good order, as a scheduler's or an autoscaler's request has it."""
        self._forget(node, allow_graceful=True)

    def drain(self, node: Any, within_s: float) -> None:
        """Give notice that a node will go; see `give_notice`."""
        give_notice(self.address, node.node_id, within_s)

    def _forget(self, node: Any, *, allow_graceful: bool) -> None:
        self.there.remove(node)
        self._cluster.remove_node(node, allow_graceful=allow_graceful)

    def pause(self, node: Any) -> Callable[[], None]:
        """Have all processes of a node stand still; return what has them go on."""
        return pause_all(self.pids(node))

    def end(self) -> None:
        """Disconnect this program, and end all nodes."""
        ray.shutdown()
        for node in self.there:
            resume_all(self.pids(node))
        self._cluster.shutdown()


def give_notice(address: str, node_id: str, within_s: float) -> None:
    """Give notice that a node will go, as the owner of a spot instance does: nothing new is started there.

    Ray does not end it at that time. It ends by itself as soon as no actor runs there, and no object that somebody
    needs lies there.

    Raises:
        ResourceError: Ray does not take the notice.
    """
    deadline_ms = int((time.time() + within_s) * 1000)
    reasons: Any = autoscaler_pb2
    reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    taken, why = GcsClient(address=address).drain_node(node_id, reason, "it is reclaimed", deadline_ms)
    if not taken:
        raise ResourceError(f"node {node_id} must take notice that it will go, Ray says: {why}")


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what this program does at SIGTERM: Ray puts a handler in its place that ends it, without a report."""
    own = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray, too, sets none elsewhere
            signal.signal(signal.SIGTERM, own)


def address_kept_in(folder: str) -> dict[str, str]:
    """Return the variables with which Ray writes a cluster's address into the folder, and make room for it there.

    Otherwise it overwrites the address of somebody else's cluster in /tmp/ray, and fails where there is no such folder.
    """
    (Path(folder) / "ray").mkdir(exist_ok=True)
    return {"RAY_TMPDIR": folder}


@contextlib.contextmanager
def own_token() -> Iterator[None]:
    """Have clusters that are started inside of the block take a token that only their processes know.

    Whoever reaches the ports of a cluster without tokens runs code as the user. The user's own token, if there is one,
    is not what a cluster for tests should know.
    """
    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}):
            runtime.reread_token()
            yield
    finally:
        runtime.reread_token()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of this program's environment, and of the processes that it starts, inside of the block."""
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
