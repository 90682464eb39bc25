"""The program of Ray's worker processes in tests: they are forked from one that has imported Ray and mbaas.

Ray starts a Python process for each actor, and a small feed would spend most of its CPU time on imports. Here, the
first process that a raylet starts for a job becomes a *nursery*, which imports Ray and mbaas and then forks workers.
Later ones give it their arguments, environment and output files, and end.

The shared Ray of the tests does so, and the Ray of programs that run with `support.programs.FORKING`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRELOADED = ("mbaas.cache.node", "mbaas.coordinator.coordinator", "mbaas.loader", "mbaas.prep.worker")

MORE = "MBAAS_TESTS_PRELOADED"
"""Environment variable with further modules for workers that all need them, separated by spaces."""

LOOK_S = 1.0
"""Period of a nursery's check of whether its raylet has ended."""

AGAIN_S = 0.01
"""Pause before another attempt to reach a nursery."""


def main() -> None:
    del sys.path[0]  # this folder: its modules have common names
    with socket.socket(socket.AF_UNIX) as listener:
        # Abstract, so it ends with its process. Ray reads both variables when it is imported, and never again.
        address = f"\0mbaas-workers-{os.environ['RAY_RAYLET_PID']}-{os.environ['RAY_JOB_ID']}"
        while not is_bound(listener, address):
            with contextlib.suppress(ConnectionRefusedError):  # it does not listen yet, or has just ended
                hand_over(address)
                return
            time.sleep(AGAIN_S)
        listener.listen()
        is_worker = forks(listener)
    if is_worker:
        run_worker()


def is_bound(listener: socket.socket, address: str) -> bool:
    """Bind the socket to the address, unless another process has it."""
    try:
        listener.bind(address)
    except OSError:
        return False
    return True


def hand_over(address: str) -> None:
    """Let the nursery fork the worker that this process was started for."""
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(address)
        socket.send_fds(nursery, [json.dumps(request).encode()], [0, 1, 2])


def forks(listener: socket.socket) -> bool:
    """Fork the worker of this process, and one for each request.

    Returns True in a worker, and False in the nursery after its raylet has ended.
    """
    import gc
    import importlib
    import signal

    import ray

    raylet = os.getppid()
    # Classes of actors draw an id. If Ray's generator began before the fork, all workers would draw the same ids.
    of_actors: Any = ray.actor
    drawn = of_actors.ActorClassID
    of_actors.ActorClassID = SimpleNamespace(from_random=lambda: drawn(os.urandom(drawn.size())))
    for name in (*PRELOADED, *os.environ.get(MORE, "").split()):
        importlib.import_module(name)
    of_actors.ActorClassID = drawn
    gc.freeze()
    if os.fork() == 0:
        return True
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended workers
    listener.settimeout(LOOK_S)
    while os.getppid() == raylet:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            request, files = received(connection)
        is_worker = os.fork() == 0
        if is_worker:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(request, files)
        for file in files:
            os.close(file)
        if is_worker:
            return True
    return False


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    content, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while more := connection.recv(1 << 16):
        content += more
    return json.loads(content), files


def become(request: dict[str, Any], files: list[int]) -> None:
    """Take the arguments, the environment and the output files of the process that handed over."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[1:] = request["arguments"]


def run_worker() -> None:
    import runpy

    os.setpgid(0, 0)  # when a worker has ended, the raylet kills its process group
    import numpy as np
    from ray._private.workers import default_worker

    np.random.seed()  # as in a process of its own; Python's generator does so after a fork
    sys.argv[0] = default_worker.__file__
    sys.path.insert(0, str(Path(default_worker.__file__).parent))
    runpy.run_path(default_worker.__file__, run_name="__main__")


if __name__ == "__main__":
    main()
