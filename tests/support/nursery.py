"""A process that has imported Ray and mbaas and forks workers; see `support.forked_worker`."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

PRELOADED = (
    *("mbaas.cache.node", "mbaas.coordinator.actor", "mbaas.coordinator.coordinator", "mbaas.loader"),
    *("mbaas.prep.worker", "mbaas.prep.decode", "mbaas.prep.part", "numpy.random", "cv2", "simplejpeg", "pyarrow.json"),
    *("ray._common.pydantic_compat", "ray._common.usage.usage_lib", "ray._private.arrow_serialization"),
    *("ray._private.workers.default_worker", "pydantic.type_adapter", "pydantic.v1", "numpy.ma"),
)
"""Modules that each worker would otherwise import, as `sys.modules` of workers of small feeds shows."""

MORE = "MBAAS_TESTS_PRELOADED"
"""Environment variable with further modules for workers that all need them, separated by spaces."""

LOOK_S = 1.0
"""Period of a nursery's check of whether its raylet has ended."""


def forks(listener: socket.socket) -> bool:
    """Fork the worker of this process, and one for each request.

    Returns True in a worker, and False in the nursery after its raylet has ended.
    """
    path = [*sys.path]
    import ray

    raylet = os.getppid()
    # Classes of actors draw an id. If Ray's generator began before the fork, all workers would draw the same ids.
    of_actors: Any = ray.actor
    drawn = of_actors.ActorClassID
    of_actors.ActorClassID = SimpleNamespace(from_random=lambda: drawn(os.urandom(drawn.size())))
    for name in (*PRELOADED, *os.environ.get(MORE, "").split()):
        importlib.import_module(name)
    of_actors.ActorClassID = drawn
    added = [folder for folder in sys.path if folder not in path]  # by Ray, for packages that it contains
    program()
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
            become(request, files, added)
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


def become(request: dict[str, Any], files: list[int], added: list[str]) -> None:
    """Take the arguments, environment, search path and output files of the process that handed over."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[1:] = request["arguments"]
    sys.path[:] = [*added, *request["path"]]


@functools.cache
def program() -> tuple[CodeType, str]:
    """Ray's program of a worker, compiled once for all, and its path."""
    from ray._private.workers import default_worker

    path = default_worker.__file__
    return compile(Path(path).read_bytes(), path, "exec"), path


def run_worker() -> None:
    os.setpgid(0, 0)  # when a worker has ended, the raylet kills its process group
    import numpy as np

    np.random.seed()  # as in a process of its own; Python's generator does so after a fork
    code, path = program()
    sys.argv[0] = path
    sys.path.insert(0, str(Path(path).parent))
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__ = path
    exec(code, main.__dict__)
