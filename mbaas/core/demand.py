"""Estimates from the last seconds of a feed: demand of trials, speed of prep and fetch, stalls between consumers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from msgspec import Struct

from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.events import PacesMeasured, TrialPace
from mbaas.model.loading import LoadingHistory, LoadingWindow, PrepCurve
from mbaas.model.scaling import Observation
from mbaas.wire.consumers import ConsumerReport

WINDOW_S = 8.0
"""Rates are differences over this time, which covers more than two heartbeats of every trial."""


class Look(Struct, frozen=True):
    """Running sums of a feed at one moment.

    Attributes:
        now: the time in seconds.
        reports: consumer -> its latest report.
        samples: number of samples prepared by all workers.
        prep_s: worker-seconds spent on them.
        fetch_s: worker-seconds of waiting for their bytes.
    """

    now: float
    reports: Mapping[str, ConsumerReport]
    samples: float
    prep_s: float
    fetch_s: float = 0.0


class DemandEstimator:
    """Compares the current sums with the sums `WINDOW_S` ago."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque()
        self._worker_per_s = 0.0
        self._loading = LoadingHistory()
        self._paces: dict[Hashable, float] = {}

    def observe(
        self,
        look: Look,
        consumers: ConsumerTable,
        *,
        workers: int,
        pending: int,
        reserved: int,
        most: int,
        machines: int = 1,
        has_room: bool = True,
        trial_of: Mapping[str, Hashable] = MappingProxyType({}),
        has_all: bool = False,
    ) -> Observation | None:
        """Add the current sums, and return estimates over the window.

        Args:
            look: the current sums.
            consumers: the cohorts, whose members share blocks.
            workers: prep workers that are up.
            pending: prep workers that were requested and are not up yet.
            reserved: prep workers guaranteed to this feed.
            most: largest number of prep workers for this feed.
            machines: machines on which prep workers are up.
            has_room: whether a further prep worker would have room on them.
            trial_of: rank of a data-parallel trial -> its trial; every other consumer counts as one trial.
            has_all: whether all blocks that trials can request are ready; demand is then 0.

        Returns:
            The estimates; None while there is less than half a window of data.
        """
        # Drop entries that are not needed for a full window, so that rates cover at least `WINDOW_S` once there is
        # enough data.
        while len(self._looks) > 1 and look.now - self._looks[1].now >= WINDOW_S:
            self._looks.popleft()
        self._looks.append(look)
        before = self._looks[0]
        elapsed_s = look.now - before.now
        if elapsed_s < WINDOW_S / 2:  # a burst or pause of one second would look like a trend
            return None
        steps = of_trials(
            {name: _since(before.reports.get(name), report) for name, report in look.reports.items()}, trial_of
        )
        measured = {trial: step.samples / step.step_s for trial, step in steps.items() if step.step_s and step.samples}
        # A trial without a finished step in the window is assumed to keep its previous pace.
        self._paces = {trial: per_s for trial, per_s in self._paces.items() if trial in steps} | measured
        total_s = sum(step.wait_s + step.step_s for step in steps.values())
        # Stalls are fractions of the trials' total time, so that feeds with many and with few trials are comparable.
        fetch_s = sum(step.fetch_stall_s for step in steps.values())
        prep_s = sum(step.prep_stall_s for step in steps.values())
        peer_s = sum(step.peer_stall_s for step in steps.values())
        made, busy_s = look.samples - before.samples, look.prep_s - before.prep_s
        if busy_s > 0 and made > 0:  # otherwise keep the last rate: idle workers are not slow workers
            self._worker_per_s = made / busy_s
        machines = max(1, machines)
        window = LoadingWindow(
            elapsed_s=elapsed_s,
            workers=workers,
            machines=machines,
            samples=made,
            prep_s=busy_s,
            fetch_s=look.fetch_s - before.fetch_s,
        )
        self._loading.observe(window, look.now)
        return Observation(
            prep_stall=_share(prep_s, total_s),
            fetch_stall=_share(fetch_s, total_s),
            peer_stall=_share(peer_s, total_s),
            demand_per_s=0.0 if has_all else _demand_per_s(measured, consumers, trial_of),
            worker_per_s=self._worker_per_s,
            fetch_per_s=self._loading.fetch_per_s,
            prep=self._prep(workers, machines),
            has_room=has_room,
            workers=workers,
            pending=pending,
            idle=1.0 - _share(busy_s, workers * elapsed_s) if workers else 0.0,
            reserved=reserved,
            most=most,
        )

    def _prep(self, workers: int, machines: int) -> PrepCurve | None:
        if not self._worker_per_s:
            return None
        return self._loading.curve(workers=workers, machines=machines, worker_per_s=self._worker_per_s)

    def paces(
        self, look: Look, seen: Observation, trial_of: Mapping[str, Hashable], *, scales: bool, block_samples: int
    ) -> PacesMeasured:
        """Return each trial's pace with data always ready, and the speed of prep with all workers that it can have.

        ``look`` and ``seen`` are the last sums and their result from `observe`. With ``scales``, workers are added on
        demand.
        """
        names: dict[Hashable, list[str]] = {}
        for name in sorted(look.reports):
            names.setdefault(trial_of.get(name, name), []).append(name)
        paces = [
            TrialPace(tuple(own), self._paces[trial] / block_samples)
            for trial, own in names.items()
            if trial in self._paces
        ]
        # Requested workers may never start: the cluster may have no more CPUs.
        workers = seen.most if scales and not seen.pending else max(seen.workers, seen.reserved)
        return PacesMeasured(tuple(paces), seen.loading.rate(workers) / block_samples)


def _since(before: ConsumerReport | None, now: ConsumerReport) -> ConsumerReport:
    # A new loader of the same name counts from 0 again.
    if before is None or before.loader != now.loader:
        return now
    return now.since(before)


def of_trials(steps: Mapping[str, ConsumerReport], trial_of: Mapping[str, Hashable]) -> dict[Hashable, ConsumerReport]:
    """Combine the reports of each trial's ranks, which divide minibatches and synchronise after each one."""
    ranks: dict[Hashable, list[ConsumerReport]] = {}
    for name, step in steps.items():
        ranks.setdefault(trial_of.get(name, name), []).append(step)
    return {trial: _together(reports) for trial, reports in ranks.items()}


def _together(ranks: Sequence[ConsumerReport]) -> ConsumerReport:
    # The rank whose data came last delayed the trial. The others waited for it inside their steps, so their wait times
    # are too short and their step times too long.
    last = max(ranks, key=lambda rank: rank.wait_s)
    return replace(last, samples=sum(rank.samples for rank in ranks))


def _demand_per_s(paces: Mapping[Hashable, float], consumers: ConsumerTable, trial_of: Mapping[str, Hashable]) -> float:
    # The samples/s that prep must deliver so that no trial waits.
    total = 0.0
    for cohort in consumers.cohorts.values():
        # A rank in a cohort without the others counts as its whole trial, because whole blocks are prepared for it.
        trials = {trial_of.get(member.name, member.name) for member in cohort.active or cohort.members}
        # Each block of a cohort is prepared once, at the pace of its slowest member. The demands of cohorts add up.
        total += min((paces[trial] for trial in trials if trial in paces), default=0.0)
    return total


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
