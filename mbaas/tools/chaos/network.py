"""Ray nodes in network namespaces joined by a bridge: slow and broken links on one machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from mbaas.errors import ResourceError
from mbaas.tools.chaos.nodes import Nodes
from mbaas.tools.chaos.participants import alive, kill

BRIDGE, SUBNET, HEAD = "mbaas0", "10.213.7", 1

CLONE_NEWNET = 0x40000000
"""Linux's name for network namespaces in ``setns``; Python has it from 3.12 on."""

LOOK_S = 0.05

_LIMIT = (
    "qdisc root handle 1: htb default 10",
    "class parent 1: classid 1:1 htb rate {rate}mbit",
    "class parent 1:1 classid 1:5 htb rate 1mbit ceil {rate}mbit prio 0",
    "class parent 1:1 classid 1:10 htb rate {most}mbit ceil {rate}mbit prio 1",
    "filter protocol ip parent 1: prio 1 u32 match u16 0 0xfc00 at 2 flowid 1:5",
)
"""Changes with ``tc`` that limit a link, each a kind and its arguments. Packets below 1 KiB go first. If requests and
acknowledgements waited behind the data of their direction, as in a single queue, transfers in both directions would
slow each other down. The fair queues of usual Linux kernels have the same effect; not all kernels have them."""


def why_not() -> str | None:
    """Return the reason why network namespaces are not available, or None if they are."""
    try:
        _ip("link add mbaas-try type veth peer name mbaas-try2")
        _ip("link del mbaas-try")
        _ip("netns add mbaas-try")
        _ip("netns del mbaas-try")
    except FileNotFoundError:
        return "iproute2 is not installed"
    except ResourceError as error:
        return f"network namespaces cannot be created here: {error}"
    return None


class Network(Nodes):
    """Nodes in their own network namespaces, which can be cut off or limited in bandwidth.

    The head runs in this machine's namespace. The last number of a node's address also names its namespace and link.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        clear_leftovers()
        self._newest = HEAD
        _ip(f"link add {BRIDGE} type bridge")
        _ip(f"link set {BRIDGE} alias {os.getpid()}@{psutil.Process().create_time()}")
        _ip(f"addr add {_address(HEAD)}/24 dev {BRIDGE}")
        _ip(f"link set {BRIDGE} up")
        super().__init__(folder, node_ip_address=_address(HEAD), **options)

    def add(self, cpus: int = 1, *, wait: bool = True, **options: Any) -> Any:
        # Numbers are not reused: Ray may still list the earlier, dead node at a reused address.
        self._newest += 1
        number, space, link = self._newest, _space(self._newest), _link(self._newest)
        _ip(f"netns add {space}")
        try:
            _ip(f"link add {link} type veth peer name eth0 netns {space}")
            _ip(f"link set {link} master {BRIDGE}")
            _ip(f"link set {link} up")
            for command in (f"addr add {_address(number)}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _ip(f"-n {space} {command}")
            # A namespace belongs to a thread, and the processes of a node are children of the one that starts it.
            with ThreadPoolExecutor(1, initializer=_enter, initargs=(space,)) as thread:
                return thread.submit(super().add, cpus, wait=wait, node_ip_address=_address(number), **options).result()
        except BaseException:
            _end_space(number)
            raise

    def pids(self, node: Any) -> list[int]:
        return _pids(_number(node))

    def _forget(self, node: Any, *, allow_graceful: bool) -> None:
        try:
            super()._forget(node, allow_graceful=allow_graceful)
        finally:
            _end_space(_number(node))

    def cut(self, node: Any) -> Callable[[], None]:
        """Disconnect a node from the network. Return a function that reconnects it."""
        _ip(f"link set {_link(_number(node))} down")

        def join() -> None:
            if node in self.there:
                _ip(f"link set {_link(_number(node))} up")

        return join

    def limit(self, node: Any, mbit_per_s: int) -> Callable[[], None]:
        """Limit a node's bandwidth, each way. Return a function that lifts the limit."""
        number = _number(node)
        ends = (("tc", _link(number)), (f"ip netns exec {_space(number)} tc", "eth0"))
        for tc, link in ends:
            for change in _LIMIT:
                kind, _, rest = change.partition(" ")
                _run(f"{tc} {kind} replace dev {link} {rest.format(rate=mbit_per_s, most=0.9 * mbit_per_s)}")

        def lift() -> None:
            with contextlib.suppress(ResourceError):  # the node is gone, or another limit has been lifted
                for tc, link in ends:
                    _run(f"{tc} qdisc del dev {link} root")

        return lift

    def end(self) -> None:
        nodes = list(self.there)
        try:
            super().end()
        finally:
            for node in nodes:
                _end_space(_number(node))
            _ip(f"link del {BRIDGE}")


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


def _address(number: int) -> str:
    return f"{SUBNET}.{number}"


def _number(node: Any) -> int:
    return int(node.node_ip_address.rpartition(".")[2])


def _space(number: int) -> str:
    return f"mbaas-{number}"


def _link(number: int) -> str:
    return f"mbaas-v{number}"


def _pids(number: int) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", _space(number)], capture_output=True, text=True, check=False).stdout
    return [pid for pid in map(int, told.split()) if alive(pid)]


def _enter(space: str) -> None:
    """Move this thread into a network namespace."""
    with Path(f"/run/netns/{space}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")


def _ip(command: str) -> None:
    _run(f"ip {command}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{command!r} failed: {done.stderr.strip()}")
