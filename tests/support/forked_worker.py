"""The program of Ray's worker processes in tests: they are forked from one that has imported Ray and mbaas.

Ray starts a Python process for each actor, and a small feed would spend most of its CPU time on imports. Here, the
first process that a raylet starts for a job becomes a *nursery* (`support.nursery`), which imports Ray and mbaas and
then forks workers. Later ones give it their arguments, environment and output files, and end. They import little,
because each test starts several.

All clusters that tests start in their own process do so, and those of programs that run with
`support.programs.FORKING`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

AGAIN_S = 0.01
"""Pause before another attempt to reach a nursery."""


def main() -> None:
    here = sys.path.pop(0)  # this folder: its modules have common names
    with socket.socket(socket.AF_UNIX) as listener:
        # Abstract, so it ends with its process. One for each job: workers of another job exit before their first task.
        address = f"\0mbaas-workers-{os.environ['RAY_RAYLET_PID']}-{os.environ['RAY_JOB_ID']}"
        while not is_bound(listener, address):
            try:
                hand_over(address)
            except ConnectionRefusedError:  # it does not listen yet, or has just ended
                time.sleep(AGAIN_S)
            else:
                return
        listener.listen()
        sys.path.insert(0, os.path.dirname(here))  # noqa: PTH120 - `pathlib` takes as long to import as all else here
        from support import nursery

        del sys.path[0]
        is_worker = nursery.forks(listener)
    if is_worker:
        nursery.run_worker()


def is_bound(listener: socket.socket, address: str) -> bool:
    """Bind the socket to the address, unless another process has it."""
    try:
        listener.bind(address)
    except OSError:
        return False
    return True


def hand_over(address: str) -> None:
    """Let the nursery fork the worker that this process was started for."""
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "path": sys.path,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])


if __name__ == "__main__":
    main()
