"""Serve a feed: check the options, fill in defaults, and start the feed's coordinator.

Separate from `mbaas.feed`, so that a trial that only joins does not import the parts of a service.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import ray
from msgspec import structs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from mbaas import runtime, units
from mbaas.allocation.headroom import GpuRoom, PrepResources, default_prep
from mbaas.client.rpc import call
from mbaas.coordinator import kept_claims
from mbaas.coordinator.actor import Coordinator
from mbaas.coordinator.served_by import forget_server, keep_server, recall_server
from mbaas.coordinator.worker_pool import WorkerPool
from mbaas.coordinator.worker_pool import claims as claims_of
from mbaas.core.layout import wanted_staging
from mbaas.dataset import Dataset
from mbaas.dataset.bounded import bounded
from mbaas.errors import ConfigError, FeedExistsError, FeedFailedError, FeedNotFoundError, ResourceError, last_line
from mbaas.feed import CALL_S, SERVED, Feed, stop
from mbaas.memory.budgets import largest_sample, memory_budgets
from mbaas.messages import Claims, EngineName
from mbaas.prep.engines import check_packages, check_share, resolve_engine, workers_per_gpu
from mbaas.settings import (
    Disk,
    FeedOptions,
    FeedSettings,
    Lending,
    Scaling,
    Staging,
    Threads,
    Timeouts,
    check_feed_name,
    known_keywords,
)
from mbaas.transforms import DecodeArray, Pipeline

NEEDS_LASTING_RAY = "a detached feed needs a Ray cluster that outlives the program which serves it"
START_ONE = "start one with `ray start --head` first, or name one in RAY_ADDRESS"


@known_keywords
def serve(
    name: str,
    dataset: Dataset,
    pipeline: Pipeline,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    cache_bytes: int | str | None = None,
    decoded: bool = True,
    staging_bytes: int | str | None = None,
    prep_workers: int | None = None,
    engine: Literal["auto", "cpu", "dali"] = "auto",
    gpus_per_worker: float | None = None,
    dali_share: float = 1.0,
    drop_last: bool = False,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    cpu_price_per_h: float | None = None,
    detached: bool = False,
    replace: bool = False,
    timeouts: Timeouts = Timeouts(),
    disk: Disk | None = None,
    scaling: Scaling = Scaling(),
    lending: Lending = Lending(),
    threads: Threads = Threads(),
    staging: Staging = Staging(),
) -> Feed:
    """Start a feed: prep workers that prepare each minibatch once for all consumers.

    Sizes may be strings such as "2 GiB", times such as "2 min".

    Args:
        name: name under which consumers `join` the feed.
        dataset: the samples.
        pipeline: the decoder and transforms applied to each sample.
        batch_size: samples in a minibatch; a consumer may choose another size.
        seed: determines the order and the random transforms; 0 to 2**63 - 1.
        shuffle: shuffle each epoch differently. False, for validation, keeps the order of the dataset in every epoch.
            If the pipeline is deterministic too and an epoch fits ``staging_bytes``, minibatches are prepared once for
            all epochs and trials, and trials do not wait for each other.
        cache_bytes: memory for samples on each node. Default: the size of the dataset, or with ``decoded`` the size of
            its decoded samples, measured when the feed starts, up to half of the free memory. A node with a small
            object store gets what fits there.
        decoded: cache samples after the deterministic prefix of the pipeline (for example decoded images) where
            measurements show that this saves more time per byte than caching encoded samples. Minibatches are the same
            either way.
        staging_bytes: memory for prepared minibatches. Default: 256 MiB for each prep worker plus 384 MiB, at least 1
            GiB, and at most 15 % of the smallest object store.
        prep_workers: prep workers, which reserve one CPU each. Default for the cpu engine: half of the CPUs that other
            feeds left, not counting one for a trial; if that is less than one CPU, a single worker that reserves the
            fraction. Default for dali: 2 per GPU (4 for audio, which is decoded on CPUs), at most half of the CPUs of
            nodes with GPUs. With ``dali_share`` below 1, these workers divide that half and run one thread per CPU.
        engine: engine that prepares samples: "cpu", "dali", or "auto", which selects dali if the cluster has a GPU and
            the pipeline supports it.
        gpus_per_worker: GPUs, or a fraction of one, that each dali worker reserves; 0 runs dali on the CPU. Default:
            workers use a GPU without reserving it, so that trials can have whole GPUs.
        dali_share: fraction of the images that the dali engine prepares with DALI; its workers prepare the others on
            their CPUs at the same time. A given fraction always selects the same images, so minibatches do not change
            between runs.
        drop_last: leave out the samples at the end of an epoch that do not fill a minibatch.
        on_bad_sample: handling of a sample that cannot be prepared: "raise" gives consumers an error with the name of
            the file, "skip" leaves the sample out, counts it and lists it. A file larger than 1 GiB, or than 30 % of
            the smallest object store of a node that prepares, is also bad.
        cpu_price_per_h: price of one CPU-hour, in any currency. If it is set, loading costs are also reported in money.
        detached: keep the feed running after the program that serves it, and its Ray job, have ended. It ends with
            `mbaas.stop`, or with the cluster, which must have been started by another program.
        replace: end your own running feed of this name first, for example when a notebook cell runs again. Feeds of
            other users or hosts are left alone.
        timeouts: time limits for consumers, prep workers and storage.
        disk: local disks of the nodes, for samples that do not fit in memory; default: none.
        scaling: limits, nodes and thresholds for prep workers beyond the reserved ones.
        lending: sharing of idle prep workers with other feeds of the cluster.
        threads: threads of a node, divided between preparing samples and reading storage.
        staging: limits on fetching and preparing ahead, and the number of coordinators.

    Raises:
        ConfigError: an unknown option, or an invalid value.
        FeedExistsError: a feed with this name is already running; the message names the program that serves it. The
            remains of a feed whose program died are removed first. Unless that feed was stopped, a new one
            with the same name, dataset, pipeline, seed and order does not repeat its epochs on this cluster.
        ResourceError: the cluster cannot provide the CPUs within 30 s, the remains of an earlier feed do not end, or a
            detached feed has no cluster that outlives this program.
        BadSampleError: no sample could be prepared.
    """
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "cache_bytes": cache_bytes,
        "decoded": decoded,
        "staging_bytes": staging_bytes,
        "prep_workers": prep_workers,
        "engine": engine,
        "gpus_per_worker": gpus_per_worker,
        "dali_share": dali_share,
        "drop_last": drop_last,
        "on_bad_sample": on_bad_sample,
        "cpu_price_per_h": cpu_price_per_h,
        "detached": detached,
        "timeouts": timeouts,
        "disk": disk,
        "scaling": scaling,
        "lending": lending,
        "threads": threads,
        "staging": staging,
    }
    check_feed_name(name)
    asked = FeedOptions(**given)
    _check(dataset, pipeline)
    check_share(asked.dali_share, engine, pipeline)
    if asked.drop_last and asked.batch_size > len(dataset):
        raise ConfigError(
            f"batch_size must be at most {len(dataset):,}, the samples of the dataset, with drop_last=True, got "
            f"{asked.batch_size:,}: there would be no minibatch",
            option="batch_size",
        )
    # Everything that can be checked without a cluster was checked above, so a typing error does not wait for Ray.
    if detached:
        ensure_lasting_ray()
    else:
        runtime.ensure_ray(start=True)
    runtime.say_joined()
    if not runtime.clear_leftovers(name):
        _replace_or_refuse(name, replace)
    gpus = runtime.gpus()
    chosen = resolve_engine(engine, pipeline, gpus=gpus)  # raises here, not in the coordinator's process
    dataset = bounded(dataset, largest_sample(runtime.store_bytes(with_cpus=True).values()))

    def fill_in() -> FeedSettings:
        return _filled_in(
            name,
            given,
            asked,
            dataset,
            grows=asked.decoded and (pipeline.prefix > 1 or not isinstance(pipeline.decoder, DecodeArray)),
            claims=kept_claims.in_order(),
            gpus=gpus,
            per_gpu=workers_per_gpu(pipeline),
            engine=chosen,
        )

    return _started_where_the_name_is_free(name, lambda: _start(fill_in, dataset, pipeline, gpus=gpus, engine=chosen))


def _replace_or_refuse(name: str, replace: bool) -> None:
    server = recall_server(name)
    whose = "" if server is None else f", served by {server}"
    if server is None or not server.is_ours:
        raise FeedExistsError(
            f"a feed {name!r} runs already{whose}; take another name, or ask for that one to be stopped"
        )
    if not replace:
        raise FeedExistsError(
            f"a feed {name!r} runs already{whose}; take another name, or end that one with mbaas.stop({name!r}) or "
            "mbaas.serve(..., replace=True)"
        )
    with suppress(FeedNotFoundError, FeedFailedError):  # it has just ended
        stop(name)
    if not runtime.clear_leftovers(name):
        raise FeedExistsError(f"a feed {name!r} was served by another program at the same time")


def _filled_in(
    name: str,
    given: dict[str, Any],
    asked: FeedOptions,
    dataset: Dataset,
    *,
    grows: bool,
    claims: list[Claims],
    gpus: int,
    per_gpu: int,
    engine: EngineName,
) -> FeedSettings:
    earlier = tuple(claim.memory for claim in claims)
    # Workers that reserve parts of GPUs may not fit more than one to a GPU.
    usable, per_gpu = (runtime.markable_gpus(), per_gpu) if asked.gpus_per_worker is None else (gpus, 1)
    room = GpuRoom(count=usable, workers=per_gpu, cpus=runtime.cpus_per_gpu())
    resources = _prep_resources(asked, claims, room if engine == "dali" and gpus else None)
    cache, staged = memory_budgets(
        cache_bytes=asked.cache_bytes,
        staging_bytes=asked.staging_bytes,
        wanted_staging=wanted_staging(asked.scaling.max_prep_workers or resources.workers),
        dataset_bytes=dataset.total_bytes,
        grows=grows,
        stores=runtime.store_bytes(with_cpus=True).values(),
        smallest_store=min(runtime.store_bytes().values(), default=0),
        earlier=earlier,
    )
    chosen: dict[str, Any] = {
        "cache_bytes": cache,
        "sizes_cache": asked.cache_bytes is None,
        "staging_bytes": staged,
        "prep_workers": resources.workers,
        "cpus_per_worker": resources.cpus_per_worker,
        "threads": dataclasses.replace(asked.threads, prep=max(asked.threads.prep, resources.threads)),
        "dali_share": asked.dali_share if engine == "dali" else 1.0,
        "gpus_per_worker": 0.0 if asked.gpus_per_worker is None and not gpus else asked.gpus_per_worker,
        "earlier": earlier,
    }
    settings = FeedSettings(name=name, **{**given, **chosen})
    runtime.check_cpus(name, settings.prep_workers)
    return settings


def _started_where_the_name_is_free(name: str, start: Callable[[], Feed]) -> Feed:

    def clear(_: RetryCallState) -> None:
        if not runtime.clear_leftovers(name):
            raise FeedExistsError(f"a feed {name!r} was served by another program at the same time")

    patiently = Retrying(
        retry=retry_if_exception_type(ray.exceptions.ActorAlreadyExistsError),
        stop=stop_after_delay(runtime.LEFTOVERS_S),
        wait=wait_fixed(runtime.LOOK_S),  # Ray may hold the name of an actor that it no longer lists
        before_sleep=clear,
        reraise=True,
    )
    try:
        return patiently(start)
    except ray.exceptions.ActorAlreadyExistsError as error:
        raise ResourceError(
            f"Ray did not let go of the names of an earlier feed {name!r} within {units.seconds(runtime.LEFTOVERS_S)} "
            f"({last_line(error)}); serve it again later, or take another name"
        ) from error


def ensure_lasting_ray() -> None:
    """Connect to a running cluster that outlives this program.

    Raises:
        ResourceError: no cluster is running, or this program started it.
    """
    try:
        runtime.ensure_ray(start=False)
    except ResourceError as error:
        if os.environ.get("RAY_ADDRESS") or not isinstance(error.__context__, ConnectionError):
            raise
        raise ResourceError(f"{NEEDS_LASTING_RAY}, and none is running here; {START_ONE}") from error
    if runtime.owns_ray():
        raise ResourceError(f"{NEEDS_LASTING_RAY}, and this one was started by this program itself; {START_ONE}")


def _start(
    fill_in: Callable[[], FeedSettings], dataset: Dataset, pipeline: Pipeline, *, gpus: int, engine: EngineName
) -> Feed:
    coordinator: Any = None
    try:
        # Other programs must not compute their feeds' shares between reading the claims and entering this feed's.
        with kept_claims.dividing() as number:
            settings = fill_in()
            coordinator = _registered(settings, pipeline, gpus)
            keep_server(settings.name)
            kept_claims.enter(settings.name, claims_of(settings, engine, settings.prep_workers), number)
        workers = _launched(settings, pipeline, engine, coordinator)
        # The first sample may be retried for as long as any other while storage fails.
        timeout_s = CALL_S + settings.timeouts.storage_s
        call(coordinator.start.remote(dataset, workers), timeout_s, f"starting feed {settings.name!r}")
    except BaseException:  # Ctrl-C, too: Ray would leave the coordinator and its detached actors behind
        if coordinator is not None:
            ray.kill(coordinator)
            runtime.end_children(settings.name)
            kept_claims.forget(settings.name)
            forget_server(settings.name)
        raise
    if not settings.detached:
        SERVED[settings.name] = coordinator
    return Feed(settings.name, coordinator, partial(_picture, dataset, pipeline, settings))


def _picture(dataset: Dataset, pipeline: Pipeline, settings: FeedSettings) -> str:
    from mbaas.pictures.samples import html_of  # here: most programs never draw

    return html_of(dataset, pipeline, seed=settings.seed, shuffle=settings.shuffle)


def _registered(settings: FeedSettings, pipeline: Pipeline, gpus: int) -> Any:
    """Create a feed's coordinator; its name is taken when this returns."""
    detached = settings.detached
    options = {
        "name": runtime.actor_name(settings.name),
        "namespace": runtime.NAMESPACE,
        "max_concurrency": 10_000,  # each consumer has a waiting call; Ray's default is 1,000
        "enable_task_events": False,  # recording every call costs time and is not used
        "max_restarts": -1,
        "lifetime": "detached" if detached else None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(runtime.lasting_node(detached=detached), soft=False),
    }
    actor: Any = ray.remote(num_cpus=0)(Coordinator)
    return actor.options(**options).remote(settings, pipeline, gpus)


