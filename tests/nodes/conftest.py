"""Ray clusters of several nodes on this machine, each with an object store of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from mbaas.chaos.nodes import FAST_DETECTION, Nodes


@pytest.fixture
def nodes(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A cluster without any CPUs so far, which the test is connected to."""
    for name, value in FAST_DETECTION.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory(prefix="mb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Nodes(folder)
        try:
            cluster.connect()
            yield cluster
        finally:
            cluster.end()
