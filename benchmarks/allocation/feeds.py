"""Feeds that share the pool as the service does: defaults, scaling and lending, by measurements of simulated windows.

Every decision is made by the service's own functions: `default_prep` when a feed is served, `LoadingHistory` for its
curve, `Scaler` for the workers that it starts and ends, `Lender` for those that it lends and returns, once a second.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.allocation.workload import TrainingRun
from mbaas.model.lending import DemandReport, Lender, allocate_workers, default_prep
from mbaas.model.loading import LoadingHistory, LoadingWindow
from mbaas.model.scaling import Observation, Scaler
from mbaas.settings import Lending, Scaling

START_S = 5.0
"""Time from the decision to start a worker to its first sample."""

WINDOW_S = 8
"""Seconds of a feed's windows, as in `mbaas.core.demand`."""

SCATTER = 0.03
"""Standard deviation of a second's rate of prep, relative to the curve."""


@dataclass
class SecondSums:
    """Work of a feed in one second: workers, samples prepared, and worker-seconds of prep and of waiting for bytes."""

    workers: float
    samples: float
    prep_s: float
    fetch_s: float
    stall: float


@dataclass
class SimulatedFeed:
    """A feed with one training job.

    Attributes:
        own: workers that it started, lent ones included.
        cpus: CPUs reserved by a worker of its first ones; 0 if no CPU was free when it was served.
        asked: workers that wait for a free CPU.
        starting: times at which other workers are up.
        lent, borrowed: workers by borrower, and by owner.
    """

    job: TrainingRun
    reserved: int
    cpus: float
    scaler: Scaler
    lender: Lender
    own: int = 0
    asked: int = 0
    starting: list[float] = field(default_factory=list)
    lent: Counter[str] = field(default_factory=Counter)
    borrowed: Counter[str] = field(default_factory=Counter)
    history: LoadingHistory = field(default_factory=LoadingHistory)
    seconds: deque[SecondSums] = field(default_factory=lambda: deque(maxlen=WINDOW_S))
    worker_per_s: float = 0.0

    @property
    def here(self) -> int:
        return self.own - self.lent.total() + self.borrowed.total()

    @property
    def pending(self) -> int:
        return self.asked + len(self.starting)

    @property
    def claims(self) -> float:
        """CPUs that its workers reserve."""
        first = min(self.own + len(self.starting), self.reserved)
        return first * self.cpus + self.own + len(self.starting) - first


