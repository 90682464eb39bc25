"""The trial's side: `get_loader` joins a feed under the trial's name, and the trial's reports tell its data stalls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import train
from ray.train._internal.session import get_session

import mbaas

COSTS_S = 10.0
"""How long a feed may take to say what it took; a report without that is better than one that comes late."""


def get_loader(name: str, *, consumer: str | None = None, **options: Any) -> mbaas.Loader:
    """Join a feed as the Ray Tune trial in which this is called.

    The trial's id is the consumer's name, so a trial that Tune restarts, resumes or clones takes over its own
    place, and whatever older session of it is still open ends. After a checkpoint was restored,
    `Loader.load_state_dict` goes on exactly there. A trial may use several feeds, one loader of each.

    From then on each ``tune.report`` of the trial carries its data stalls, as shares of its time from 0 to 1:
    ``mbaas/stall_share`` over all its feeds, and for each feed, as ``result.metrics["mbaas"][feed]`` or as columns
    ``mbaas/<feed>/...`` of the results' table, ``stall_share``, ``fetch_stall_share``, ``prep_stall_share`` and
    ``peer_stall_share``.
    ``stall_share`` is the time that it waited for minibatches over that time plus the time that it worked between them:
    near 0, the model is the bottleneck; high, data is. Its three parts say where to look: fetch (prep waited for
    bytes; more cache or faster storage would help), prep (it was computing; more workers would) and peer (it was idle
    because of other trials: a slower one shares the feed).

    Each feed also has sums since the trial joined: ``wait_s``, the seconds that it waited; ``delivered_samples``; and
    ``prepared_samples``, those of them that were prepared for this trial, while all others had been given to another
    one before. Over all trials, prepared over delivered says how well they share. ``time_to_first_batch_s`` are the
    seconds from ``get_loader`` to the first minibatch.

    ``mbaas/cpu_hours`` are the trial's part of the CPU time of all its feeds until then: of the prep workers, the cache
    nodes and the coordinators of a feed, each sample that was delivered costs the same, whichever trial it was
    delivered to. Each feed has ``cpu_hours``, too, and beside them ``dataloader_cpu_hours``, what a DataLoader of its
    own would have taken for the trial at least: that of preparing each sample that was delivered. The former includes
    the start of the feed's processes, a few seconds of CPU that dominate a short run. The latter includes no start, and
    is missing until it is known. Where feeds know the price of a CPU (``cpu_price_per_h`` of `mbaas.serve`),
    ``mbaas/cost`` is the same in money, and each feed has
    ``cost`` and ``dataloader_cost``. Until a feed has said what it took, these are missing.

    In a Ray Train worker, rank and world size are those of the worker, and the consumer's name is the run's: of
    ``RunConfig(name=f"train-{trial_id}")`` it is the trial's id, by which ``FeedCallback`` announces all of its ranks.
    They begin the same epoch.

    Anywhere else (class trainables included) it is `mbaas.join`.

    A trial begins at once, in the middle of the other trials' epoch if need be: ``start`` is "now" unless it is given,
    and "epoch" for ranks, which begin together. `mbaas.join` says what that costs in randomness, docs/scaling.md what
    it saves.

    Args:
        name: the name of the feed.
        consumer: the name under which to join, instead of the trial's id.
        **options: those of `mbaas.join`: ``batch_size``, ``format``, ``device``, ``collate``, ``start``, ``state``,
            ``rank``, ``world_size``, ``wait_timeout_s``.

    Raises:
        ConfigError, FeedNotFoundError, FeedFailedError: see `mbaas.join`.
    """
    trial = _current_trial()
    if trial is not None:
        start = "now" if options.get("world_size") in (None, 1) else "epoch"
        return trial.join(name, consumer or trial.trial_id, {"start": start, **options})
    worker = _train_worker()
    if worker is None:
        return mbaas.join(name, consumer, **options)
    ranks = {"rank": worker.get_world_rank(), "world_size": worker.get_world_size()}
    return mbaas.join(name, consumer or _trial_of(worker.get_experiment_name()), **{**ranks, **options})


def _train_worker() -> train.TrainContext | None:
    """Return the context of the Ray Train worker that this process is; None if it is not one."""
    try:
        return train.get_context()
    except RuntimeError:
        return None


def _trial_of(run: str) -> str:
    """Return the trial's id, if a Ray Train run is named after it as in Ray's guides; else the run's name."""
    # the name is all that tells: in a worker of Ray Train, Tune's own context has no trial id
    return run.removeprefix("train-").removeprefix("trial_id=")


