"""A consumer's options, its own pipeline, and its search for the feed when that was restarted."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mbaas.base import units
from mbaas.calls.client import call_patiently
from mbaas.client.convert import FORMATS, BatchFunction, Collate
from mbaas.core.staging import calls
from mbaas.errors import ConfigError, FeedFailedError, FeedGoneError, shown
from mbaas.ray_cluster import actor_names
from mbaas.samples.fields import BatchTransform
from mbaas.wire.consumers import ConsumerName, FeedInfo, JoinStart

RESTART_LOOK_S = 0.2
"""Pause between two checks for a feed restart, in seconds."""

_log = logging.getLogger(__name__)

Find = Callable[[FeedGoneError], Any]
"""Finds a feed's coordinator. Returns None before it has been restarted, and raises if it will not be."""


Describe = Callable[[Any, ConsumerName, float], FeedInfo]
"""Returns the description of a feed for a consumer, from its coordinator, within a time in seconds; see `feed_info`."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Options of a consumer, the same for `mbaas.join` and `tune_integration.get_loader`."""

    batch_size: int | None = None
    """Samples in a global minibatch, which the ranks of a trial divide. Default: the feed's."""

    format: Literal["torch", "numpy"] = "torch"
    """Private tensors ("torch"), or read-only arrays without a copy ("numpy")."""

    device: Any = None
    """Torch device that minibatches are copied to."""

    collate: Collate = "list"
    """Batching of fields whose values differ in length, such as boxes. "list": a list of arrays, one per sample; "pad":
    one array, with shorter values padded with zeros, and their lengths as ``NAME_length`` int64[n]; "packed": all
    values concatenated, and ``NAME_bounds`` int64[n + 1], so that sample i has the values from bounds[i] to bounds[i +
    1]. Padded images of different sizes have zeros to the right and below, and ``image_size`` int64[n, 2]. Packed
    images are pixels [total, 3], also with ``image_size``. Masks are batched like their images."""

    pipeline: Any = None
    """This consumer's own `mbaas.transforms.Pipeline`, over the same samples. The order of samples is the feed's, and
    consumers with equal pipelines share their minibatches; reading, caching and what pipelines have in common at their
    beginning is shared by all. See `mbaas.Loader.set_pipeline` to change it between epochs. Default: the feed's."""

    columns: Mapping[str, str] | None = None
    """Key in minibatches -> field, as a model wants them: ``{"pixel_values": "image", "labels": "label"}``. All other
    fields are left out. Default: all fields under their own names."""

    batch_fn: BatchFunction | None = None
    """A function that is called with each minibatch in this process, after ``columns``; the loop gets its result. An
    example is a cast to float16. Or `mbaas.transforms.MixUp`, `mbaas.transforms.CutMix` or `mbaas.transforms.Mosaic`.
    Use `mbaas.transforms.Map` for work that all trials share."""

    start: JoinStart | None = None
    """"epoch" waits for the next epoch that other consumers begin. "now" begins immediately, in the middle of their
    epoch if necessary, and each of its own epochs still contains every sample once. While any consumer is out of phase,
    epochs are shuffled within the segments defined by its starting position (`mbaas.samples.order.Shuffle`). Ranks
    always use "epoch". Default: "epoch", and "now" for `tune_integration.get_loader`."""

    state: dict[str, Any] | None = None
    """A result of `mbaas.Loader.state_dict` to resume from. The same as `mbaas.Loader.load_state_dict`, but without
    preparing minibatches at another position first. None: no state."""

    rank: int | None = None
    """Rank in a data-parallel trial: each rank gets its part of every minibatch (see `mbaas.Loader`), and is listed as
    ``consumer[rank]``. All ranks pass the same ``consumer`` and ``world_size``. An epoch begins when all have joined.
    Default: a single consumer; in a Ray Train worker, `tune_integration.get_loader` uses the worker's rank."""

    world_size: int | None = None
    """Number of ranks of the trial."""

    wait_timeout_s: float = 300.0
    """Time limit for a wait without progress of the feed, and for the restart of a feed whose program died without
    stopping it."""

    def __post_init__(self) -> None:
        # Without pydantic, because each trial runs this.
        rank, world_size = self.ranks
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, world_size - 1], world_size was {world_size} and rank was {rank}")
        if self.start is not None and self.start not in get_args(JoinStart):
            raise ConfigError(f'start must be "epoch" or "now", got {shown(self.start)}')
        if self.format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {shown(self.format)}")
        if self.collate not in get_args(Collate):
            raise ConfigError(f'collate must be "list", "pad" or "packed", got {shown(self.collate)}')
        if self.columns is not None and not (
            isinstance(self.columns, Mapping) and self.columns and all(isinstance(key, str) for key in self.columns)
        ):
            raise ConfigError(
                f"columns must be a dict of keys and fields, such as {{'pixel_values': 'image'}}, got "
                f"{shown(self.columns)}",
                option="columns",
            )
        if not (self.batch_fn is None or callable(self.batch_fn) or isinstance(self.batch_fn, BatchTransform)):
            raise ConfigError(
                f"batch_fn must be a function of a minibatch, MixUp, CutMix or Mosaic, got {shown(self.batch_fn)}",
                option="batch_fn",
            )
        if self.start == "now" and world_size > 1:
            raise ConfigError(
                f'start must be "epoch" for ranks, which begin together, got "now" for {world_size} ranks'
            )
        calls.number("wait_timeout_s", self.wait_timeout_s)

    @property
    def ranks(self) -> tuple[int, int]:
        """Rank and world size: (0, 1) for a single consumer."""
        rank, world_size = self.rank, self.world_size
        if rank is None and world_size is None:
            return 0, 1
        if type(rank) is not int or type(world_size) is not int:
            raise ConfigError(
                f"rank and world_size must both be whole numbers, or both be left out, got rank={rank!r} and "
                f"world_size={world_size!r}"
            )
        return rank, world_size


