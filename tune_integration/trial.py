"""`get_loader`, which joins a feed under the trial's name and adds data stalls to the trial's reports."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray import train, tune
from ray.train._internal.session import get_session

import mbaas
from mbaas.base.validation import takes
from mbaas.feed import JoinRequest
from mbaas.ray_cluster.actor_names import this_actor

COSTS_S = 10.0
"""Time limit for a feed's costs; a report without costs is better than a late one."""

SHOWN_DIGITS = 8
"""Digits of a pipeline's fingerprint in results, as in ``mbaas status``."""


@takes(JoinRequest)
def get_loader(asked: JoinRequest) -> mbaas.Loader:
    """Join a feed as the Ray Tune trial that calls this function.

    The trial's id is the consumer's name, so a trial that Tune restarts, resumes or clones takes over its own position,
    and any older open session ends. After a checkpoint is restored, `Loader.load_state_dict` resumes exactly there. A
    trial may use several feeds, with one loader for each.

    From then on, mbaas adds metrics to each ``tune.report`` of the trial. ``mbaas/stall_share`` is the fraction of time
    that the trial waited for data, 0 to 1, over all its feeds. Each feed has its own metrics, as
    ``result.metrics["mbaas"][feed]`` or as columns ``mbaas/<feed>/...`` of the results table:

    - ``stall_share``: time waiting for minibatches / (this + time working between them). Near 0, the model is the
      bottleneck; if it is high, data is. Its parts are the next three.
    - ``fetch_stall_share``: prep waited for bytes; more cache or faster storage would help.
    - ``prep_stall_share``: prep was computing; more workers would help.
    - ``peer_stall_share``: prep was idle because of other trials; a slower one shares the feed.
    - ``wait_s``: seconds that the trial has waited since it joined.
    - ``wait_p95_s``: 95 % of its minibatches came within this time, in classes from 0.001 to 10 s; None if that is
      longer.
    - ``delivered_samples``: samples delivered since it joined.
    - ``prepared_samples``: the part prepared for this trial; all others had been delivered to another trial before.
      Prepared / delivered, summed over all trials, shows how well they share.
    - ``pipeline``: the trial's own pipeline, by the digits that ``mbaas status`` shows with its difference from the
      feed's; or "the feed's".
    - ``time_to_first_batch_s``: seconds from ``get_loader`` to the first minibatch.
    - ``cpu_s``: CPU-seconds, the trial's part of the feed's prep workers, cache nodes and coordinators. Each
      delivered sample of a pipeline has the same cost, whichever trial it went to.
    - ``dataloader_cpu_s``: lower bound for a DataLoader of the trial's own: the time to prepare each delivered
      sample.
    - ``cost`` and ``dataloader_cost``: the same in money, if ``cpu_price_per_h`` of `mbaas.serve` is set.

    ``mbaas/cpu_s`` and ``mbaas/cost`` are sums over all feeds. ``cpu_s`` includes the start of the feed's
    processes, a few seconds of CPU that dominate a short run; ``dataloader_cpu_s`` does not. Costs are missing
    until all feeds have reported them.

    In a Ray Train worker, rank and world size are the worker's, and the consumer's name is the run's. With
    ``RunConfig(name=f"train-{trial_id}")`` it is the trial's id, by which ``FeedCallback`` announces all ranks, so that
    they begin the same epoch.

    In a class trainable (`tune.Trainable`), call it in ``setup`` and, with ``reuse_actors``, again in ``reset_config``.
    Its results have no metrics of mbaas.

    Outside of trials and workers, this is the same as `mbaas.join`.

    A trial begins immediately, in the middle of the other trials' epoch if necessary: the default of ``start`` is
    "now", and "epoch" for ranks, which begin together. `mbaas.join` describes the cost in randomness, docs/scaling.md
    the time saved.

    It takes the same arguments as `mbaas.join`.

    Raises:
        ConfigError, FeedNotFoundError, FeedFailedError: see `mbaas.join`.
    """
    trial = _current_trial()
    if trial is not None:
        return trial.join(_as_trial(asked, trial.trial_id))
    worker = _train_worker()
    if worker is None:
        trainable = this_actor()
        if isinstance(trainable, tune.Trainable):
            asked = _as_trial(asked, trainable.trial_id)
        return mbaas.join(**vars(asked))
    if asked.world_size is None:
        asked = replace(asked, rank=worker.get_world_rank(), world_size=worker.get_world_size())
    return mbaas.join(**vars(replace(asked, consumer=asked.consumer or _trial_of(worker.get_experiment_name()))))


def _as_trial(asked: JoinRequest, trial_id: str) -> JoinRequest:
    start = asked.start or ("now" if asked.ranks[1] == 1 else "epoch")
    return replace(asked, consumer=asked.consumer or trial_id, start=start)


def _train_worker() -> train.TrainContext | None:
    try:
        return train.get_context()
    except RuntimeError:
        return None


def _trial_of(run: str) -> str:
    """Return the trial's id if a Ray Train run is named after it, as in Ray's guides; otherwise the run's name."""
    # only the name is available: in a Ray Train worker, Tune's context has no trial id
    return run.removeprefix("train-").removeprefix("trial_id=")


