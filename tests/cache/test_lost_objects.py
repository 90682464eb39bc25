"""Fetches end in an error if Ray cannot find an object."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from msgspec.structs import replace
from watched_files import DEADLINE_S, Folder

from mbaas.cache.node import CacheNodeActor
from mbaas.cache.reader import CacheReader, FetchReply, KnownSlabs
from mbaas.errors import ConfigError
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import PartRequest

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
MakeFolder = Callable[..., Folder]
BLOCK = 16


@pytest.fixture
def node_of(ray_clean: None) -> Iterator[Callable[[Folder], Any]]:
    """Start a cache node that keeps a whole folder in one block, and end it after the test."""
    nodes = []

    def start(folder: Folder) -> Any:
        order = SampleOrder(len(folder.dataset), seed=5, block_samples=BLOCK)
        nodes.append(
            CacheNodeActor.remote(folder.dataset, order, cache_bytes=folder.dataset.total_bytes, readahead_bytes=0)
        )
        return nodes[-1]

    yield start
    for node in nodes:
        ray.kill(node)


@ray.remote(num_cpus=0)
class Silent:
    """Promises a slab that never arrives."""

    async def slab(self) -> None:
        await asyncio.Event().wait()


@ray.remote(num_cpus=0)
class Losing:
    """A cache node, except that the slab of its first answer never arrives."""

    def __init__(self, node: Any, silent: Any) -> None:
        self.node, self.silent, self.asked = node, silent, 0

    def fetch(self, request: PartRequest, held: KnownSlabs, pipeline: str) -> FetchReply:
        fetched: FetchReply = ray.get(self.node.fetch.remote(request, held, pipeline))
        self.asked += 1
        return replace(fetched, slab_refs=[self.silent.slab.remote()]) if self.asked == 1 else fetched

    def times(self) -> int:
        return self.asked


def test_a_slab_that_ray_does_not_find_is_asked_for_again(
    make_folder: MakeFolder, node_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mbaas.cache.reader.LOCAL_S", 0.5)
    folder, silent = make_folder(BLOCK), Silent.remote()
    losing = Losing.remote(node_of(folder), silent)
    try:
        _, raw = CacheReader(losing).read(PartRequest(0))
        assert sorted(view.tobytes() for view in raw) == sorted(folder.contents())
        assert ray.get(losing.times.remote()) == 2
    finally:
        ray.kill(losing)
        ray.kill(silent)


def test_a_part_that_ray_does_not_find_is_not_waited_for(make_folder: MakeFolder, node_of: Any) -> None:
    node, silent, rows = node_of(make_folder(BLOCK)), Silent.remote(), np.arange(1)
    try:
        with pytest.raises(asyncio.TimeoutError):
            ray.get(node.pick.remote([silent.slab.remote()], rows, rows), timeout=DEADLINE_S)
        # refused before any wait
        with pytest.raises(ConfigError, match=rf"rows must be in \[0, {BLOCK - 1}\], got {BLOCK} to {BLOCK}"):
            ray.get(node.pick.remote([silent.slab.remote()], rows + BLOCK, rows), timeout=DEADLINE_S)
    finally:
        ray.kill(silent)
