"""Rows "mbaas" and "mbaas-decoded": one feed for all trials, prep workers on all cores.

The cache holds the whole dataset, like the page cache in the other rows, so no row reads storage in its window. "mbaas"
keeps samples encoded; "mbaas-decoded" keeps them decoded where that saves more, as a feed does by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

import mbaas
from mbaas.ray_cluster import connection, resources
from mbaas.samples.fields import IMAGE
from mbaas.tools.bench.rows import Minibatch, RowService, TrialSpec

FEED = "bench"


class Service(RowService):
    """A feed on its own Ray cluster, all below this process in the process tree."""

    def __enter__(self) -> Service:
        connection.start_ray(self._spec.cores)
        self.address = ray.get_runtime_context().gcs_address
        self._feed = mbaas.serve(
            FEED,
            self._spec.task.dataset(self._spec.data),
            self._spec.task.pipeline(),
            batch_size=self._spec.batch,
            seed=self._spec.seed,
            prep_workers=None if self._spec.gpu else self._spec.cores,
            engine="dali" if self._spec.gpu else "cpu",
            cache_decoded=self._spec.row == "mbaas-decoded",
        )
        # so that all trials begin the same epoch, as in a search
        mbaas.announce(self._feed.name, [_consumer(trial) for trial in range(self._trials)])
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._feed.stop()
        finally:
            ray.shutdown()

    def spilled_bytes(self) -> int:
        return resources.spilled_bytes()


def _consumer(trial: int) -> str:
    return f"trial-{trial}"


class Loader:
    """A consumer of the feed."""

    def __init__(self, spec: TrialSpec) -> None:
        os.environ["RAY_ADDRESS"] = spec.address
        self._torch, self._on_gpu = spec.array == "torch" or spec.gpu, spec.gpu
        self._loader = mbaas.join(
            FEED,
            consumer=_consumer(spec.trial),
            format="torch" if self._torch else "numpy",
            device="cuda" if spec.gpu else None,
            collate="list",
        )
        self._fields = (spec.task.made.name, *spec.task.beside)
        self.samples = len(spec.samples().files)

    def epoch(self) -> Iterator[Minibatch]:
        for batch in self._loader:
            if self._torch and IMAGE in batch:  # memory is NHWC in both cases; torch shows it as NCHW
                batch[IMAGE] = batch[IMAGE].permute(0, 2, 3, 1)
            values = [array for name in self._fields for array in _arrays(batch[name])]
            if self._on_gpu:
                ids = batch["sample_id"].cpu().numpy()
            else:
                values = [np.asarray(array) for array in values]
                ids = np.asarray(batch["sample_id"])  # also for a tensor, without a copy
            del batch
            yield values, ids
            del values, ids

    def close(self) -> None:
        self._loader.close()
        ray.shutdown()


def _arrays(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
