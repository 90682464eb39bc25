"""Row "tf-data": a tf.data service that shares minibatches between all trials through its `CrossTrainerCache`.

The dispatcher and one worker run in the host process; tf.data chooses the worker's number of threads. The pipeline
follows TensorFlow's examples: only the window of a JPEG is decoded. A shared dataset must be infinite, so it repeats,
and a trial takes as many minibatches as an epoch has. Minibatches that the cache drops before a trial reaches them are
lost for that trial.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec
from mbaas.tools.bench.tasks import images

CACHE_BYTES = 2**30
"""Capacity of the cache: as much as an ample staging budget of a feed."""

AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else it logs all libraries that it could not load
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    import tensorflow

    return tensorflow


@contextmanager
def service(spec: RowSpec) -> Iterator[str]:  # noqa: ARG001
    """Run a dispatcher and a worker."""
    servers = _tensorflow().data.experimental.service
    from tensorflow.core.protobuf.service_config_pb2 import WorkerConfig  # the public class has no cache option

    dispatcher = servers.DispatchServer()
    config = WorkerConfig(
        dispatcher_address=dispatcher.target.removeprefix("grpc://"),
        worker_address="localhost:%port%",
        data_transfer_address="localhost:%dts_port%",
        protocol="grpc",
        cross_trainer_cache_size_bytes=CACHE_BYTES,
    )
    worker = servers.WorkerServer(config)
    try:
        yield dispatcher.target
    finally:
        # each waits for trials that were killed before they could disconnect
        worker._stop()
        dispatcher._stop()


def _dataset(spec: RowSpec) -> Any:
    """Return an infinite dataset of minibatches: pixels uint8[n, side, side, 3] and int64[n] sample ids."""
    tf = _tensorflow()
    tf.keras.utils.set_random_seed(spec.settings.seed)  # all trials must define the same dataset
    files = [str(file) for file in spec.samples().files]

    def prepare(file: Any, sample: Any) -> Any:
        encoded = tf.io.read_file(file)
        shape = tf.io.extract_jpeg_shape(encoded) if is_jpeg else tf.shape(_decoded(tf, encoded))
        start, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.zeros([0, 0, 4]),
            min_object_covered=0.0,
            area_range=AREA,
            aspect_ratio_range=ASPECT,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        top, left, _ = tf.unstack(start)
        height, width, _ = tf.unstack(size)
        if is_jpeg:
            crop = tf.io.decode_and_crop_jpeg(encoded, tf.stack([top, left, height, width]), channels=3)
        else:
            crop = tf.image.crop_to_bounding_box(_decoded(tf, encoded), top, left, height, width)
        image = tf.image.resize(crop, [images.SIDE, images.SIDE], antialias=True)
        image = tf.image.random_flip_left_right(tf.cast(tf.round(image), tf.uint8))
        return image, sample

    is_jpeg = all(file.lower().endswith((".jpg", ".jpeg")) for file in files)
    dataset = tf.data.Dataset.from_tensor_slices((files, list(range(len(files)))))
    dataset = dataset.shuffle(len(files), seed=spec.settings.seed, reshuffle_each_iteration=True)
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).batch(spec.batch)
    return dataset.repeat().prefetch(tf.data.AUTOTUNE)


def _decoded(tf: Any, encoded: Any) -> Any:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Read the shared minibatches in a trial."""
    service = _tensorflow().data.experimental.service
    shared = _dataset(spec).apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=spec.address,
            job_name="bench",
            compression=None,  # useless on one machine
            cross_trainer_cache=service.CrossTrainerCache(trainer_id=str(spec.trial)),
        )
    )
    stream = iter(shared)

    def epoch() -> Iterator[Minibatch]:
        for pixels, ids in islice(stream, math.ceil(len(spec.samples().files) / spec.batch)):
            yield [pixels.numpy()], ids.numpy().astype("int64")

    yield epoch
