"""Heads of Ray clusters, started with `ray start --head` in separate processes as users start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.heads import wait_for_head
from support.ports import free_ports
from support.programs import FORKING
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
"""Folder of the commands ``ray`` and ``mbaas``."""

PATIENCE_S = 90


@dataclass(frozen=True)
class Head:
    """A running head.

    Attributes:
        address: of the cluster, host:port.
        dashboard: its URL; nothing listens there if the head has no dashboard.
        environment: of processes that join the cluster.
    """

    address: str
    dashboard: str
    environment: dict[str, str]

    def run(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the cluster to its end, with stdout and stderr combined."""
        return subprocess.run(
            [str(part) for part in command],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python program on the cluster, with pipes to its stdin and stdout."""
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@contextmanager
def ray_head(
    *, cpus: int = 4, dashboard: bool = False, token: str | None = None, says_mode: bool = True, forks: bool = False
) -> Iterator[Head]:
    """A cluster of one node with its own folder; all its processes are killed after the block.

    Args:
        cpus: CPUs of the node.
        dashboard: start a dashboard, which accepts jobs.
        token: required to join; stored in the folder, which is the home folder of all programs.
        says_mode: keep RAY_AUTH_MODE in the environment.
        forks: fork its workers.
    """
    with tempfile.TemporaryDirectory(prefix="head", dir="/tmp", ignore_cleanup_errors=True) as folder:
        gcs, http, client, agent = free_ports(4)
        env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": folder}
        if token is not None:
            env["RAY_AUTH_MODE"] = "token"
            (Path(folder) / ".ray").mkdir()
            (Path(folder) / ".ray" / "auth_token").write_text(token)
        if not says_mode:
            del env["RAY_AUTH_MODE"]
        command = [BIN / "ray", "start", "--head", "--block", f"--num-cpus={cpus}", f"--temp-dir={folder}"]
        command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--ray-client-server-port={client}"]
        command += [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={http}"]
        command += [f"--dashboard-agent-listen-port={agent}", f"--object-store-memory={256 << 20}"]
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(
                command, env=env | (FORKING if forks else {}), stdout=log, stderr=log, start_new_session=True
            )
        try:
            address = f"127.0.0.1:{gcs}"
            wait_for_head(head, Path(log.name))
            yield Head(address, f"http://127.0.0.1:{http}", env | {"RAY_ADDRESS": address})
        finally:
            _end(head, folder)


def _end(head: subprocess.Popen[bytes], folder: str) -> None:
    """End the head and all remaining processes of its cluster, found by its folder in their command lines."""
    head.terminate()
    with suppress(subprocess.TimeoutExpired):
        head.wait(5)
    if head.poll() is None:
        head.kill()
        head.wait()
    for pid in _processes_with(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _processes_with(folder), f"the processes of the cluster in {folder} are gone")


def _processes_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                command = (entry / "cmdline").read_bytes()
                if text.encode() in command:
                    found.append(int(entry.name))
    return found
