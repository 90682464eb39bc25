"""The forked workers of the shared Ray are processes like Ray's own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import ray

from support import forked_worker
from support.programs import FORKING


@ray.remote(num_cpus=0)
class Worker:
    def drawn(self) -> tuple[int, int, str, float]:
        """Process id, process group, an id drawn by Ray, and a number drawn by NumPy."""
        import numpy as np

        return os.getpid(), os.getpgid(0), ray.ObjectRef.from_random().hex(), float(np.random.random())


def test_workers_share_nothing_but_the_process_that_imported(ray_clean: None) -> None:
    """With equal ids, workers would take each other's objects. The raylet kills the process group of a dead worker."""
    workers: list[Any] = [Worker.remote() for _ in range(4)]  # type: ignore[attr-defined]
    pids, groups, ids, numbers = zip(*ray.get([each.drawn.remote() for each in workers], timeout=60), strict=True)
    assert len({*pids}) == len({*ids}) == len({*numbers}) == 4
    assert groups == pids
    nurseries = {psutil.Process(pid).ppid() for pid in pids}
    assert all(forked_worker.__file__ in " ".join(psutil.Process(pid).cmdline()) for pid in nurseries)
    for worker in workers:
        ray.kill(worker)


def test_a_program_forks_workers_if_its_environment_says_so() -> None:
    command = [sys.executable, "-c", "from ray._private.parameter import RayParams; print(RayParams().worker_path)"]
    done = subprocess.run(command, env=os.environ | FORKING, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == forked_worker.__file__