class PickledPipeline:
    """A pipeline that a consumer brings instead of the feed's, pickled once.

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
        return call_patiently(
            coordinator, lambda: coordinator.add_pipeline.remote(fingerprint, payload), timeout_s, what
        )


def feed_info(coordinator: Any, name: ConsumerName, timeout_s: float) -> FeedInfo:
    """Return the description of a feed before joining it. Wait up to ``timeout_s`` seconds for the feed to open."""
    what = f"consumer {str(name)!r} joins"
    return call_patiently(coordinator, coordinator.info.remote, timeout_s, what)


def await_feed_restart(
    error: FeedGoneError,
    coordinator: Any,
    *,
    find: Find,
    describe: Describe,
    name: ConsumerName,
    info: FeedInfo,
    timeout_s: float,
) -> tuple[Any, FeedInfo]:
    """Wait for the restart of a feed whose coordinator is gone. Return its new coordinator and description.

    Raises:
        FeedGoneError: the feed is not restarted in time.
        FeedFailedError: the feed was stopped, or restarted with options that this consumer cannot continue with.
    """
    feed, end, said = info.settings.name, time.monotonic() + timeout_s, False
    while time.monotonic() < end:
        found = find(error)
        if found is not None and actor_names.id_of(found) != actor_names.id_of(coordinator):
            with contextlib.suppress(FeedGoneError):  # it did not start; another one may
                successor = describe(found, name, end - time.monotonic())
                _check_same(info, successor, name)
                _log.warning("feed %r was restarted, consumer %r continues", feed, str(name))
                return found, successor
        elif not said:
            said = True
            _log.warning(
                "the program that served feed %r is gone; consumer %r waits up to %s for a feed restart",
                feed, str(name), units.seconds(timeout_s),
            )  # fmt: skip
        time.sleep(RESTART_LOOK_S)
    raise FeedGoneError(
        f"consumer {str(name)!r} waited {units.seconds(timeout_s)} for a restart of feed {feed!r}: "
        "the program that served it is gone"
    ) from error


def _check_same(known: FeedInfo, successor: FeedInfo, name: ConsumerName) -> None:
    """Raise FeedFailedError if the restarted feed makes other blocks, or other minibatches from them."""
    pairs = zip(_essence(known).items(), _essence(successor).values(), strict=True)
    for (what, before), now in pairs:
        if before != now:
            raise FeedFailedError(
                f"feed {known.settings.name!r} was restarted with another {what}: {now!r} instead of {before!r}; "
                f"consumer {str(name)!r} cannot continue there and must join again"
            )


def _essence(info: FeedInfo) -> dict[str, object]:
    return {
        "dataset, pipeline, seed and order": info.fingerprint,
        "engine": info.engine,
        "dali_share": info.settings.dali_share,
        "samples in a block": info.order.block_samples,
        "drop_last": info.settings.drop_last,
        "on_bad_sample": info.settings.on_bad_sample,
    }
