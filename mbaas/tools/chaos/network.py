"""Ray nodes in network namespaces joined by a bridge: slow and broken links on one machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray

from mbaas.base.units import seconds
from mbaas.errors import ResourceError, WaitTimeoutError
from mbaas.ray_cluster import actor_names
from mbaas.tools.chaos.nodes import STORE_BYTES, UP_S, give_notice
from mbaas.tools.chaos.participants import alive, kill, pause_all, resume_all

T = TypeVar("T")

RAY = Path(sys.executable).parent / "ray"
BRIDGE, SUBNET, HEAD = "mbaas0", "10.213.7", 1
PORT = 26379

END_S = 10.0
"""Longest wait for a node to end after a request."""

LOOK_S = 0.05


def why_not() -> str | None:
    """Return the reason why network namespaces are not available, or None if they are."""
    for command in ("ip link add mbaas-try type veth peer name mbaas-try2", "ip link del mbaas-try"):
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "iproute2 is not installed"
        if done.returncode:
            return f"network interfaces cannot be made here: {done.stderr.strip()}"
    if subprocess.run(["ip", "netns", "add", "mbaas-try"], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    _ip("netns del mbaas-try")
    return None


@dataclass(frozen=True, eq=False)
class NetworkNode:
    """A node in its own network namespace; `number` occurs in its address, namespace and link."""

    number: int
    node_id: str
    raylet: int
    _process: subprocess.Popen[bytes]


class Network:
    """A cluster whose head, without CPUs, runs in this machine's namespace; the driver connects to it.

    It has the methods of `mbaas.tools.chaos.nodes.Nodes`, and can also cut off nodes or limit their bandwidth. The path
    of ``folder``, for Ray's files, must be short, because it contains sockets.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(exist_ok=True)
        self._count = HEAD
        self._spaces: list[int] = []
        self.there: list[NetworkNode] = []
        clear_leftovers()
        _ip(f"link add {BRIDGE} type bridge")
        _ip(f"link set {BRIDGE} alias {os.getpid()}@{psutil.Process().create_time()}")
        _ip(f"addr add {_address(HEAD)}/24 dev {BRIDGE}")
        _ip(f"link set {BRIDGE} up")
        options = ["--head", f"--port={PORT}", "--num-cpus=0", f"--temp-dir={folder}", "--include-dashboard=false"]
        self._head = self._start([], [*options, f"--node-ip-address={_address(HEAD)}"])

    @property
    def address(self) -> str:
        return f"{_address(HEAD)}:{PORT}"

    def connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)

        def connected() -> bool:
            with contextlib.suppress(ConnectionError, RuntimeError, ValueError):
                ray.init(
                    address=self.address,
                    namespace=actor_names.NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=_address(HEAD),
                )
                return True
            return False

        _wait(connected, "the head")

    def add(self, cpus: int = 1) -> NetworkNode:
        """Start another node. Raises WaitTimeoutError, after its removal, if it failed to start in time."""
        # Numbers are not reused: at a reused address, `came` would find the earlier, dead node.
        self._count += 1
        number, space, link = self._count, _space(self._count), _link(self._count)
        self._spaces.append(number)
        _ip(f"netns add {space}")
        _ip(f"link add {link} type veth peer name eth0 netns {space}")
        _ip(f"link set {link} master {BRIDGE}")
        _ip(f"link set {link} up")
        for command in (f"addr add {_address(number)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _ip(f"-n {space} {command}")
        options = [f"--address={self.address}", f"--num-cpus={cpus}", f"--node-ip-address={_address(number)}"]
        process = self._start(["ip", "netns", "exec", space], options)

        def came() -> list[dict[str, Any]]:
            if process.poll() is not None:
                raise WaitTimeoutError(f"Ray ended in {space} while it started, see {self._log(number)}")
            return [each for each in ray.nodes() if each["NodeManagerAddress"] == _address(number)]

        try:
            found = _wait(came, space)
            (raylet,) = [pid for pid in _pids(number) if psutil.Process(pid).name() == "raylet"]
        except (WaitTimeoutError, ValueError, psutil.NoSuchProcess) as error:  # it may also end just after it started
            self._clear(number)
            process.wait(END_S)
            raise WaitTimeoutError(f"a node did not come: {error}") from None
        node = NetworkNode(number, found[0]["NodeID"], raylet, process)
        self.there.append(node)
        return node

    def _start(self, where: list[str], options: list[str]) -> subprocess.Popen[bytes]:
        common = ["start", "--block", "--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
        with self._log(self._count).open("wb") as log:
            return subprocess.Popen(
                [*where, str(RAY), *common, *options], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _log(self, number: int) -> Path:
        return self._folder / f"ray-{number}.log"

    def pids(self, node: NetworkNode) -> list[int]:
        return _pids(node.number)

    def raylet(self, node: NetworkNode) -> int:
        return node.raylet

    def kill(self, node: NetworkNode) -> None:
        """Kill a node abruptly, with all its processes and its link."""
        self.there.remove(node)
        self._clear(node.number)
        node._process.wait(END_S)

    def kill_raylet(self, node: NetworkNode) -> None:
        kill(node.raylet)
        self._await_end(node)

    def drain(self, node: NetworkNode, within_s: float) -> None:
        give_notice(self.address, node.node_id, within_s)

    def remove(self, node: NetworkNode) -> None:
        os.killpg(node._process.pid, signal.SIGTERM)
        self._await_end(node)

    def _await_end(self, node: NetworkNode) -> None:
        self.there.remove(node)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node._process.wait(END_S)
        self._clear(node.number)
        node._process.wait(END_S)

    def pause(self, node: NetworkNode) -> Callable[[], None]:
        return pause_all(self.pids(node))

    def cut(self, node: NetworkNode) -> Callable[[], None]:
        """Disconnect a node from the network. Return a function that reconnects it."""
        _ip(f"link set {_link(node.number)} down")

        def join() -> None:
            if node.number in self._spaces:
                _ip(f"link set {_link(node.number)} up")

        return join

    def limit(self, node: NetworkNode, mbit_per_s: int) -> Callable[[], None]:
        """Limit a node's bandwidth, each way. Return a function that lifts the limit."""
        shape = f"root tbf rate {mbit_per_s}mbit burst 256kb latency 100ms"
        _run(f"tc qdisc replace dev {_link(node.number)} {shape}")
        _run(f"ip netns exec {_space(node.number)} tc qdisc replace dev eth0 {shape}")

        def lift() -> None:
            with contextlib.suppress(ResourceError):  # the node is gone, or another limit has been lifted
                _run(f"tc qdisc del dev {_link(node.number)} root")
                _run(f"ip netns exec {_space(node.number)} tc qdisc del dev eth0 root")

        return lift

    def end(self) -> None:
        ray.shutdown()
        for node in self.there:
            resume_all(self.pids(node))  # a paused process does not act on SIGTERM
            os.killpg(node._process.pid, signal.SIGTERM)
        os.killpg(self._head.pid, signal.SIGTERM)
        for process in (*(node._process for node in self.there), self._head):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        for number in list(self._spaces):
            self._clear(number)
        for process in (*(node._process for node in self.there), self._head):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)
        _ip(f"link del {BRIDGE}")

    def _clear(self, number: int) -> None:
        _end_space(number)
        self._spaces.remove(number)


def clear_leftovers() -> None:
    """Remove bridges and namespaces left by a killed program; they outlive every process.

    Raises:
        ResourceError: that program still runs; only one network at a time is possible.
    """
    alias = Path(f"/sys/class/net/{BRIDGE}/ifalias")
    if not alias.exists():
        return
    pid, _, created = alias.read_text().strip().partition("@")
    # With the creation time, because process ids are reused.
    with contextlib.suppress(ValueError, psutil.NoSuchProcess):
        if psutil.Process(int(pid)).create_time() == float(created):
            raise ResourceError(
                f"process {pid} has nodes in network namespaces; there can be one such cluster at a time"
            )
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for space in re.findall(r"^mbaas-(\d+)\b", told, re.MULTILINE):
        _end_space(int(space))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if f"--node-ip-address={_address(HEAD)}" in process.cmdline():
                kill(process.pid)
    _ip(f"link del {BRIDGE}")


def _end_space(number: int) -> None:
    while pids := _pids(number):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        time.sleep(LOOK_S)
    # The kernel also removes the link with the namespace, but only some time after its last process has ended.
    with contextlib.suppress(ResourceError):  # it was never created, or is gone
        _ip(f"link del {_link(number)}")
    _ip(f"netns del {_space(number)}")


def _wait(look: Callable[[], T], what: str) -> T:
    end = time.monotonic() + UP_S
    while not (found := look()):
        if time.monotonic() > end:
            raise WaitTimeoutError(f"waited {seconds(UP_S)} for {what} to be there")
        time.sleep(LOOK_S)
    return found


def _address(number: int) -> str:
    return f"{SUBNET}.{number}"


def _space(number: int) -> str:
    return f"mbaas-{number}"


def _link(number: int) -> str:
    return f"mbaas-v{number}"


def _pids(number: int) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", _space(number)], capture_output=True, text=True, check=False).stdout
    return [pid for pid in map(int, told.split()) if alive(pid)]


def _ip(command: str) -> None:
    _run(f"ip {command}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{command!r} failed: {done.stderr.strip()}")
