"""Ray clusters of several nodes on this machine, each with its own object store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import pytest
import ray
from node_feeds import SAMPLES

import mbaas
from mbaas.dataset import synthetic
from mbaas.tools.chaos.network import Network, why_not
from mbaas.tools.chaos.nodes import FAST_DETECTION, Nodes, address_kept_in, environment

SLOW_DETECTION = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}

Cluster = TypeVar("Cluster", Nodes, Network)


@contextmanager
def cluster(make: Callable[[str], Cluster], detection: Mapping[str, str]) -> Iterator[Cluster]:
    """A cluster without CPUs; this program is connected to it.

    Args:
        make: `Nodes` or `Network`.
        detection: environment of the head that sets how soon it gives up an unresponsive node.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mb", dir="/tmp", ignore_cleanup_errors=True) as folder,
        environment({**detection, **address_kept_in(folder)}),
    ):
        made = make(folder)
        try:
            made.connect()
            yield made
        finally:
            made.end()


@pytest.fixture
def nodes(no_ray: None) -> Iterator[Nodes]:
    """A cluster without CPUs; the test is connected to it."""
    with cluster(Nodes, FAST_DETECTION) as nodes:
        yield nodes


@pytest.fixture
def network(no_ray: None) -> Iterator[Network]:
    """The same with links that can be slow or down; only for root. An unreachable node is given up after about 12 s."""
    if reason := why_not():
        pytest.skip(reason)
    with cluster(Network, SLOW_DETECTION) as network:
        yield network


@pytest.fixture(scope="package")
def shared_nodes() -> Iterator[Nodes]:
    """A cluster of a head and three nodes of one CPU, shared by all files of this folder that run in one process."""
    if ray.is_initialized():
        ray.shutdown()
    with cluster(Nodes, FAST_DETECTION) as nodes:
        for _ in range(3):
            nodes.add(wait=False)
        nodes.wait_for_all()
        yield nodes


@pytest.fixture(scope="module")
def three_nodes(shared_nodes: Nodes) -> Nodes:
    """The cluster of three nodes, connected again after tests with their own clusters."""
    if not ray.is_initialized():
        shared_nodes.connect()
    return shared_nodes


@pytest.fixture(scope="session")
def data() -> mbaas.Dataset:
    """1,003 computed images of 32x32 pixels."""
    return synthetic(SAMPLES, height=32, width=32)
