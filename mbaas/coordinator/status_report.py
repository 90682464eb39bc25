"""Assembles the feed's status and stories for `mbaas status`, and the values of its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from mbaas.cache.stats import CacheStats
from mbaas.coordinator.counters import Counters, StreamCounts
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core.cluster.supervised import WorkerPhase
from mbaas.core.cluster.supervisor import Supervisor
from mbaas.core.staging.consumers import Consumer
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.streams import FEED_STREAM, stream_number
from mbaas.core.story import SHOWN_DIGITS, Stories, names_meant, shown_name, unknown_thing
from mbaas.model.engine_choice import EngineChoice
from mbaas.model.gains import WorkerChange
from mbaas.settings import Lending
from mbaas.status import ConsumerStatus, FeedStatus, LendingStatus, NodeStatus, PipelineStatus, WorkerStatus
from mbaas.wire.consumers import Claims, ConsumerReport, FeedInfo
from mbaas.wire.samples import Amount

SHOWN_LEDGERS = 1000
"""Most ledgers in a status, the newest ones; `Feed.ledger` has all."""


def snapshot(
    counters: Counters,
    info: FeedInfo,
    choice: EngineChoice,
    service: ConsumerService,
    supervision: Supervision,
    *,
    claims: Claims,
    caches: Mapping[str, CacheStats],
    changes: tuple[WorkerChange, ...],
) -> FeedStatus:
    """Return the feed's status, with statistics of ``caches`` by node id, and ``changes`` of its workers."""
    settings, order, core, worker_pool = info.settings, info.order, service.core, supervision.workers
    for node, stats in caches.items():
        counters.caches_cpu_s.enter((node, stats.incarnation), stats.cpu_s)
    return FeedStatus(
        name=settings.name,
        samples=order.num_samples,
        batch_size=settings.batch_size,
        block_samples=order.block_samples,
        blocks_per_epoch=order.blocks_per_epoch,
        engine=choice.engine,
        engine_choice=choice,
        dali_share=settings.dali_share,
        consumers=tuple(_consumer(counters, service, each) for each in core.consumers.by_name.values()),
        claims=claims,
        workers=tuple(_worker(counters, core, worker) for worker in worker_pool.workers.values()),
        worker_changes=changes,
        moves_s=tuple(counters.moves_s),
        lending=_lending(settings.lending, supervision.state) if settings.lending.enabled else None,
        workers_at_work=len(supervision.state.in_phase(WorkerPhase.WORKING)),
        waits_for=supervision.waits_for(),
        skipped=tuple(counters.skipped.values()),
        skipped_total=counters.skipped_total,
        notes=tuple(counters.notes),
        ledgers=tuple((entry.consumer, entry.ledger) for entry in counters.ledgers.newest(SHOWN_LEDGERS)),
        inexact_epochs=counters.ledgers.inexact,
        staged_blocks=len(core.window.blocks),
        staged_bytes=core.window.used_bytes,
        staging_bytes=settings.staging_bytes,
        keeps_all=core.streams[FEED_STREAM].keeps_all,
        prepared_blocks=counters.parts,
        prepared_samples=counters.samples,
        remade_blocks=counters.remade,
        repeats=counters.repeats,
        samples_ahead=_samples_ahead(service),
        delivered_samples=counters.reports.total.samples,
        nodes=tuple(_node(node, stats, worker_pool.per_node()) for node, stats in sorted(caches.items())),
        cached_samples=sum(stats.cached_samples for stats in caches.values()),
        cached_bytes=sum(stats.cached_bytes for stats in caches.values()),
        cache_bytes=sum(supervision.caches.budgets.get(node, 0) for node in caches),
        decoded=sum((stats.decoded for stats in caches.values()), Amount()),
        decoded_on_disk=sum((stats.decoded_on_disk for stats in caches.values()), Amount()),
        fetched=counters.fetched,
        fetch_s=counters.fetch_s,
        prep_s=counters.prep_s,
        costs=counters.costs(settings.cpu_price_per_h, service.pipelines.by_stream()),
        prediction_error=counters.prediction_error,
        internal_errors=counters.internal_errors,
        restarts=counters.restarts,
        uptime_s=time.monotonic() - counters.began,
        start_s=counters.start_s,
        failed=core.failed,
        pipelines=tuple(_pipeline(counters, service, stream) for stream in core.streams),
        rank_steps=counters.rank_steps.by_trial(each.trial for each in core.consumers.by_name.values()),
        decoded_costs=None if supervision.layout.decoded is None else supervision.layout.decoded.costs,
    )


def _samples_ahead(service: ConsumerService) -> int:
    """Return the prepared samples that no consumer has received yet."""
    core, ahead = service.core, 0
    for number, block in core.window.blocks.items():
        if block.is_ready and block.given_as is None:
            stream = core.streams.of(number)
            ahead += service.pipelines.info(stream.number).order.size_of(stream.local(number))
    return ahead


