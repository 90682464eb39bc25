"""Run the real command in separate processes, or in this process if it needs no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner, Result

from mbaas.cli import app

PATIENCE_S = 90
SHARED = Path("/dev/shm")

ENDS_WITHIN_S = 10.0
"""Seconds within which everything that Ctrl-C, SIGTERM or SIGKILL ends is gone, as the guide promises."""


@dataclass
class Running:
    """A process whose output is read line by line.

    Attributes:
        lines: lines read so far.
    """

    process: subprocess.Popen[str]
    lines: list[str]

    def wait_for(self, text: str) -> str:
        """Return the next line that contains ``text``."""
        assert self.process.stdout is not None
        with self._deadline(PATIENCE_S):
            for line in self.process.stdout:
                self.lines.append(line)
                if text in line:
                    return line
            code = self.process.wait()
        pytest.fail(f"ended with {code} before it wrote {text!r}: {''.join(self.lines)}")

    def end(self, within_s: float = PATIENCE_S) -> int:
        """Close its stdin, wait for its end, and return the exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._deadline(within_s):
            self.process.stdin.close()
            self.lines += self.process.stdout
            return self.process.wait()

    @contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        """Kill the process if the block takes longer."""
        watchdog = threading.Timer(seconds, self.process.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()


@contextmanager
def running(command: list[str], stderr: int | IO[str] | None = subprocess.STDOUT) -> Iterator[Running]:
    """A process that is killed at the end of the block."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1
    ) as process:
        try:
            yield Running(process, [])
        finally:
            process.kill()


def processes_with(text: str) -> list[str]:
    """Command lines of the processes with ``text`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def shared_files() -> set[str]:
    """Names of the files in shared memory, without hidden ones, which belong to browsers."""
    return {path.name for path in SHARED.iterdir() if not path.name.startswith(".")}


def shared_files_left(before: set[str]) -> set[str]:
    """Names of the files in shared memory that are new and that no process maps.

    Files mapped by a process belong to other programs: the caller's own processes have all ended.
    """
    left: dict[str, str] = {}  # device and inode, as in maps -> name; a semaphore is mapped under another name
    for name in shared_files() - before:
        with suppress(FileNotFoundError):
            found = (SHARED / name).stat()
            left[f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "] = name
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with suppress(OSError):  # it has ended, or belongs to another user
            text = maps.read_text()
            left = {inode: name for inode, name in left.items() if inode not in text}
    return {*left.values()}


def mbaas(*arguments: object, columns: int = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mbaas", *map(str, arguments)],
        env={**os.environ, "COLUMNS": str(columns), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def call(*arguments: object, columns: int = 200) -> Result:
    """Run the command in this process, which takes 2 s of CPU time less than another process.

    Use it for output written before the command connects to Ray, or for commands on this process's cluster.
    """
    environment = {
        "COLUMNS": str(columns),
        # Commands set these for processes that they start. The runner restores all variables listed here.
        "RAY_ADDRESS": os.environ.get("RAY_ADDRESS"),
        "RAY_NUM_REDIS_GET_RETRIES": None,
    }
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)
