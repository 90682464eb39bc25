"""A pipeline that a consumer brings, instead of the feed's."""

from __future__ import annotations

from typing import Any

from mbaas.calls.client import call_patiently
from mbaas.errors import ConfigError, shown
from mbaas.wire.consumers import ConsumerName, FeedInfo


class PickledPipeline:
    """A pipeline, pickled once.

    Raises:
        ConfigError: it is not an `mbaas.transforms.Pipeline`, or cannot be pickled.
    """

    def __init__(self, pipeline: Any) -> None:
        from mbaas.transforms import Pipeline  # here: consumers of the feed's pipeline need no transforms

        if not isinstance(pipeline, Pipeline):
            raise ConfigError(
                f"pipeline must be an mbaas.transforms.Pipeline, got {shown(pipeline)}", option="pipeline"
            )
        self.pipeline, self.fingerprint, self._payload = pipeline, pipeline.fingerprint, pipeline.pickled()

    def register(self, coordinator: Any, name: ConsumerName, timeout_s: float) -> FeedInfo:
        """Make the pipeline known to a feed, and return the feed's description for its consumers.

        Raises:
            ConfigError: it does not suit the feed's samples, engine or memory.
            BadSampleError: no sample can be prepared with it.
        """
        what = f"consumer {str(name)!r} brings its pipeline"
        fingerprint, payload = self.fingerprint, self._payload
        known: FeedInfo | None = call_patiently(
            coordinator, lambda: coordinator.pipeline_info.remote(fingerprint), timeout_s, what
        )
        if known is not None:
            return known
        info: FeedInfo = call_patiently(
            coordinator, lambda: coordinator.add_pipeline.remote(fingerprint, payload), timeout_s, what
        )
        return info
