"""Rows "mbaas" and "mbaas-decoded": one feed for all trials, prep workers on all cores.

The cache holds the whole dataset, like the page cache in the other rows, so no row reads storage in its window. "mbaas"
keeps samples encoded; "mbaas-decoded" keeps them decoded where that saves more, as a feed does by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

import mbaas
from mbaas.ray_cluster import connection
from mbaas.samples.fields import IMAGE
from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec

FEED = "bench"


@contextmanager
def service(spec: RowSpec) -> Iterator[str]:
    """Run a feed on its own Ray cluster, all below this process in the process tree."""
    with connection.separate_ray(spec.settings.cores) as address:
        with mbaas.serve(
            FEED,
            spec.task.dataset(spec.data),
            spec.task.pipeline(),
            batch_size=spec.batch,
            seed=spec.settings.seed,
            prep_workers=None if spec.settings.gpu else spec.settings.cores,
            engine="dali" if spec.settings.gpu else "cpu",
            cache_decoded=spec.row == "mbaas-decoded",
        ):
            # so that all trials begin the same epoch, as in a search
            mbaas.announce(FEED, [_consumer(trial) for trial in range(spec.trials)])
            yield address


def _consumer(trial: int) -> str:
    return f"trial-{trial}"


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Join the feed as a consumer."""
    os.environ["RAY_ADDRESS"] = spec.address
    gpu = spec.settings.gpu
    joined = mbaas.join(
        FEED,
        consumer=_consumer(spec.trial),
        format="torch" if gpu else "numpy",
        device="cuda" if gpu else None,
        collate="list",
        pipeline=spec.pipeline() if spec.settings.pipelines > 1 else None,
    )

    def epoch() -> Iterator[Minibatch]:
        for batch in joined:
            ids = batch["sample_id"]
            if gpu:  # images only: memory is NHWC in both cases; torch shows it as NCHW
                batch[IMAGE], ids = batch[IMAGE].permute(0, 2, 3, 1), ids.cpu().numpy()
            values = [array for name in (spec.task.made.name, *spec.task.beside) for array in _arrays(batch[name])]
            del batch
            yield values, ids
            del values, ids

    try:
        yield epoch
    finally:
        joined.close()
        ray.shutdown()


def _arrays(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
