"""Ray clusters of several nodes on this machine, each with an object store of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
from node_feeds import SAMPLES

import mbaas
from mbaas.chaos.nodes import FAST_DETECTION, Nodes
from mbaas.dataset import synthetic


@contextmanager
def cluster() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAST_DETECTION.items():
            patch.setenv(name, value)
        with tempfile.TemporaryDirectory(prefix="mb", dir="/tmp", ignore_cleanup_errors=True) as folder:
            nodes = Nodes(folder)
            try:
                nodes.connect()
                yield nodes
            finally:
                nodes.end()


@pytest.fixture
def nodes(no_ray: None) -> Iterator[Nodes]:
    """A cluster without any CPUs so far, which the test is connected to."""
    with cluster() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Nodes]:
    """A cluster of three nodes of one CPU beside the head, for a module all of whose tests are connected to it."""
    if ray.is_initialized():
        ray.shutdown()
    with cluster() as nodes:
        for _ in range(3):
            nodes.add(wait=False)
        nodes.wait_for_all()
        yield nodes


@pytest.fixture(scope="session")
def data() -> mbaas.Dataset:
    """1,003 computed images of 32x32 pixels."""
    return synthetic(SAMPLES, height=32, width=32)
