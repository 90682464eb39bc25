"""A small workload on real feeds: three jobs whose prep is CPU-bound, with lending and with a pool for each.

The feeds have four prep workers together. One job needs more than its worker, one needs less than its two, and one
arrives later. Each job is a process that waits for minibatches and pauses for its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import MbaasError
from mbaas.model.gains import WorkerChange
from mbaas.ray_cluster import connection

BATCH, SAMPLES = 16, 4000

SPIN_S = 0.004
"""CPU time of a sample: a worker prepares fewer than 250 a second."""

CPUS = 8
"""CPUs that Ray may reserve, on any machine: prep workers reserve one each, and trials none."""

LIMIT_S = 900.0
LENT, ALONE = "feeds of mbaas", "a pool for each"


@dataclass(frozen=True)
class SmallJob:
    """A job: its arrival, its prep workers, seconds of a step of `BATCH` samples, and samples to train on."""

    name: str
    arrives_s: float
    prep_workers: int
    step_s: float
    samples: int


def jobs(scale: float) -> tuple[SmallJob, ...]:
    """Return the jobs; with ``scale`` 1 they take about two minutes."""
    return (
        SmallJob("light", 0.0, 2, BATCH / 40, int(scale * 4_000)),
        SmallJob("heavy", 2.0, 1, BATCH / 800, int(scale * 24_000)),
        SmallJob("late", 30.0, 1, BATCH / 120, int(scale * 6_000)),
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
    """

    policy: str
    makespan_s: float
    jobs: tuple[JobRun, ...]
    moves_s: tuple[float, ...]
    changes: dict[str, tuple[WorkerChange, ...]]

    @property
    def stall(self) -> float:
        """Waiting, as a share of the jobs' time from arrival to end."""
        return sum(job.waited_s for job in self.jobs) / sum(job.seconds for job in self.jobs)


class _Trial:
    def train(self, feed: str, *, samples: int, step_s: float) -> float:
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


def _spin(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:  # noqa: ARG001
    end = time.thread_time() + SPIN_S
    while time.thread_time() < end:
        pass
    return image


def measure(*, scale: float, rounds: int, tell: Callable[[str], None]) -> list[RealRun]:
    """Run the workload with both policies in turn, ``rounds`` times."""
    found = []
    with connection.separate_ray(CPUS):
        for number in range(rounds):
            for policy in (LENT, ALONE):
                tell(f"real feeds, round {number + 1} of {rounds}: {policy}")
                found.append(_run(policy, jobs(scale)))
    return found


def _run(policy: str, workload: tuple[SmallJob, ...]) -> RealRun:
    began, ahead = time.monotonic(), list(workload)
    running: dict[Any, tuple[SmallJob, mbaas.Feed, Any, float]] = {}
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
                feed = stack.enter_context(_serve(job, lends=policy == LENT))
                trial = _TrialActor.remote()
                stack.callback(ray.kill, trial)
                call = trial.train.remote(feed.name, samples=job.samples, step_s=job.step_s)
                running[call] = job, feed, trial, now
            for call in ray.wait(list(running), timeout=0.2)[0]:
                job, feed, _, since_s = running.pop(call)
                done.append(JobRun(job.name, time.monotonic() - began - since_s, ray.get(call)))
                status = feed.status()
                moves_s += status.moves_s
                changes[job.name] = status.worker_changes
                feed.stop()
        makespan_s = time.monotonic() - began
    return RealRun(policy, makespan_s, tuple(done), tuple(moves_s), changes)


def _serve(job: SmallJob, *, lends: bool) -> mbaas.Feed:
    return mbaas.serve(
        job.name,
        synthetic(SAMPLES),
        T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(), T.Map(_spin)]),
        batch_size=BATCH,
        prep_workers=job.prep_workers,
        staging_bytes=64 * BATCH * (8 * 8 * 3 + 16),
        lending=mbaas.Lending(enabled=lends),
    )
