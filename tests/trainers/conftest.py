"""Fixtures for two feeds that trainers use together: one for training, one for validation."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from trainer_feeds import BATCH, SAMPLES, SIDE

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from support.feeds import warm

SCALE = T.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Reset accelerate's global state after each test: with a loop that was left early, no Trainer can be pickled."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
            kind._reset_state()
        state.GradientState()  # loops that the garbage collector ends later look for its attributes


@pytest.fixture(scope="module")
def training(ray_session: None) -> Iterator[mbaas.Feed]:
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(), SCALE])
    data = synthetic(SAMPLES, height=SIDE, width=SIDE)
    options = {"batch_size": BATCH, "prep_workers": 1, "staging_bytes": 1 << 20}
    timeouts = mbaas.Timeouts(reservation_s=60.0)  # a trial that imports a trainer starts slowly on a busy machine
    with mbaas.serve("training", data, pipeline, **options, timeouts=timeouts) as feed:
        yield warm(feed)


@pytest.fixture(scope="module")
def validating(ray_session: None) -> Iterator[mbaas.Feed]:
    data = synthetic(SAMPLES, height=SIDE, width=SIDE)
    options = {"batch_size": BATCH, "prep_workers": 1, "shuffle": False, "staging_bytes": 1 << 20}
    with mbaas.serve("validating", data, T.Pipeline([T.DecodeImage(), SCALE]), **options) as feed:
        yield warm(feed)
