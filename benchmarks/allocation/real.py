"""Eight small jobs on real feeds, with the defaults of feeds that scale, and with a pool of fixed size for each.

The jobs are those of `benchmarks.allocation.workload`, slower and shorter. Each is a process that waits for minibatches
and pauses for its steps. Prep takes time on the cores of a modelled machine, so these do not have to exist.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import mbaas
from benchmarks.allocation.feeds import Feeds
from benchmarks.allocation.policies import AtEvents, own_pools
from benchmarks.allocation.simulation import OURS, simulate
from benchmarks.allocation.workload import POOL, WORKER_PER_S, TrainingRun, workload
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import MbaasError
from mbaas.model.curves import ThroughputCurve
from mbaas.model.gains import WorkerChange
from mbaas.ray_cluster import connection

BATCH, SAMPLES = 16, 4000

CORES = POOL // 2
"""Cores of the modelled machine, for jobs with half of the needs of the simulated ones."""

SAMPLE_S = 0.010
"""Time of a sample on a core."""

TRY_S = 0.001
"""Pause before another attempt to get a core."""

LIMIT_S = 1800.0
LENT, ALONE = OURS, "a pool for each"


def jobs(scale: float) -> tuple[TrainingRun, ...]:
    """Return eight jobs with arrivals and lengths of ``scale`` times those of the simulated workload.

    Storage is not modelled: it counts as part of a job's step.
    """
    slower = CORES / POOL / SAMPLE_S / WORKER_PER_S
    return tuple(
        replace(
            run,
            arrives_s=scale * run.arrives_s,
            samples=scale * slower * run.samples,
            step_per_s=slower * min(run.step_per_s, run.fetch_per_s),
            prep=ThroughputCurve.linear(1 / SAMPLE_S),
            fetch_per_s=math.inf,
        )
        for run in workload(8, seed=0)
    )


@dataclass(frozen=True)
class JobRun:
    """One finished job: seconds from its arrival to its end, and seconds that it waited for minibatches."""

    name: str
    seconds: float
    waited_s: float


@dataclass(frozen=True)
class RealRun:
    """The workload with one policy.

    Attributes:
        moves_s: seconds from each decision to move a worker to the first part that it prepared for the other feed.
        changes: feed -> changes of its workers, with predicted and measured gain.
        simulated_s: makespan of the same workload by simulation.
    """

    policy: str
    makespan_s: float
    jobs: tuple[JobRun, ...]
    moves_s: tuple[float, ...]
    changes: dict[str, tuple[WorkerChange, ...]]
    simulated_s: float

    @property
    def stall(self) -> float:
        """Waiting, as a share of the jobs' time from arrival to end."""
        return sum(job.waited_s for job in self.jobs) / sum(job.seconds for job in self.jobs)


class _Trial:
    def train(self, feed: str, *, samples: float, step_s: float) -> float:
        """Train on this many samples, and return the seconds of waiting."""
        waited_s, received = 0.0, 0
        with mbaas.join(feed, "trial", format="numpy") as loader:
            while received < samples:
                asked = time.perf_counter()
                for batch in loader:
                    waited_s += time.perf_counter() - asked
                    received += len(batch["label"])
                    if received >= samples:
                        break
                    time.sleep(step_s)
                    asked = time.perf_counter()
        return waited_s


_TrialActor: Any = ray.remote(num_cpus=0)(_Trial)


@contextmanager
def _core() -> Iterator[None]:
    """Hold a core of the modelled machine: an abstract socket address, which ends with its process at the latest."""
    while True:
        for number in range(CORES):
            with socket.socket(socket.AF_UNIX) as held:
                try:
                    held.bind(f"\0mbaas-core-{os.environ['RAY_RAYLET_PID']}-{number}")
                except OSError:  # another worker has it
                    continue
                yield
                return
        time.sleep(TRY_S)


def _on_a_core(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:  # noqa: ARG001
    with _core():
        time.sleep(SAMPLE_S)
    return image


def measure(runs: Sequence[TrainingRun], *, rounds: int, tell: Callable[[str], None]) -> list[RealRun]:
    """Run the workload with both policies in turn, ``rounds`` times."""
    pool = AtEvents(own_pools(len(runs)), CORES)
    simulated_s = {
        LENT: max(simulate(runs, Feeds(CORES, seed=0)).values()),
        ALONE: max(simulate(runs, pool).values()),
    }
    found = []
    # Trials reserve no CPU; the additional one is what feeds leave to them by default.
    with connection.separate_ray(CORES + 1):
        for number in range(rounds):
            for policy in (LENT, ALONE):
                tell(f"real feeds, round {number + 1} of {rounds}: {policy}")
                found.append(_run(policy, runs, simulated_s[policy]))
    return found


def _run(policy: str, runs: Sequence[TrainingRun], simulated_s: float) -> RealRun:
    began, ahead = time.monotonic(), list(runs)
    running: dict[Any, tuple[TrainingRun, mbaas.Feed, Any, float]] = {}
    done: list[JobRun] = []
    moves_s: list[float] = []
    changes: dict[str, tuple[WorkerChange, ...]] = {}
    with ExitStack() as stack:
        while ahead or running:
            now = time.monotonic() - began
            if now > LIMIT_S:
                raise MbaasError(f"the benchmark waited {LIMIT_S:g} s for {[job.name for job, *_ in running.values()]}")
            if ahead and now >= ahead[0].arrives_s:
                job = ahead.pop(0)
                workers = None if policy == LENT else int(own_pools(len(runs))([job], CORES)[job.name])
                feed = stack.enter_context(_serve(job.name, workers))
                trial = _TrialActor.remote()
                stack.callback(ray.kill, trial)
                call = trial.train.remote(feed.name, samples=job.samples, step_s=BATCH / job.step_per_s)
                running[call] = job, feed, trial, now
            for call in ray.wait(list(running), timeout=0.2)[0]:
                job, feed, _, since_s = running.pop(call)
                done.append(JobRun(job.name, time.monotonic() - began - since_s, ray.get(call)))
                status = feed.status()
                moves_s += status.moves_s
                changes[job.name] = status.worker_changes
                feed.stop()
        makespan_s = time.monotonic() - began
    return RealRun(policy, makespan_s, tuple(done), tuple(moves_s), changes, simulated_s)


def _serve(name: str, workers: int | None) -> mbaas.Feed:
    """Serve a feed with a fixed number of workers, or with the defaults of one that scales and lends."""
    return mbaas.serve(
        name,
        synthetic(SAMPLES),
        T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(), T.Map(_on_a_core)]),
        batch_size=BATCH,
        prep_workers=workers,
        staging_bytes=64 * BATCH * (8 * 8 * 3 + 16),
        lending=mbaas.Lending(enabled=workers is None),
        scaling=mbaas.Scaling(max_prep_workers=CORES if workers is None else None),
    )
