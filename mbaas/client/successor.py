"""Waits for a feed restart after the program that served the feed was killed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from mbaas import units
from mbaas.client.join import feed_info
from mbaas.errors import FeedFailedError, FeedGoneError
from mbaas.messages import ConsumerName, FeedInfo

LOOK_S = 0.2
"""Pause between two checks for a feed restart, in seconds."""

_log = logging.getLogger(__name__)

Find = Callable[[FeedGoneError], Any]
"""Finds a feed's coordinator. Returns None before it has been restarted, and raises if it will not be."""


def await_successor(
    error: FeedGoneError, coordinator: Any, *, find: Find, name: ConsumerName, info: FeedInfo, timeout_s: float
) -> tuple[Any, FeedInfo]:
    """Wait for the restart of a feed whose coordinator is gone. Return its new coordinator and description.

    Raises:
        FeedGoneError: the feed is not restarted in time.
        FeedFailedError: the feed was stopped, or restarted with options that this consumer cannot continue with.
    """
    feed, end, said = info.settings.name, time.monotonic() + timeout_s, False
    while time.monotonic() < end:
        found = find(error)
        if found is not None and found._actor_id != coordinator._actor_id:
            with contextlib.suppress(FeedGoneError):  # it did not start; another one may
                successor = feed_info(found, name, end - time.monotonic())
                _check_same(info, successor, name)
                _log.warning("feed %r is served again, consumer %r goes on", feed, str(name))
                return found, successor
        elif not said:
            said = True
            _log.warning(
                "the program that served feed %r is gone; consumer %r waits up to %s for it to be served again",
                feed, str(name), units.seconds(timeout_s),
            )  # fmt: skip
        time.sleep(LOOK_S)
    raise FeedGoneError(
        f"consumer {str(name)!r} waited {units.seconds(timeout_s)} for feed {feed!r} to be served again: "
        "the program that served it is gone"
    ) from error


def _check_same(known: FeedInfo, successor: FeedInfo, name: ConsumerName) -> None:
    """Raise FeedFailedError if the restarted feed makes other blocks, or other minibatches from them."""
    pairs = zip(_essence(known).items(), _essence(successor).values(), strict=True)
    for (what, before), now in pairs:
        if before != now:
            raise FeedFailedError(
                f"feed {known.settings.name!r} was served again with another {what}: {now!r} instead of {before!r}; "
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
