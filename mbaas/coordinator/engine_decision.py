"""Decides which engine prepares a new feed's samples.

The bytes of minibatches depend on the engine. So a feed keeps its engine for its whole life, even if workers,
coordinators and nodes are replaced, or its program ends and serves it again (`recovery.keep_engine`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from msgspec import structs

from mbaas.base import units
from mbaas.coordinator.worker_pool import PREP, ROLE, node_options
from mbaas.dataset import Dataset
from mbaas.errors import ResourceError, last_line
from mbaas.model.engine_choice import EngineChoice, EngineRoom, choose
from mbaas.prep.engines import possible_engines
from mbaas.prep.worker import PrepWorkerActor
from mbaas.ray_cluster import connection, resources
from mbaas.settings import FeedOptions
from mbaas.transforms import Pipeline
from mbaas.wire.blocks import PrepConfig
from mbaas.wire.samples import EngineProbe

PROBE_S = 20.0
"""Timeout of the probe in seconds. Measuring takes less than 2 s; starting a process and loading DALI takes longer."""

_log = logging.getLogger(__name__)


def decide(
    feed: str,
    asked: FeedOptions,
    pipeline: Pipeline,
    *,
    gpus: int,
    earlier: EngineChoice | None,
    room: Callable[[], EngineRoom],
    probe: Callable[[], EngineProbe | str],
) -> EngineChoice:
    """Return the engine of a feed. ``room`` and ``probe`` are called only if the probe must decide.

    Args:
        gpus: GPUs of the cluster.
        earlier: the engine of the same feed before its program ended, if it was not stopped.
        room: returns the workers that the feed would have.
        probe: measures both engines; returns the reason if it could not.

    Raises:
        ConfigError: see `possible_engines`.
        ResourceError: the earlier choice is dali on GPUs, and the cluster has no GPU now.
    """
    usable = 0 if asked.gpus_per_worker == 0 else gpus  # "auto" never chooses dali on CPUs
    possible = possible_engines(asked.engine, pipeline, gpus=usable)
    if asked.engine != "auto":
        return EngineChoice(possible[0], f"engine={asked.engine!r} is set", gpus)
    if earlier is not None and (earlier.engine == "cpu" or earlier.gpus):
        if earlier.engine == "dali" and not usable:
            raise ResourceError(
                f"feed {feed!r} was served with engine='auto', which chose dali on GPUs, and its epochs continue. "
                f"Its workers may use {usable} GPUs now, and need 1. Add a GPU node, or name the engine, such as "
                "engine='cpu', whose pixels differ slightly"
            )
        return earlier
    if len(possible) == 1:
        return EngineChoice(possible[0], _why_cpu(pipeline, gpus), gpus)
    if asked.dali_share < 1:
        share = f"dali_share={units.exact(asked.dali_share)} divides the images between DALI and CPUs"
        return EngineChoice("dali", share, gpus)
    return _by_probe(feed, room(), probe(), gpus)


def _why_cpu(pipeline: Pipeline, gpus: int) -> str:
    if pipeline.cpu_only:
        return f"DALI {pipeline.cpu_only.dali_limit}, and the pipeline has {pipeline.cpu_only!r}"
    return "gpus_per_worker=0 leaves workers no GPU" if gpus else "the cluster has no GPU"


def _by_probe(feed: str, room: EngineRoom, found: EngineProbe | str, gpus: int) -> EngineChoice:
    if isinstance(found, EngineProbe) and found.failure:
        choice = EngineChoice("cpu", f"DALI failed on the feed's first samples: {found.failure}", gpus)
        _log.warning("feed %r: %s", feed, choice.sentence)
        return choice
    if isinstance(found, str) or found.rates is None:
        why = found if isinstance(found, str) else "no sample was prepared"
        choice = EngineChoice("dali", f"both engines are possible, and nothing was measured: {why}", gpus)
        _log.warning("feed %r: %s", feed, choice.sentence)
        return choice
    choice = structs.replace(choose(found.rates, room), gpus=gpus)
    _log.info("feed %r: %s", feed, choice.sentence)
    return choice


def are_shared(asked: FeedOptions) -> bool:
    """Return whether trials may train on the GPUs of dali workers.

    They may not if workers reserve whole GPUs, or if all nodes with GPUs are labelled for prep.
    """
    reserves_whole = asked.gpus_per_worker is not None and asked.gpus_per_worker >= 1
    return not reserves_whole and resources.labels_of_gpu_nodes(ROLE) != {PREP}


def run_probe(feed: str, asked: FeedOptions, dataset: Dataset, pipeline: Pipeline) -> EngineProbe | str:
    """Measure both engines in a process on a node with a GPU, for up to `PROBE_S`; or return why that failed.

    It reserves no CPU, and the same fraction of a GPU as a worker.
    """
    shares_gpu = asked.gpus_per_worker is None
    config = PrepConfig(
        feed=feed,
        pipeline=pipeline,
        engine="cpu",  # so that a failure of DALI does not end the process
        seed=asked.seed,
        threads=asked.threads.prep,
        on_bad_sample=asked.on_bad_sample,
        prep_s=asked.timeouts.prep_s,
    )
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": asked.gpus_per_worker or 0.0,
        "resources": resources.gpu_marker() if shares_gpu else {},
        "enable_task_events": False,
        **node_options(asked.scaling.prep_labels, None),
    }
    actor = PrepWorkerActor.options(**options).remote(config)
    on_gpu = structs.replace(config, engine="dali", shares_gpu=shares_gpu)
    try:
        return connection.get(actor.probe_engines.remote(dataset, on_gpu, asked.threads.fetch), PROBE_S)
    except ray.exceptions.GetTimeoutError:
        return f"the probe did not end within {units.seconds(PROBE_S)}"
    except ray.exceptions.RayError as error:
        return f"the probe failed: {last_line(error)}"
    finally:
        ray.kill(actor)
