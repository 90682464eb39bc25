"""Serve a feed: check the options, fill in defaults, and start the feed's coordinator.

Separate from `mbaas.feed`, so that a trial that only joins does not import the parts of a service.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from typing import Annotated, Any

import ray
from msgspec import structs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from mbaas.base import units
from mbaas.base.validation import Checked, options, takes
from mbaas.calls.client import call
from mbaas.coordinator import registry
from mbaas.coordinator.actor import Coordinator
from mbaas.coordinator.control import CALL_S
from mbaas.coordinator.engine_decision import are_shared, decide, run_probe
from mbaas.coordinator.recovery import recall_engine
from mbaas.coordinator.worker_pool import WorkerPool
from mbaas.coordinator.worker_pool import claims as claims_of
from mbaas.core.layout import wanted_staging
from mbaas.dataset import Dataset
from mbaas.dataset.base import bounded
from mbaas.errors import ConfigError, FeedExistsError, FeedFailedError, FeedNotFoundError, ResourceError, last_line
from mbaas.feed import SERVED, Feed, stop
from mbaas.memory.budgets import largest_sample, memory_budgets
from mbaas.model.engine_choice import EngineChoice, EngineRoom
from mbaas.model.lending import GpuRoom, PrepResources, default_prep
from mbaas.prep.engines import check_packages, check_share, workers_per_gpu
from mbaas.ray_cluster import actor_names, connection, leftovers, resources
from mbaas.settings import GROUPED, FeedName, FeedOptions, FeedSettings, in_python
from mbaas.transforms import DecodeArray, Pipeline
from mbaas.wire.consumers import Claims, fingerprint_of
from mbaas.wire.samples import EngineName

NEEDS_LASTING_RAY = "a detached feed needs a Ray cluster that outlives the program that serves the feed"
START_ONE = "start one with `ray start --head`, or set RAY_ADDRESS"


def _dataset(given: object) -> Dataset:
    if not isinstance(given, Dataset):
        raise ConfigError(
            f"dataset must be an mbaas Dataset, as mbaas.read_images returns it, got {type(given).__name__}"
        )
    return given


def _pipeline(given: object) -> Pipeline:
    if not isinstance(given, Pipeline):
        raise ConfigError(f"pipeline must be an mbaas.transforms.Pipeline, got {type(given).__name__}")
    return given


@options()
class ServeRequest(FeedOptions):
    """The arguments of `serve`."""

    name: FeedName = field(kw_only=False)
    """Name under which consumers `join` the feed."""

    dataset: Annotated[Dataset, Checked(_dataset, only=True)] = field(kw_only=False)
    """The samples."""

    pipeline: Annotated[Pipeline, Checked(_pipeline, only=True)] = field(kw_only=False)
    """The decoder and the transforms applied to each sample."""

    replace: bool = False
    """End your own running feed of this name first, for example when a notebook cell runs again. Feeds of other users
    or hosts are left alone."""


@takes(ServeRequest, elsewhere={name: tuple(map(in_python, grouped)) for name, grouped in GROUPED.items()})
def serve(asked: ServeRequest) -> Feed:
    """Start a feed: prep workers that prepare each minibatch once for all consumers.

    It takes the options of `mbaas.settings.FeedOptions` as keywords, such as
    ``mbaas.serve("train", data, pipeline, batch_size=256, cache_bytes="2 GiB")``. Sizes may be strings such as "2 GiB",
    times such as "2 min".

    Raises:
        ConfigError: an unknown option, or an invalid value.
        FeedExistsError: a feed with this name is already running; the message names the program that serves it. The
            remains of a feed whose program died are removed first. Unless that feed was stopped, a new one
            with the same name, dataset, pipeline, seed and order does not repeat its epochs on this cluster.
        ResourceError: the cluster cannot provide the CPUs within 30 s, the remains of an earlier feed do not end, or a
            detached feed has no cluster that outlives this program.
        BadSampleError: no sample could be prepared.
    """
    name, dataset, pipeline = asked.name, asked.dataset, asked.pipeline
    pipeline.known(dataset.fields)  # raises for unknown fields
    check_packages(pipeline)
    check_share(asked.dali_share, asked.engine, pipeline)
    if asked.drop_last and asked.batch_size > len(dataset):
        raise ConfigError(
            f"batch_size must be at most {len(dataset):,}, the samples of the dataset, with drop_last=True, got "
            f"{asked.batch_size:,}: every epoch would be empty",
            option="batch_size",
        )
    # Everything that can be checked without a cluster was checked above, so a typing error does not wait for Ray.
    if asked.detached:
        ensure_lasting_ray()
    else:
        connection.ensure_ray(start=True)
    connection.say_joined()
    if not leftovers.clear_leftovers(name):
        _replace_or_refuse(name, asked.replace)
    gpus = resources.gpus()
    dataset = bounded(dataset, largest_sample(resources.store_bytes(with_cpus=True).values()))
    choice = decide(
        name,
        asked,
        pipeline,
        gpus=gpus,
        earlier=_engine_before(name, asked, dataset, pipeline),
        room=lambda: _engine_room(asked, pipeline, gpus),
        probe=lambda: run_probe(name, asked, dataset, pipeline),
    )

    def fill_in() -> FeedSettings:
        return _filled_in(
            name,
            asked,
            dataset,
            grows=asked.cache_decoded and (pipeline.prefix > 1 or not isinstance(pipeline.decoder, DecodeArray)),
            claims=registry.in_order(),
            gpus=_gpu_room(asked, pipeline, gpus) if gpus else None,
            engine=choice.engine,
        )

    return _started_where_the_name_is_free(name, lambda: _start(fill_in, dataset, pipeline, choice))


def _engine_before(name: str, asked: FeedOptions, dataset: Dataset, pipeline: Pipeline) -> EngineChoice | None:
    def identity() -> str:
        return fingerprint_of(dataset.fingerprint, pipeline.fingerprint, seed=asked.seed, shuffle=asked.shuffle)

    return recall_engine(name, identity) if asked.engine == "auto" else None


def _engine_room(asked: FeedOptions, pipeline: Pipeline, gpus: int) -> EngineRoom:
    claims = registry.in_order()
    cpu, dali = (_prep_resources(asked, claims, room) for room in (None, _gpu_room(asked, pipeline, gpus)))
    each = asked.gpus_per_worker
    usable = resources.markable_gpus() if each is None else min(gpus, max(1, math.ceil(each * dali.workers)))
    return EngineRoom(
        cpu_workers=cpu.workers * min(1.0, cpu.cpus_per_worker),
        dali_workers=dali.workers,
        gpus=usable,
        is_shared=are_shared(asked),
        step_per_s=asked.step_per_s,
    )


def _gpu_room(asked: FeedOptions, pipeline: Pipeline, gpus: int) -> GpuRoom:
    # Workers that reserve parts of GPUs may not fit more than one to a GPU.
    usable, per_gpu = (
        (resources.markable_gpus(), workers_per_gpu(pipeline)) if asked.gpus_per_worker is None else (gpus, 1)
    )
    return GpuRoom(count=usable, workers=per_gpu, cpus=resources.cpus_per_gpu())


def _replace_or_refuse(name: str, replace: bool) -> None:
    server = registry.server_of(name)
    whose = "" if server is None else f", served by {server}"
    if server is None or not server.is_ours:
        raise FeedExistsError(f"a feed {name!r} is already running{whose}; use another name, or have that feed stopped")
    if not replace:
        raise FeedExistsError(
            f"a feed {name!r} is already running{whose}; use another name, or end that feed first: "
            f"`mbaas stop {name}`, or replace=True in Python"
        )
    with suppress(FeedNotFoundError, FeedFailedError):  # it has just ended
        stop(name)
    if not leftovers.clear_leftovers(name):
        raise FeedExistsError(f"a feed {name!r} was served by another program at the same time")


def _filled_in(
    name: str,
    asked: FeedOptions,
    dataset: Dataset,
    *,
    grows: bool,
    claims: list[Claims],
    gpus: GpuRoom | None,
    engine: EngineName,
) -> FeedSettings:
    earlier = tuple(claim.memory for claim in claims)
    prep = _prep_resources(asked, claims, gpus if engine == "dali" else None)
    cache, staged = memory_budgets(
        cache_bytes=asked.cache_bytes,
        staging_bytes=asked.staging_bytes,
        wanted_staging=wanted_staging(asked.scaling.max_prep_workers or prep.workers),
        dataset_bytes=dataset.total_bytes,
        grows=grows,
        stores=resources.store_bytes(with_cpus=True).values(),
        smallest_store=min(resources.store_bytes().values(), default=0),
        earlier=earlier,
    )
    chosen: dict[str, Any] = {
        "cache_bytes": cache,
        "sizes_cache": asked.cache_bytes is None,
        "staging_bytes": staged,
        "prep_workers": prep.workers,
        "cpus_per_worker": prep.cpus_per_worker,
        "threads": dataclasses.replace(asked.threads, prep=max(asked.threads.prep, prep.threads)),
        "dali_share": asked.dali_share if engine == "dali" else 1.0,
        "gpus_per_worker": 0.0 if asked.gpus_per_worker is None and gpus is None else asked.gpus_per_worker,
        "earlier": earlier,
    }
    settings = FeedSettings(name=name, **{**asked.given(), **chosen})
    resources.check_cpus(name, settings.prep_workers)
    return settings


def _started_where_the_name_is_free(name: str, start: Callable[[], Feed]) -> Feed:

    def clear(_: RetryCallState) -> None:
        if not leftovers.clear_leftovers(name):
            raise FeedExistsError(f"a feed {name!r} was served by another program at the same time")

    patiently = Retrying(
        retry=retry_if_exception_type(ray.exceptions.ActorAlreadyExistsError),
        stop=stop_after_delay(leftovers.LEFTOVERS_S),
        wait=wait_fixed(leftovers.LOOK_S),  # Ray may hold the name of an actor that it no longer lists
        before_sleep=clear,
        reraise=True,
    )
    try:
        return patiently(start)
    except ray.exceptions.ActorAlreadyExistsError as error:
        raise ResourceError(
            f"Ray did not release the names of an earlier feed {name!r} within {units.seconds(leftovers.LEFTOVERS_S)} "
            f"({last_line(error)}); try again later, or use another name"
        ) from error


def ensure_lasting_ray() -> None:
    """Connect to a running cluster that outlives this program.

    Raises:
        ResourceError: no cluster is running, or this program started it.
    """
    try:
        connection.ensure_ray(start=False)
    except ResourceError as error:
        if os.environ.get("RAY_ADDRESS") or not isinstance(error.__context__, ConnectionError):
            raise
        raise ResourceError(f"{NEEDS_LASTING_RAY}, but none is running here; {START_ONE}") from error
    if connection.owns_ray():
        raise ResourceError(f"{NEEDS_LASTING_RAY}, but this one was started by this program; {START_ONE}")


def _start(fill_in: Callable[[], FeedSettings], dataset: Dataset, pipeline: Pipeline, choice: EngineChoice) -> Feed:
    coordinator: Any = None
    try:
        # Other programs must not compute their feeds' shares between reading the claims and entering this feed's.
        with registry.dividing() as number:
            settings = fill_in()
            coordinator = _registered(settings, pipeline, choice)
            registry.enter(settings.name, claims_of(settings, choice.engine, settings.prep_workers), number)
        workers = _launched(settings, pipeline, choice.engine, coordinator)
        # The first sample may be retried for as long as any other while storage fails.
        timeout_s = CALL_S + settings.timeouts.storage_s
        call(coordinator.start.remote(dataset, workers), timeout_s, f"starting feed {settings.name!r}")
    except BaseException:  # Ctrl-C, too: Ray would leave the coordinator and its detached actors behind
        if coordinator is not None:
            ray.kill(coordinator)
            leftovers.end_children(settings.name)
            registry.forget(settings.name)
        raise
    if not settings.detached:
        SERVED[settings.name] = coordinator
    return Feed(settings.name, coordinator)


def _registered(settings: FeedSettings, pipeline: Pipeline, choice: EngineChoice) -> Any:
    """Create a feed's coordinator; its name is taken when this returns."""
    detached = settings.detached
    options = {
        "name": actor_names.actor_name(settings.name),
        "namespace": actor_names.NAMESPACE,
        "max_concurrency": 10_000,  # each consumer has a waiting call; Ray's default is 1,000
        "enable_task_events": False,  # recording every call costs time and is not used
        "max_restarts": -1,
        "lifetime": "detached" if detached else None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(resources.lasting_node(detached=detached), soft=False),
    }
    actor: Any = ray.remote(num_cpus=0)(Coordinator)
    return actor.options(**options).remote(settings, pipeline, choice)


def _launched(settings: FeedSettings, pipeline: Pipeline, engine: EngineName, coordinator: Any) -> dict[str, Any]:
    # Workers start in parallel with the coordinator: each takes half a second to a second.
    pool, own_id = WorkerPool(settings, pipeline, engine), actor_names.id_of(coordinator)
    names = [f"prep-{number}" for number in range(settings.prep_workers)]
    return {name: pool.launch(name, own_id) for name in names}


def _prep_resources(asked: FeedOptions, claims: list[Claims], gpus: GpuRoom | None) -> PrepResources:
    if asked.prep_workers is not None:
        return PrepResources(asked.prep_workers)
    prep = default_prep(
        cpus=resources.cpus(),
        claimed_cpus=sum(claim.cpus for claim in claims),
        gpus=gpus,
        also_on_cpus=asked.dali_share < 1,
    )
    most = asked.scaling.max_prep_workers
    return prep if most is None else structs.replace(prep, workers=min(prep.workers, most))