class Feeds:
    """The policy of running feeds; see `benchmarks.allocation.policies.Policy`."""

    def __init__(self, pool: int, *, seed: int) -> None:
        self.changes = 0
        self._pool = pool
        self._feeds: dict[str, SimulatedFeed] = {}
        self._random = np.random.default_rng(seed)
        self._now = 0.0

    def workers(self, active: Sequence[TrainingRun], now: float) -> Mapping[str, float]:
        self._now = now
        for name in self._feeds.keys() - {job.name for job in active}:
            self._end(name)
        for job in active:
            if job.name not in self._feeds:
                self._serve(job)
        for feed in self._feeds.values():
            feed.own += sum(at <= now for at in feed.starting)
            feed.starting = [at for at in feed.starting if at > now]
            granted = min(feed.asked, max(0, int(self._free_cpus)))
            feed.asked -= granted
            feed.starting += [now + START_S] * granted
        # Workers that reserve no CPU compete for the CPUs of the pool.
        share = min(1.0, self._pool / max(1, sum(feed.here for feed in self._feeds.values())))
        return {name: feed.here * share for name, feed in self._feeds.items()}

    def trained(self, served: Mapping[str, float]) -> None:
        """See `Policy.trained`."""
        for name, samples in served.items():
            self._measure(self._feeds[name], samples)
        seen = {name: found for name, feed in self._feeds.items() if (found := self._observed(feed)) is not None}
        self._lend(seen)
        for name, observation in seen.items():
            self._scale(self._feeds[name], observation)

    # ---- arrival and end ----

    def _serve(self, job: TrainingRun) -> None:
        claimed = sum(feed.claims for feed in self._feeds.values())
        # `default_prep` leaves one CPU to a trial; trials have theirs in addition to the pool.
        found = default_prep(cpus=self._pool + 1, claimed_cpus=claimed)
        self._feeds[job.name] = SimulatedFeed(
            job=job,
            reserved=found.workers,
            cpus=found.cpus_per_worker,
            scaler=Scaler(Scaling(max_prep_workers=self._pool)),
            lender=Lender(job.name, Lending()),
            starting=[self._now + START_S] * found.workers,
        )

    def _end(self, name: str) -> None:
        ended = self._feeds.pop(name)
        for owner, count in (+ended.borrowed).items():
            self._feeds[owner].lent[name] -= count
        for borrower, count in (+ended.lent).items():
            self._feeds[borrower].borrowed[name] -= count

    @property
    def _free_cpus(self) -> float:
        return self._pool - sum(feed.claims for feed in self._feeds.values())

    # ---- measurement ----

    def _measure(self, feed: SimulatedFeed, samples: float) -> None:
        job, here = feed.job, feed.here
        per_s = job.prep.rate(here) * float(self._random.normal(1, SCATTER))
        prep_s = min(float(here), here * samples / per_s) if here else 0.0
        # Workers that could prepare more than storage delivers wait for bytes.
        waits = here - prep_s if job.fetch_per_s < min(per_s, job.step_per_s) else 0.0
        feed.seconds.append(SecondSums(here, samples, prep_s, waits, 1 - samples / job.step_per_s))
        total = SecondSums(*(sum(values) for values in zip(*map(_values, feed.seconds), strict=True)))
        if total.prep_s:
            feed.worker_per_s = total.samples / total.prep_s
        window = LoadingWindow(
            elapsed_s=float(len(feed.seconds)),
            workers=here,
            machines=1,
            samples=total.samples,
            prep_s=total.prep_s,
            fetch_s=total.fetch_s,
        )
        feed.history.observe(window, self._now + 1)

    def _observed(self, feed: SimulatedFeed) -> Observation | None:
        if len(feed.seconds) < WINDOW_S / 2:
            return None
        stall = sum(second.stall for second in feed.seconds) / len(feed.seconds)
        waits_s, busy_s, all_s = (
            sum(getattr(second, name) for second in feed.seconds) for name in ("fetch_s", "prep_s", "workers")
        )
        # As consumers divide their waits.
        on_fetch = stall * waits_s / (waits_s + busy_s) if waits_s else 0.0
        curve = None
        if feed.worker_per_s:
            curve = feed.history.curve(workers=feed.here, machines=1, worker_per_s=feed.worker_per_s)
        return Observation(
            prep_stall=stall - on_fetch,
            fetch_stall=on_fetch,
            demand_per_s=feed.job.step_per_s,
            worker_per_s=feed.worker_per_s,
            fetch_per_s=feed.history.fetch_per_s,
            prep=curve,
            workers=feed.here,
            pending=feed.pending,
            idle=max(0.0, 1 - busy_s / all_s) if all_s else 0.0,
            reserved=min(feed.reserved, max(1, feed.here + feed.pending)),
            most=self._pool,
        )

    # ---- decisions ----

    def _lend(self, seen: Mapping[str, Observation]) -> None:
        reports = [
            DemandReport(
                feed=name,
                kind="cpu",
                workers=self._feeds[name].here,
                borrowed=dict(+self._feeds[name].borrowed),
                reserved=self._feeds[name].reserved,
                demand_per_s=found.demand_per_s,
                loading=found.loading if found.worker_per_s else None,
            )
            for name, found in seen.items()
        ]
        shares = allocate_workers(reports).workers
        lacking = any(shares[report.feed] > report.workers for report in reports)
        for report in reports:
            # Without a surplus, or where no feed lacks a worker, a lender has nothing to propose.
            useful = reports if lacking and report.workers > shares[report.feed] else []
            move = self._feeds[report.feed].lender.observe(useful, self._now)
            if move is not None:
                self._move(report.feed, move.target, is_return=move.is_return)

    def _move(self, giver: str, target: str, *, is_return: bool) -> None:
        self.changes += 1
        if is_return:
            self._feeds[giver].borrowed[target] -= 1
            self._feeds[target].lent[giver] -= 1
        else:
            self._feeds[giver].lent[target] += 1
            self._feeds[target].borrowed[giver] += 1

    def _scale(self, feed: SimulatedFeed, seen: Observation) -> None:
        wanted = max(1, feed.here + feed.pending)
        feed.scaler.moved(wanted)
        decision = feed.scaler.observe(seen, self._now)
        self.changes += decision.change != 0
        if decision.change > 0:
            feed.asked += decision.change
        for _ in range(-min(0, decision.change)):
            self._give_up_one(feed)

    def _give_up_one(self, feed: SimulatedFeed) -> None:
        owner = next(iter(+feed.borrowed), None)
        if feed.asked:
            feed.asked -= 1
        elif owner is not None:
            self._move(feed.job.name, owner, is_return=True)
        elif feed.own - feed.lent.total() > 1:
            feed.own -= 1


def _values(second: SecondSums) -> tuple[float, ...]:
    return second.workers, second.samples, second.prep_s, second.fetch_s, second.stall
