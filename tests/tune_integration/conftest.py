from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import ray
import searching
import train_runs
from searching import SAMPLES, Gate, OneOfMany
from train_runs import Driver, Register

import mbaas
from mbaas import transforms
from support.feeds import warm

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
for module in (searching, train_runs):
    ray.cloudpickle.register_pickle_by_value(module)  # trials run without this folder on their path


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """203 PNGs of 8 x 8 pixels in two classes."""
    root: Path = tmp_path_factory.mktemp("tune-images")
    for number in range(SAMPLES):
        folder = root / f"class-{number % 2}"
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number:03d}.png"), pixels)
    return mbaas.read_images(root)


def serve(name: str, images: mbaas.Dataset) -> mbaas.Feed:
    """A feed of 203 images in minibatches of 16, with one prep worker.

    Reservations last a minute, longer than a trial's start on a busy machine, so an expired one had no trial.
    """
    pipeline = transforms.Pipeline([transforms.DecodeImage(), transforms.RandomHorizontalFlip()])
    timeouts = mbaas.Timeouts(reservation_s=60.0)
    return mbaas.serve(name, images, pipeline, batch_size=16, prep_workers=1, cache_bytes=1 << 20, timeouts=timeouts)


@pytest.fixture(scope="module")
def shared_feed(ray_session: None, images: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """A feed with a full cache, so no test changes the cache's contents."""
    with serve("shared", images) as feed:
        yield warm(feed)


@pytest.fixture
def feed(shared_feed: mbaas.Feed, ray_clean: None) -> OneOfMany:
    """A feed for searches that do not change it."""
    return OneOfMany(shared_feed)


@pytest.fixture
def own_feed(ray_clean: None, images: mbaas.Dataset, feed_name: str) -> Iterator[mbaas.Feed]:
    """A feed that a search may stop."""
    with serve(feed_name, images) as feed:
        yield feed


@pytest.fixture
def make_gate(ray_clean: None) -> Iterator[Callable[[int], Any]]:
    """A factory of gates that kills them at the end, because Tune keeps references of trial functions."""
    gates = []

    def make(parties: int) -> Any:
        gates.append(Gate.remote(parties))
        return gates[-1]

    yield make
    for gate in gates:
        ray.kill(gate)


@pytest.fixture
def register() -> Iterator[Any]:
    register = Register.remote()
    yield register
    ray.kill(register)


@pytest.fixture
def driver(train_clean: None) -> Iterator[Any]:
    driver = Driver.remote()
    yield driver
    ray.kill(driver)


@pytest.fixture
def train_clean(ray_clean: None) -> Iterator[None]:
    """Kill the actor that Ray Train leaves for the next run."""
    yield
    ray.kill(ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator"))
