"""Prep workers move only between feeds whose code they can import. No Ray is started."""

from __future__ import annotations

from typing import Any

import pytest

from mbaas import transforms as T
from mbaas.coordinator.lending import worker_kind
from mbaas.dataset import concat, synthetic
from mbaas.dataset.base import bounded
from mbaas.settings import FeedSettings

PLAIN = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
MAPPED = T.Pipeline([T.DecodeImage(), T.Map(lambda image, rng: image)])


OWN = synthetic(20)
"""A dataset whose class exists only in the user's program."""
object.__setattr__(OWN, "__class__", type("Own", (type(OWN),), {"__module__": "my_module"}))


def kind(**change: Any) -> str:
    settings = FeedSettings(name="train", batch_size=8, cache_bytes=0, staging_bytes=1 << 20, prep_workers=3)
    given = {"engine": "cpu", "pipeline": PLAIN, "dataset": synthetic(20), "job": "01", "runtime_env": "{}"}
    return worker_kind(settings, **{**given, **change})


def test_feeds_of_several_jobs_share_workers_where_all_code_is_the_packages() -> None:
    assert kind(job="02", dataset=synthetic(30), pipeline=T.Pipeline([T.DecodeImage()])) == kind()


@pytest.mark.parametrize("change", [{"engine": "dali"}, {"runtime_env": '{"working_dir": "gcs://other.zip"}'}])
def test_workers_stay_where_another_engine_or_environment_is(change: dict[str, Any]) -> None:
    assert kind(**change) != kind()


@pytest.mark.parametrize(
    "own",
    [
        {"pipeline": MAPPED},
        {"dataset": OWN},
        {"dataset": OWN.limit(10)},
        {"dataset": concat([synthetic(20), bounded(OWN, 1)])},
    ],
    ids=["Map", "dataset", "part of it", "joined with another"],
)
def test_workers_move_within_one_job_only_where_code_is_the_users(own: dict[str, Any]) -> None:
    """A worker can import only the code of its own job."""
    assert kind(**own) == kind(**own)
    assert kind(job="02", **own) != kind(job="01", **own)


def test_a_dataset_may_refer_to_itself() -> None:
    dataset = synthetic(20)
    object.__setattr__(dataset, "whole", dataset)
    assert kind(dataset=dataset) == kind()
