"""Ray nodes in network namespaces of their own, joined by a bridge: links that are slow, or down, on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from support.waiting import wait_until

RAY = Path(sys.executable).parent / "ray"
BRIDGE, SUBNET, HEAD = "mbaas0", "10.213.7", 1
PORT = 26379
STORE_BYTES = 200 << 20

DETECTION = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""A node that cannot be reached is given up after about 12 s."""


def why_not() -> str | None:
    """Why there can be no network namespaces here; None if there can."""
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


class Network:
    """A cluster whose head, without CPUs, is this machine's own namespace; the driver is connected to it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._env = {**os.environ, **DETECTION}
        self._running: list[subprocess.Popen[bytes]] = []
        self._count = HEAD

    def open(self) -> None:
        _ip(f"link add {BRIDGE} type bridge")
        _ip(f"addr add {_address(HEAD)}/24 dev {BRIDGE}")
        _ip(f"link set {BRIDGE} up")
        head = ["--head", f"--port={PORT}", "--num-cpus=0", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        self._start([], [*head, f"--node-ip-address={_address(HEAD)}"])
        self._connect()

    def _connect(self) -> None:
        def connected() -> bool:
            with suppress(ConnectionError, RuntimeError, ValueError):
                ray.init(
                    address=f"{_address(HEAD)}:{PORT}",
                    namespace="mbaas",
                    log_to_driver=False,
                    logging_level="ERROR",
                    _node_ip_address=_address(HEAD),
                )
                return True
            return False

        wait_until(connected, "the head answers", deadline_s=60.0)

    def add(self, cpus: int = 1) -> int:
        """Another node; its number."""
        self._count += 1
        number, space, link = self._count, f"mbaas-{self._count}", f"mbaas-v{self._count}"
        _ip(f"netns add {space}")
        _ip(f"link add {link} type veth peer name eth0 netns {space}")
        _ip(f"link set {link} master {BRIDGE}")
        _ip(f"link set {link} up")
        for command in (f"addr add {_address(number)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _ip(f"-n {space} {command}")
        before = len(_alive())
        where = ["ip", "netns", "exec", space]
        options = [f"--address={_address(HEAD)}:{PORT}", f"--num-cpus={cpus}", f"--node-ip-address={_address(number)}"]
        self._start(where, options)
        wait_until(lambda: len(_alive()) > before, f"node {number} is there", deadline_s=60.0)
        return number

    def _start(self, where: list[str], options: list[str]) -> None:
        command = [
            *where,
            str(RAY),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--object-store-memory={STORE_BYTES}",
        ]
        with Path(self._folder, f"ray-{len(self._running)}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [*command, *options], env=self._env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def node_id(self, number: int) -> str:
        """Ray's id of a node."""
        return next(str(n["NodeID"]) for n in ray.nodes() if n["NodeManagerAddress"] == _address(number))

    @contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """A node that nobody reaches, and that reaches nobody, inside of the block."""
        _ip(f"link set mbaas-v{number} down")
        try:
            yield
        finally:
            _ip(f"link set mbaas-v{number} up")

    def limit(self, number: int, mbit_per_s: int) -> None:
        """What a node sends and receives is no more than this, each way."""
        shape = f"root tbf rate {mbit_per_s}mbit burst 256kb latency 100ms"
        _run(f"tc qdisc replace dev mbaas-v{number} {shape}")
        _run(f"ip netns exec mbaas-{number} tc qdisc replace dev eth0 {shape}")

    def close(self) -> None:
        ray.shutdown()
        for process in reversed(self._running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        for number in range(HEAD + 1, self._count + 1):
            for pid in _output(f"ip netns pids mbaas-{number}").split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip(f"netns del mbaas-{number}")
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)
        _ip(f"link del {BRIDGE}")


def _address(number: int) -> str:
    return f"{SUBNET}.{number}"


def _alive() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _ip(command: str) -> None:
    _run(f"ip {command}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _output(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, text=True, check=False).stdout