@dataclass
class _Run:
    """The trial that this process runs; with ``reuse_actors`` a process runs one after the other.

    Attributes:
        session: Ray's object through which the trial reports.
        trial_id: the id that Tune gave it.
        loaders: the loaders that the trial opened, by feed and consumer; closed ones stay, because what they did still
            counts in the trial's next report.
        feeds: the feeds of these loaders, by name.
        costs: what each feed said last of what it took so far; nothing until it did.
    """

    session: Any
    trial_id: str
    loaders: dict[tuple[str, str], mbaas.Loader] = field(default_factory=dict)
    feeds: dict[str, mbaas.Feed] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)

    def join(self, name: str, consumer: str, options: dict[str, Any]) -> mbaas.Loader:
        """Open a loader of a feed; close an older one of the same consumer."""
        old = self.loaders.pop((name, consumer), None)
        if old is not None:
            old.close()
        loader = mbaas.join(name, consumer, **options)
        self.loaders[name, consumer], self.feeds[name] = loader, mbaas.connect(name)
        return loader

    def close(self) -> None:
        """Close all loaders, because another trial runs now."""
        for loader in self.loaders.values():
            loader.close()
        self.loaders.clear()

    def flush(self) -> None:
        """Tell the feeds what the trial did, and hear what they took so far: Tune may end it inside its report, before
        it can close its loaders.
        """
        for (feed, _), loader in self.loaders.items():
            with contextlib.suppress(mbaas.MbaasError):
                loader.flush()
                self.costs[feed] = self.feeds[feed].costs(timeout_s=COSTS_S)


_run: _Run | None = None
"""The trial whose function called `get_loader` last in this process."""


def _current_trial() -> _Run | None:
    """Return the trial whose function runs in this process, or None; close the loaders of an earlier trial."""
    global _run
    session = get_session()
    if session is None or session.world_rank is not None:  # only workers of Ray Train have a rank
        return None
    if _run is not None and (_run.session is not session or _run.trial_id != session.trial_id):
        _run.close()
        _run = None
    if _run is None:
        _run = _Run(session, session.trial_id)
        _report_stalls(session)
    return _run


def _report_stalls(session: Any) -> None:
    """Have each report of this session carry the trial's stall shares and costs, once per session.

    This wraps ``report`` of the one session object of this trial's process; no module or class is changed.
    The driver's ``Callback.on_trial_result`` could add them too (Ray 2.60 lets callbacks change a result
    in place), but would have to ask the feed's actor for every result, inside Tune's loop, and get what
    the last heartbeat said, which in a short epoch is nothing. Here they are exact at the moment of the
    report, and reach scheduler, checkpoints, loggers and the ResultGrid alike. A key that the trial
    reports itself wins.

    The table that Tune prints has columns for the first four plain numbers of a result: the trial's own come first, and
    of ours there are three at most, because what is nested gets no column.
    """
    if getattr(session, "_mbaas_reports", False):
        return
    inner = session.report

    def report(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        run = _run
        if run is not None and run.trial_id == session.trial_id:
            run.flush()
            metrics = {**metrics, **_metrics(run.loaders, run.costs), **metrics}  # the first place, and the last value
        inner(metrics, checkpoint=checkpoint)

    session.report, session._mbaas_reports = report, True


def _metrics(loaders: Mapping[tuple[str, str], mbaas.Loader], costs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of one trial by its loaders, which are kept by (feed, consumer), and what feeds took."""
    feeds: dict[str, dict[str, float]] = {}
    samples: dict[str, int] = {}
    wait_s = total_s = 0.0
    for (feed, _), loader in loaders.items():
        report = loader.report()
        busy_s = report.wait_s + report.step_s
        wait_s, total_s = wait_s + report.wait_s, total_s + busy_s
        samples[feed] = samples.get(feed, 0) + report.samples
        feeds[feed] = {
            "stall_share": _share(report.wait_s, busy_s),
            "fetch_stall_share": _share(report.fetch_stall_s, busy_s),
            "prep_stall_share": _share(report.prep_stall_s, busy_s),
            "peer_stall_share": _share(report.peer_stall_s, busy_s),
            "wait_s": report.wait_s,
            "delivered_samples": report.samples,
            "prepared_samples": report.prepared,
            "time_to_first_batch_s": report.time_to_first_batch_s,
        }
    for feed, known in costs.items():
        feeds[feed] |= _costs(known, samples[feed])
    sums = {
        f"mbaas/{name}": sum(each[name] for each in feeds.values())
        for name in ("cpu_hours", "cost")
        if feeds and all(name in each for each in feeds.values())  # a sum that lacks a feed would look cheap
    }
    return {"mbaas/stall_share": _share(wait_s, total_s), **sums, "mbaas": feeds}


def _costs(known: Any, samples: int) -> dict[str, float]:
    """Return what samples of a feed cost, by what it took so far (`mbaas.costs.LoadingCosts`)."""
    hours = {"": known.cpu_hours(samples)}
    if alone := known.alone_cpu_hours(samples):  # 0 while it is not known, and would look cheap
        hours["dataloader_"] = alone
    prices = {f"{who}cost": price for who, each in hours.items() if (price := known.price(each)) is not None}
    return {**{f"{who}cpu_hours": each for who, each in hours.items()}, **prices}


def _share(part_s: float, total_s: float) -> float:
    return part_s / total_s if total_s > 0 else 0.0