@dataclass
class _Run:
    """The trial that this process runs; with ``reuse_actors``, several run in succession.

    Attributes:
        session: Ray's object through which the trial reports.
        trial_id: its id in Tune.
        loaders: the loaders that the trial opened, by feed and consumer; closed ones stay, because their totals count
            in the next report.
        feeds: the feeds of these loaders, by name.
        costs: the last known costs of each feed.
    """

    session: Any
    trial_id: str
    loaders: dict[tuple[str, str], mbaas.Loader] = field(default_factory=dict)
    feeds: dict[str, mbaas.Feed] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)

    def join(self, asked: JoinRequest) -> mbaas.Loader:
        """Open a loader of a feed; close an older one of the same consumer."""
        assert asked.consumer is not None
        key = asked.name, asked.consumer
        if (old := self.loaders.pop(key, None)) is not None:
            old.close()
        self.loaders[key] = mbaas.join(**vars(asked))
        self.feeds[asked.name] = mbaas.connect(asked.name)
        return self.loaders[key]

    def close(self) -> None:
        """Close all loaders, because another trial runs now."""
        for loader in self.loaders.values():
            loader.close()
        self.loaders.clear()

    def flush(self) -> None:
        """Send the trial's totals to the feeds, and get their costs.

        Tune may end a trial inside its report, before it can close its loaders.
        """
        for (feed, _), loader in self.loaders.items():
            with contextlib.suppress(mbaas.MbaasError):
                loader.flush()
                self.costs[feed] = self.feeds[feed].costs(timeout_s=COSTS_S)


_run: _Run | None = None
"""The trial whose function last called `get_loader` in this process."""


def _current_trial() -> _Run | None:
    """Return the trial whose function runs in this process, or None; close the loaders of an earlier trial."""
    global _run
    session = get_session()
    if session is None or session.world_rank is not None:  # only Ray Train workers have a rank
        return None
    if _run is not None and (_run.session is not session or _run.trial_id != session.trial_id):
        _run.close()
        _run = None
    if _run is None:
        _run = _Run(session, session.trial_id)
        _report_stalls(session)
    return _run


def _report_stalls(session: Any) -> None:
    """Add the trial's stall shares and costs to each report of this session; once per session.

    This wraps ``report`` of the session object of this trial's process; no module or class is changed. The driver's
    ``Callback.on_trial_result`` could add them too (Ray 2.60 lets callbacks change a result in place). It would have to
    call the feed's actor for every result, inside Tune's loop, and would get the values of the last heartbeat, which
    are empty in a short epoch. Here they are exact at the time of the report, and reach scheduler, checkpoints, loggers
    and the ResultGrid. A key that the trial reports itself takes precedence.

    The table that Tune prints has columns for the first four plain numbers of a result: the trial's own come first, and
    at most three are from here, because nested values get no column.
    """
    if getattr(session, "_mbaas_reports", False):
        return
    inner = session.report

    def report(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        run = _run
        if run is not None and run.trial_id == session.trial_id:
            run.flush()
            metrics = {
                **metrics,
                **_metrics(run.loaders, run.costs),
                **metrics,
            }  # its keys first, with its values
        inner(metrics, checkpoint=checkpoint)

    session.report, session._mbaas_reports = report, True


def _metrics(loaders: Mapping[tuple[str, str], mbaas.Loader], costs: Mapping[str, Any]) -> dict[str, Any]:
    """Return one trial's metrics from its loaders, by (feed, consumer), and its feeds' costs."""
    feeds: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[tuple[int, str]]] = {}
    wait_s = total_s = 0.0
    for (feed, _), loader in loaders.items():
        report = loader.report()
        busy_s, p95_s = report.wait_s + report.step_s, report.waits.within_s(0.95)
        wait_s, total_s = wait_s + report.wait_s, total_s + busy_s
        samples.setdefault(feed, []).append((report.samples, loader.pipeline))
        feeds[feed] = {
            "stall_share": _share(report.wait_s, busy_s),
            "fetch_stall_share": _share(report.fetch_stall_s, busy_s),
            "prep_stall_share": _share(report.prep_stall_s, busy_s),
            "peer_stall_share": _share(report.peer_stall_s, busy_s),
            "wait_s": report.wait_s,
            "wait_p95_s": p95_s if math.isfinite(p95_s) else None,  # JSON has no infinity
            "delivered_samples": report.samples,
            "prepared_samples": report.prepared,
            # tables show an empty text as a row without a value
            "pipeline": loader.pipeline[:SHOWN_DIGITS] or "the feed's",
            "time_to_first_batch_s": report.time_to_first_batch_s,
        }
    for feed, known in costs.items():
        feeds[feed] |= _costs(known, samples[feed])
    sums = {
        f"mbaas/{name}": sum(each[name] for each in feeds.values())
        for name in ("cpu_s", "cost")
        if feeds and all(name in each for each in feeds.values())  # a sum without one of the feeds would be too low
    }
    return {"mbaas/stall_share": _share(wait_s, total_s), **sums, "mbaas": feeds}


def _costs(known: Any, delivered: list[tuple[int, str]]) -> dict[str, float]:
    """Return the costs of samples of some pipelines, by the feed's `mbaas.model.sharing.LoadingCosts`."""
    cpu_s = {"": sum(known.cpu_s_of(samples, pipeline) for samples, pipeline in delivered)}
    if alone_s := known.alone_cpu_s_of(sum(samples for samples, _ in delivered)):  # 0 means unknown
        cpu_s["dataloader_"] = alone_s
    prices = {f"{who}cost": price for who, each in cpu_s.items() if (price := known.price(each)) is not None}
    return {**{f"{who}cpu_s": each for who, each in cpu_s.items()}, **prices}


def _share(part_s: float, total_s: float) -> float:
    return part_s / total_s if total_s > 0 else 0.0
