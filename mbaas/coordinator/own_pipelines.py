"""Pipelines that consumers brought, next to the feed's own.

A consumer sends its pipeline pickled. It is never unpickled here, only by a prep worker, which prepares some samples
with it and reports what they are like. Its blocks then have a stream of their own in the staging core. Pipelines are
kept in the cluster's key-value store, where workers find them, and a restarted coordinator does.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable
from weakref import WeakValueDictionary

from msgspec.structs import replace

from mbaas.base.units import size
from mbaas.coordinator.supervision import Supervision
from mbaas.core.layout import own_block_samples
from mbaas.core.staging.streams import FEED_STREAM, Stream
from mbaas.errors import ConfigError, StateError
from mbaas.ray_cluster import store
from mbaas.wire.blocks import OwnPipeline, own_pipeline_key
from mbaas.wire.consumers import FeedInfo

MOST_BYTES = 64 << 20
"""Largest pickled pipeline. It is kept in the memory of the cluster's head."""

EXPECTED = 8
"""Minimum number of pipelines to expect, so that all of them have blocks of equal size. Otherwise those with larger
blocks would go through an epoch faster, and fewer reads would be shared.
"""


class OwnPipelines:
    """The pipelines of a feed, by fingerprint and by the number of their stream.

    Args:
        info: the feed's description, for consumers that use its own pipeline.
        supervision: its workers, which try new pipelines.
        trials: returns the number of trials that are here or announced.
    """

    def __init__(self, info: FeedInfo, supervision: Supervision, trials: Callable[[], int]) -> None:
        self._feed, self._settings, self._supervision, self._trials = info, info.settings, supervision, trials
        self._infos = {FEED_STREAM: info}
        self._own: dict[int, OwnPipeline] = {}
        self._numbers = {info.pipeline: FEED_STREAM}
        self._adding = WeakValueDictionary[str, asyncio.Lock]()  # each lives while a call of `add` uses it

    def recall(self) -> list[Stream]:
        """Return the streams of the pipelines that an earlier coordinator kept."""
        feed, streams = self._settings.name, []
        for name, kept in store.items(feed, own_pipeline_key("")):
            fingerprint, pipeline = pickle.loads(kept)
            if fingerprint == self._feed.fingerprint:
                streams.append(self._enter(pipeline))
            else:  # of another feed of this name
                store.delete(feed, name)
        return streams

    def number_of(self, fingerprint: str) -> int:
        """Return the number of a pipeline's stream; "" is the feed's pipeline.

        Raises:
            StateError: the pipeline is not known any more.
        """
        number = self._numbers.get(fingerprint or self._feed.pipeline)
        if number is None:
            raise StateError(f"feed {self._settings.name!r} does not know pipeline {fingerprint} any more; join again")
        return number

    def info(self, number: int) -> FeedInfo:
        """Return the feed's description for consumers of a stream."""
        return self._infos[number]

    def info_of(self, fingerprint: str) -> FeedInfo | None:
        """Return the feed's description for consumers with a pipeline; None if it is not known."""
        number = self._numbers.get(fingerprint)
        return None if number is None else self._infos[number]

    def own(self, number: int) -> OwnPipeline | None:
        """Return the pipeline of a stream; None for the feed's own."""
        return self._own.get(number)

    def by_stream(self) -> dict[int, str]:
        """Return the fingerprint of each stream's pipeline, "" for the feed's own; empty if it is the only one."""
        own = {number: pipeline.fingerprint for number, pipeline in self._own.items()}
        return {FEED_STREAM: "", **own} if own else {}

    async def add(self, fingerprint: str, payload: bytes) -> Stream | None:
        """Add a pipeline; return its stream, or None if it is known.

        Raises:
            ConfigError: it is too large, does not suit the feed's samples, or its minibatches do not fit.
            BadSampleError: no sample can be prepared with it.
        """
        if len(payload) > MOST_BYTES:
            raise ConfigError(
                f"a pickled pipeline may have up to {size(MOST_BYTES)}, this one has {size(len(payload))}: load large "
                "tables in the function that uses them, or keep them in the object store"
            )
        # Trials bring equal pipelines at once.
        async with self._adding.setdefault(fingerprint, asyncio.Lock()):
            if fingerprint in self._numbers:
                return None
            supervision = self._supervision
            report = await supervision.workers.look_at(supervision.caches.dataset_ref, payload)
            if report.fingerprint in self._numbers:  # functions may have another fingerprint after unpickling
                self._numbers[fingerprint] = self._numbers[report.fingerprint]
                return None
            number = next(number for number in itertools.count(1) if number not in self._own)
            expected = max(number, self._trials(), EXPECTED)
            nodes = len(supervision.workers.per_node())
            block_samples = own_block_samples(self._settings, supervision.layout, report.probe, expected, nodes)
            pipeline = OwnPipeline(number, payload, block_samples, replace(report, fingerprint=fingerprint))
            stream = self._enter(pipeline)
            name, kept = own_pipeline_key(fingerprint), pickle.dumps((self._feed.fingerprint, pipeline))
            try:
                await asyncio.to_thread(store.put, self._settings.name, name, kept)
            except BaseException:  # also when it is cancelled
                self.forget(number)
                raise
            return stream

    def forget(self, number: int) -> str:
        """Forget a pipeline whose stream has ended; return the name under which it is kept."""
        pipeline = self._own.pop(number)
        del self._infos[number]
        self._numbers = {fingerprint: each for fingerprint, each in self._numbers.items() if each != number}
        return own_pipeline_key(pipeline.fingerprint)

    def _enter(self, pipeline: OwnPipeline) -> Stream:
        report, feed = pipeline.report, self._feed
        order = replace(feed.order, block_samples=pipeline.block_samples)
        self._own[pipeline.number] = pipeline
        self._numbers[pipeline.fingerprint] = pipeline.number
        self._infos[pipeline.number] = replace(
            feed,
            order=order,
            spec=report.probe.spec,
            fingerprint=feed.fingerprint.replace(feed.pipeline, pipeline.fingerprint),
            normalize=report.normalize,
            has_images=report.has_images,
            pipeline=pipeline.fingerprint,
            difference=report.difference,
        )
        sample_bytes = report.probe.spec.nbytes

        def bytes_of(block: int) -> int:
            return order.size_of(block) * sample_bytes

        return Stream(pipeline.number, order.blocks_per_epoch, order.block_samples, bytes_of)
