"""Public calls refuse wrong arguments before any cluster is contacted, with the value and its requirement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.coordinator.control import FeedControl
from mbaas.dataset import synthetic
from mbaas.ray_cluster import connection


def feed() -> mbaas.Feed:
    return mbaas.Feed("train", None)  # a call to its coordinator raises AttributeError


def control() -> FeedControl:
    return FeedControl("train", None)


def serve(name: Any, batch_size: int = 3, **options: Any) -> mbaas.Feed:
    return mbaas.serve(name, synthetic(9), T.Pipeline([T.DecodeImage()]), batch_size=batch_size, **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: control().announce("trial-1"), "consumers must be a list of names, as in ['trial-1'], got 'trial-1'"),
        (lambda: control().announce({"a"}), "consumers must be a list of names, as in ['trial-1'], got {'a'}"),
        (lambda: control().announce(["a", 5]), "a consumer's name must be text, got 5"),
        (lambda: control().announce(["a"], others=-1), "others must be in [0, 10000], got -1"),
        (lambda: control().remove(["a"]), "a consumer's name must be text, got ['a']"),
        (lambda: control().release_reservations(1.0), "most must be a whole number, got 1.0"),
        (lambda: control().release_reservations(-1), "most must be in [0, "),
        (lambda: mbaas.announce("train", "trial-1"), "consumers must be a list of names, as in ['trial-1'], got"),
        (lambda: feed().status(timeout_s=True), "timeout_s must be a number, got True"),
        (lambda: mbaas.connect(["train"]), "a feed's name must be text, got ['train']"),
        (lambda: mbaas.join("train", format="jax"), "format must be one of 'torch', 'numpy', got 'jax'"),
        (lambda: mbaas.stop(None), "a feed's name must be text, got None"),
        (lambda: mbaas.join(5, format="numpy"), "a feed's name must be text, got 5"),
        (lambda: mbaas.join("train", ["a"]), "a consumer's name must be text, got ['a']"),
        (lambda: mbaas.join("train", wait_timeout_s="30"), "wait_timeout_s must be a number, got '30'"),
        (lambda: mbaas.join("train", rank=True, world_size=2), "must both be whole numbers, or both be left out, got"),
        (lambda: mbaas.join("train", batchsize=8), "unknown option 'batchsize' of join; did you mean 'batch_size'"),
        (lambda: mbaas.join("train", start=["now"]), 'start must be "epoch" or "now", got [\'now\']'),
        (lambda: serve(["train"]), "name must be text, got ['train']"),
        (
            lambda: serve("train", 10, drop_last=True),
            "batch_size must be at most 9, the samples of the dataset, with drop_last=True, got 10",
        ),
        (lambda: serve(" train"), "a feed's name must be non-empty, without slashes and outer spaces, got ' train'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_it_must_be_and_starts_no_ray(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], sentence: str
) -> None:
    monkeypatch.setattr(connection, "ensure_ray", lambda **_: pytest.fail("Ray was asked for"))
    with pytest.raises(mbaas.ConfigError) as caught:
        call()
    assert sentence in str(caught.value)