def _launched(settings: FeedSettings, pipeline: Pipeline, engine: EngineName, coordinator: Any) -> dict[str, Any]:
    # Workers start in parallel with the coordinator: each takes half a second to a second.
    pool, own_id = WorkerPool(settings, pipeline, engine), coordinator._actor_id.hex()
    names = [f"prep-{number}" for number in range(settings.prep_workers)]
    return {name: pool.launch(name, own_id) for name in names}


def _check(dataset: object, pipeline: object) -> None:
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"dataset must be an mbaas Dataset, as mbaas.read_images returns it, got {type(dataset).__name__}"
        )
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"pipeline must be an mbaas.transforms.Pipeline, got {type(pipeline).__name__}")
    pipeline.known(dataset.fields)  # raises for unknown fields
    check_packages(pipeline)


def _prep_resources(asked: FeedOptions, claims: list[Claims], gpus: GpuRoom | None) -> PrepResources:
    if asked.prep_workers is not None:
        return PrepResources(asked.prep_workers)
    resources = default_prep(
        cpus=runtime.cpus(),
        claimed_cpus=sum(claim.cpus for claim in claims),
        gpus=gpus,
        also_on_cpus=asked.dali_share < 1,
    )
    most = asked.scaling.max_prep_workers
    return resources if most is None else structs.replace(resources, workers=min(resources.workers, most))
