"""Row "ray-data": Ray Data prepares each epoch once into Ray's object store, and all trials read it.

Ray Data has no sharing between trials, but a materialized dataset may be passed to any process in the cluster. So an
actor prepares each epoch, one ahead of the trials, by tasks on all cores with the engine of mbaas. Two whole epochs
must fit into the object store.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import ray

from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.ray_cluster import actor_names, connection
from mbaas.samples.fields import IMAGE
from mbaas.samples.order import SampleOrder
from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec, known_of, refuse_bad
from mbaas.tools.bench.tasks.base import Samples

EPOCHS = "bench-epochs"
ID, EPOCH = "sample_id", "epoch"


@contextmanager
def service(spec: RowSpec) -> Iterator[str]:
    """Run a Ray cluster with an actor that prepares epochs."""
    with connection.separate_ray(spec.settings.cores) as address:
        remote: Any = ray.remote
        actor = remote(num_cpus=0, max_concurrency=spec.trials)(Epochs)
        # the reference keeps the actor alive
        epochs = actor.options(name=EPOCHS, namespace=actor_names.NAMESPACE).remote(spec)  # noqa: F841
        yield address


class Epochs:
    """An actor that prepares each epoch once."""

    def __init__(self, spec: RowSpec) -> None:
        self._spec = spec
        self._order = SampleOrder(len(spec.samples().files), spec.settings.seed, spec.batch)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._asked = [0] * spec.trials
        """The epoch last requested by each trial."""
        self._made: dict[int, Future[Any]] = {}
        """Epochs in preparation, or still readable by trials."""

    def get(self, trial: int, number: int) -> Any:
        """Return an epoch, from 0; each trial requests them in order."""
        with self._lock:
            self._asked[trial] = number
            for epoch in (number, number + 1):
                if epoch not in self._made:
                    self._made[epoch] = self._pool.submit(self._make, epoch)
            for old in [epoch for epoch in self._made if epoch < min(self._asked)]:
                del self._made[old]
            made = self._made[number]
        return made.result()

    def close(self) -> None:
        """Not needed in an actor."""
        self._pool.shutdown()

    def _make(self, number: int) -> Any:
        """Prepare all samples of an epoch in order: a dataset in memory whose blocks are minibatches."""
        import pyarrow as pa
        from ray.data import DataContext, from_arrow

        DataContext.get_current().enable_progress_bars = False
        blocks = self._order.blocks_per_epoch
        some = [self._order.sample_ids(block) for block in range(number * blocks, (number + 1) * blocks)]
        todo: Any = from_arrow([pa.table({ID: ids, EPOCH: np.full(len(ids), number)}) for ids in some])
        return todo.map_batches(_prepare, batch_size=None, fn_kwargs={"spec": self._spec}).materialize()


@cache
def _tools(spec: RowSpec) -> tuple[Samples, Engine]:
    return spec.samples(), make_engine("cpu", spec.task.pipeline(), seed=spec.settings.seed)


def _prepare(todo: dict[str, Any], spec: RowSpec) -> dict[str, Any]:
    samples, engine = _tools(spec)
    ids = np.asarray(todo[ID])
    raw = [np.fromfile(samples.files[sample], np.uint8) for sample in ids]
    out = spec.task.made.empty(len(ids))
    prepared = engine.prepare(Batch(raw, ids, int(todo[EPOCH][0]), known_of(samples, ids)), out)
    refuse_bad(prepared.bad, ids, samples.files)
    return {IMAGE: out, ID: ids}


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Read the epochs in a trial."""
    os.environ["RAY_ADDRESS"] = spec.address
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    epochs: Any = ray.get_actor(EPOCHS, namespace=actor_names.NAMESPACE)
    numbers = count()

    def epoch() -> Iterator[Minibatch]:
        dataset = ray.get(epochs.get.remote(spec.trial, next(numbers)))
        for minibatch in dataset.iter_batches(batch_size=spec.batch, batch_format="numpy"):
            yield [np.ascontiguousarray(minibatch[IMAGE])], minibatch[ID]

    try:
        yield epoch
    finally:
        ray.shutdown()
