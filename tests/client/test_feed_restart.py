"""A consumer waiting for a feed restart finds the new coordinator, or an error if the feed ended or changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from mbaas.client import join
from mbaas.client.join import await_feed_restart
from mbaas.errors import FeedFailedError, FeedGoneError
from mbaas.samples.fields import Field
from mbaas.samples.order import SampleOrder
from mbaas.settings import FeedSettings
from mbaas.wire.consumers import ConsumerName, FeedInfo
from mbaas.wire.samples import SampleSpec

SETTINGS = FeedSettings(name="feed", batch_size=4, cache_bytes=0, staging_bytes=10_000, prep_workers=1)
INFO = FeedInfo(
    SETTINGS,
    SampleOrder(20, 0, 4),
    SampleSpec(Field("image", (1,), "uint8"), ()),
    "data-pipeline-0",
    None,
    True,
    (),
    "cpu",
)
OLD, NEW = SimpleNamespace(_actor_id=b"1"), SimpleNamespace(_actor_id=b"2")
GONE = FeedGoneError("gone")


def wait(find: Any, timeout_s: float = 30.0, describe: Any = lambda *_: INFO) -> tuple[Any, FeedInfo]:
    return await_feed_restart(
        GONE, OLD, find=find, describe=describe, name=ConsumerName("me"), info=INFO, timeout_s=timeout_s
    )


def test_the_old_coordinator_and_one_that_did_not_come_up_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "RESTART_LOOK_S", 0.001)
    answers = iter([GONE, INFO])

    def feed_info(*_: Any) -> FeedInfo:
        if isinstance(answer := next(answers), FeedGoneError):
            raise answer
        return answer

    found = iter([None, OLD, NEW, None, NEW])
    assert wait(lambda _: next(found), describe=feed_info) == (NEW, INFO)
    assert next(found, "all were asked for") == "all were asked for"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            structs.replace(INFO, fingerprint="data-pipeline-1"),
            "another dataset, pipeline, seed and order: 'data-pipeline-1' instead of",
        ),
        (structs.replace(INFO, engine="dali"), "another engine: 'dali' instead of 'cpu'"),
        (structs.replace(INFO, settings=replace(SETTINGS, dali_share=0.5)), "another dali_share: 0.5 instead of 1.0"),
        (structs.replace(INFO, order=SampleOrder(20, 0, 8)), "another samples in a block: 8 instead of 4"),
        (structs.replace(INFO, settings=replace(SETTINGS, drop_last=True)), "another drop_last: True instead of False"),
        (
            structs.replace(INFO, settings=replace(SETTINGS, on_bad_sample="skip")),
            "another on_bad_sample: 'skip' instead of",
        ),
    ],
)
def test_another_feed_of_that_name_is_refused(other: FeedInfo, sentence: str) -> None:
    with pytest.raises(FeedFailedError, match=f"feed 'feed' was restarted with {sentence}"):
        wait(lambda _: NEW, describe=lambda *_: other)


def test_nobody_is_waited_for_longer_than_was_said_nor_for_a_feed_that_was_stopped() -> None:
    with pytest.raises(FeedGoneError, match=r"consumer 'me' waited 300 ms for a restart of feed 'feed'"):
        wait(lambda _: None, timeout_s=0.3)

    def stopped(_: Any) -> None:
        raise FeedFailedError("feed 'feed' was stopped")

    with pytest.raises(FeedFailedError, match="was stopped"):
        wait(stopped)