def metric_values(counters: Counters, *, staged_bytes: int, workers: int) -> dict[str, float]:
    """Return the values of `METRICS` by name, without histograms; the prediction error only after a prediction."""
    fetched, delivered = counters.fetched, counters.reports.total
    values = {
        "mbaas_samples_prepared": counters.samples,
        "mbaas_samples_delivered": delivered.samples,
        "mbaas_fetch_stall_seconds": delivered.fetch_stall_s,
        "mbaas_prep_stall_seconds": delivered.prep_stall_s,
        "mbaas_peer_stall_seconds": delivered.peer_stall_s,
        "mbaas_rank_steps": counters.rank_steps.steps,
        "mbaas_uneven_rank_steps": counters.rank_steps.uneven,
        "mbaas_cache_hits": fetched.local.samples,
        "mbaas_cache_misses": fetched.storage.samples,
        "mbaas_decoded_samples": fetched.decoded.samples,
        "mbaas_cache_hit_bytes": fetched.local.nbytes,
        "mbaas_remote_bytes": fetched.remote.nbytes,
        "mbaas_disk_bytes": fetched.disk.nbytes,
        "mbaas_storage_bytes": fetched.storage.nbytes,
        "mbaas_cpu_seconds": counters.costs(None).cpu_s,
        "mbaas_staged_bytes": staged_bytes,
        "mbaas_inexact_epochs": counters.ledgers.inexact,
        "mbaas_internal_errors": counters.internal_errors,
        "mbaas_coordinator_restarts": counters.restarts,
        "mbaas_prep_workers": workers,
        "mbaas_prep_worker_samples_per_second": counters.samples / counters.prep_s if counters.prep_s else 0.0,
    }
    if counters.prediction_error is not None:
        values["mbaas_prediction_error"] = counters.prediction_error
    return values


def story_of(staging: Stories, supervisor: Stories, thing: str) -> list[str]:
    """Return the history of a thing, oldest line first.

    ``thing`` is a block ("block 17"), or the name of a consumer, a worker or a cache node. The supervisor has the
    history of cache nodes, and of workers before the staging core gets them.

    Raises:
        ConfigError: the thing is unknown; the message lists known names.
    """
    names = supervisor.names()
    lines = [line for name in names_meant(thing, names) for line in supervisor.lines(name, _time_of_day)]
    staged = staging.lines(thing, _time_of_day)
    if not lines and not staged:
        raise unknown_thing(thing, dict.fromkeys((*staging.names(), *map(shown_name, names))))
    if lines and staged:
        lines = ["as the supervisor saw it:", *lines, "as the staging core saw it:"]
    return lines + staged


def _time_of_day(now: float) -> str:
    seconds = time.time() - time.monotonic() + now
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"


def _consumer(counters: Counters, service: ConsumerService, consumer: Consumer) -> ConsumerStatus:
    stream = service.core.streams.of(consumer.cursor)
    epoch, block = stream.epoch_of(consumer.cursor), stream.index_of(consumer.cursor)
    own = service.pipelines.own(stream.number)
    if service.core.epochs.is_aside(consumer.cursor):
        epoch = service.core.epochs.shuffle_of(consumer.cursor).epoch
    return ConsumerStatus(
        name=consumer.name,
        state=consumer.state.name.lower(),
        is_unassigned=consumer.is_unassigned,
        trial=consumer.trial,
        epoch=epoch,
        block=block,
        blocks_per_epoch=stream.blocks_per_epoch,
        pipeline="" if own is None else own.fingerprint[:SHOWN_DIGITS],
        difference="" if own is None else own.report.difference,
        held_blocks=sum(map(len, consumer.held())),
        cohort=consumer.cohort,
        apart=consumer.apart,
        waits_for=service.explain_wait(consumer.name) if consumer.waiting else "",
        report=counters.reports.latest.get(consumer.name, ConsumerReport()),
        last_ledger=counters.ledgers.last_of(consumer.name),
    )


def _pipeline(counters: Counters, service: ConsumerService, stream: int) -> PipelineStatus:
    own = service.pipelines.own(stream)
    consumers = service.core.consumers.by_name.values()
    trials = {each.trial for each in consumers if each.session and stream_number(each.cursor) == stream}
    counts = counters.by_stream.get(stream, StreamCounts())
    return PipelineStatus(
        pipeline="" if own is None else own.fingerprint[:SHOWN_DIGITS],
        difference="" if own is None else own.report.difference,
        trials=tuple(sorted(trials)),
        samples=counts.samples,
        prep_s=counts.prep_s,
    )


def _worker(counters: Counters, core: StagingState, handle: WorkerHandle) -> WorkerStatus:
    busy_s, samples = counters.worker_prep_s[handle.name], counters.worker_samples[handle.name]
    worker = core.tasks.workers.get(handle.name)
    tasks = len(worker.tasks) if worker is not None else 0
    return WorkerStatus(handle.name, handle.pid, tasks, samples, samples / busy_s if busy_s else 0.0)


def _lending(options: Lending, state: Supervisor) -> LendingStatus:
    return LendingStatus(
        borrowed=state.borrowed,
        lent={feed: len(keys) for feed, keys in state.lent.items()},
        min_workers=options.min_workers,
        max_borrowed=options.max_borrowed,
        weight=options.weight,
    )


def _node(node: str, stats: CacheStats, workers: Mapping[str, int]) -> NodeStatus:
    return NodeStatus(
        node=node,
        workers=workers.get(node, 0),
        cached_samples=stats.cached_samples,
        cached_bytes=stats.cached_bytes,
        decoded=stats.decoded,
        decoded_on_disk=stats.decoded_on_disk,
        storage_bytes=stats.total.reads.nbytes,
        storage_s=stats.storage.busy_s,
        fetch_threads=stats.threads,
        readahead_bytes=stats.readahead_depth_bytes,
        speeds=stats.speeds,
        disks=stats.disks,
    )
