"""What `mbaas status` shows of a feed, put together from all who know something."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mbaas.cache.stats import CacheStats
from mbaas.staging.books import Books
from mbaas.staging.cohort import Member
from mbaas.staging.core import StagingCore
from mbaas.staging.desk import Desk
from mbaas.staging.protocol import FeedInfo
from mbaas.staging.standing import Filing
from mbaas.staging.status import ConsumerReport, FeedStatus, MemberStatus, NodeStatus, WorkerStatus
from mbaas.staging.workforce import Hired, Workforce


def snapshot(
    books: Books,
    info: FeedInfo,
    engine: str,
    desk: Desk,
    workforce: Workforce,
    *,
    caches: Mapping[str, CacheStats],
    filings: Sequence[Filing],
) -> FeedStatus:
    """How the feed is doing.

    Args:
        books: of the feed.
        info: the same.
        engine: that runs.
        desk: of the first lane.
        workforce: of all lanes.
        caches: node id -> of its cache.
        filings: of the further lanes, in full.
    """
    settings, sweep, core = info.settings, info.sweep, desk.core
    return FeedStatus(
        name=settings.name,
        samples=sweep.num_samples,
        batch_size=settings.batch_size,
        block_samples=sweep.block_samples,
        blocks_per_epoch=sweep.blocks_per_epoch,
        engine=engine,
        lanes=settings.lanes,
        members=tuple(_member(books, desk, m, filings) for m in core.roster.members.values()),
        workers=tuple(_worker(books, core, worker, filings) for worker in workforce.workers.values()),
        skipped=tuple(books.skipped),
        skipped_total=books.skipped_total,
        notes=tuple(books.notes),
        ledgers=tuple(books.ledgers),
        inexact_epochs=books.inexact,
        staged_blocks=len(core.window.blocks) + sum(filing.staged_blocks for filing in filings),
        staged_bytes=core.window.used_bytes + sum(filing.staged_bytes for filing in filings),
        staging_bytes=settings.staging_bytes,
        prepared_blocks=books.parts,
        prepared_samples=int(books.totals["samples"]),
        remade_blocks=books.remade,
        delivered_samples=books.delivered().samples,
        nodes=tuple(_node(node, stats, workforce.per_node()) for node, stats in sorted(caches.items())),
        cached_samples=sum(stats.cached_samples for stats in caches.values()),
        cached_bytes=sum(stats.cached_bytes for stats in caches.values()),
        cache_bytes=settings.cache_bytes * len(caches),
        hits=int(books.totals["hits"]),
        remote=int(books.totals["remote"]),
        disk=int(books.totals["disk"]),
        misses=int(books.totals["misses"]),
        hit_bytes=int(books.totals["hit_bytes"]),
        remote_bytes=int(books.totals["remote_bytes"]),
        disk_bytes=int(books.totals["disk_bytes"]),
        storage_bytes=int(books.totals["storage_bytes"]),
        fetch_s=float(books.totals["fetch_s"]),
        prep_s=float(books.totals["prep_s"]),
        prediction_error=books.prediction_error,
        uptime_s=time.monotonic() - books.began,
        failed=core.failed,
    )


def _member(books: Books, desk: Desk, member: Member, filings: Sequence[Filing]) -> MemberStatus:
    epoch, block = divmod(desk.lane.feed_block(member.cursor), desk.lane.feed_blocks)
    last = [ledger for name, ledger in books.ledgers if name == member.name]
    return MemberStatus(
        name=member.name,
        state=member.state.name.lower(),
        epoch=epoch,
        block=block,
        held_blocks=member.cursor - member.released + sum(f.held.get(member.name, 0) for f in filings),
        cohort=member.cohort,
        waits_for=desk.explain_wait(member.name) if member.waiting else "",
        report=books.reports.get(member.name, ConsumerReport()),
        last_ledger=last[-1] if last else None,
    )


def _worker(books: Books, core: StagingCore, hired: Hired, filings: Sequence[Filing]) -> WorkerStatus:
    busy_s, samples = books.worker_prep_s[hired.name], books.worker_samples[hired.name]
    worker = core.crew.workers.get(hired.name)
    tasks = len(worker.tasks) if worker is not None else 0
    tasks += sum(filing.tasks.get(hired.name, 0) for filing in filings)
    return WorkerStatus(hired.name, hired.pid, tasks, samples, samples / busy_s if busy_s else 0.0)


def _node(node: str, stats: CacheStats, workers: Mapping[str, int]) -> NodeStatus:
    return NodeStatus(
        node=node,
        workers=workers.get(node, 0),
        cached_samples=stats.cached_samples,
        cached_bytes=stats.cached_bytes,
        storage_bytes=stats.total.storage_bytes,
        storage_s=stats.storage_s,
        fetch_threads=stats.threads,
        readahead_bytes=stats.readahead_depth_bytes,
        memory_bytes_per_s=stats.speeds.memory,
        disk_bytes_per_s=stats.speeds.disk,
        peers_bytes_per_s=stats.speeds.peers,
        storage_bytes_per_s=stats.speeds.storage,
    )
