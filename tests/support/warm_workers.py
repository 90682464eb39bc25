"""Ray's worker processes as forks of one that has imported already what they all import.

An actor takes 1.2 s of a CPU before it does anything, nearly all of it for imports, one that trains with torch 3 s, and
the tests start some hundred actors. Here a server imports those modules once, and each worker is a fork of it that goes
on as Ray's own program does. Nothing of Ray is imported before the fork: its native library reads the environment when
it is loaded, and draws the random numbers that name objects, which two processes must not have in common.

Only clusters that a test process starts itself work so. Those that ``mbaas``, ``ray`` or an example start in tests, as
users do, start their workers as ever.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

SOCKET = "MBAAS_TESTS_WARM_WORKERS"
"""The environment variable that tells where the server listens; see `ask_for_worker.py`."""

PROGRAM = "MBAAS_TESTS_WORKER_PROGRAM"
"""The environment variable that tells which file is Ray's own program of a worker."""

ASKS = Path(__file__).with_name("ask_for_worker.py")
"""The program that Ray starts instead of its own, which has the server fork a worker."""

IMPORTED = (
    # what Ray imports of others
    "asyncio",
    "google.protobuf.internal.builder",
    "google.protobuf.json_format",
    "jsonschema",
    "msgpack",
    "multiprocessing.reduction",
    "packaging.version",
    "pandas",
    "pdb",
    "requests",
    "tarfile",
    "yaml",
    # what the actors and trials of mbaas import, as far as it does without Ray
    "cv2",
    "pyarrow.fs",
    "tenacity",
    "torch",
    "mbaas.allocation.lending",
    "mbaas.allocation.scaling",
    "mbaas.cache.disk.store",
    "mbaas.cache.disk.tier",
    "mbaas.cache.planner",
    "mbaas.cache.readahead",
    "mbaas.cache.tuner",
    "mbaas.client.batches",
    "mbaas.client.convert",
    "mbaas.coordinator.counters",
    "mbaas.core.explain",
    "mbaas.core.ledgers",
    "mbaas.core.supervisor",
    "mbaas.dataset.synthetic",
    "mbaas.prep.engines",
    "mbaas.prep.probe",
    "mbaas.status",
)

FORK_SAFE = {"jemalloc_bg_thd"}
"""Threads that the server may have beside its own: that of Arrow's allocator, which is prepared for forks."""


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Have Ray's clusters of this process start their workers so, until the context ends."""
    import ray._private.node
    import ray._private.workers

    node = ray._private.node.Node
    begin = node.__init__
    is_served = False
    with contextlib.ExitStack() as stack:

        def begin_with_this_program(self: Any, ray_params: Any, *args: Any, **options: Any) -> None:
            nonlocal is_served
            if not is_served and not options.get("connect_only"):
                stack.enter_context(_server())
                is_served = True
            # Nobody reads what the log monitor sends, and nothing scales these clusters: two processes less for each.
            ray_params.update_if_absent(worker_path=str(ASKS), include_log_monitor=False)
            ray_params.no_monitor = True
            begin(self, ray_params, *args, **options)

        os.environ[PROGRAM] = str(Path(ray._private.workers.__path__[0]) / "default_worker.py")
        stack.enter_context(mock.patch.object(node, "__init__", begin_with_this_program))
        yield


@contextlib.contextmanager
def _server() -> Iterator[None]:
    """A server of its own for this process, once it listens. It ends with this process, which holds its input."""
    with tempfile.TemporaryDirectory(prefix="warm", dir="/tmp") as folder:
        os.environ[SOCKET] = f"{folder}/socket"
        server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline(), "the server of warm workers did not begin"
            yield
        finally:
            server.communicate(timeout=60)


def _serve() -> None:
    """Fork a worker for each connection, until standard input ends."""
    del sys.path[0]  # the folder of this file, whose names are not those of installed modules
    for name in IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    tasks = Path("/proc/self/task").iterdir()
    threads = {(task / "comm").read_text().strip() for task in tasks if int(task.name) != os.getpid()}
    assert threads <= FORK_SAFE, threads
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets those that ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[SOCKET])
        listener.listen(128)
        print("listening", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            start, streams, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as rest:
                asked = json.loads(start + rest.read())
            if os.fork() == 0:
                listener.close()
                _work(asked, streams)
                return  # its end of the connection closes with it
            connection.close()
            for stream in streams:
                os.close(stream)


def _work(asked: dict[str, Any], streams: list[int]) -> None:
    """Go on as Ray's program with the arguments, environment, folder and streams of the process that asked."""
    os.setpgid(0, 0)  # as Ray does with each worker, for it ends the whole group with one
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    importlib.import_module("numpy").random.seed()  # Python's own generator is seeded anew after a fork by itself
    program = os.environ[PROGRAM]
    sys.path[:] = [str(Path(program).parent), *asked["path"]]  # its folder comes first, as in any program
    sys.argv = [program, *asked["arguments"]]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _serve()
