"""Serves a feed: checks what was asked, fills in what was not, and starts the feed's coordinator.

It is apart from `mbaas.feed` because trials only join: they need nothing of what a service is made of.
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
from mbaas.budgets import largest_sample, memory_budgets
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
    """Start a feed: prep workers that make each minibatch once for all consumers.

    Sizes may be texts such as "2 GiB", times such as "2 min".

    Args:
        name: under which consumers `join` it.
        dataset: which samples there are.
        pipeline: what to do to each.
        batch_size: samples in a minibatch; a consumer may ask for another size.
        seed: order and random transforms follow from it; 0 to 2**63 - 1.
        shuffle: give each epoch an order of its own; False, for validation: all have the dataset's order. If nothing in
            the pipeline is random either, and all minibatches of an epoch fit ``staging_bytes``, each is prepared once
            for all epochs and trials, and no trial waits for another.
        cache_bytes: memory for samples, on each node; default: the size of the dataset, or with ``decoded`` that of
            its decoded samples, measured when the feed starts, up to half of the free memory. A node with a small
            object store gets as much as fits there.
        decoded: keep samples decoded in the caches, as they are before the pipeline's first random transform, where
            measured times say that memory saves more so than with the bytes that storage has. Minibatches have the same
            bytes.
        staging_bytes: memory for prepared minibatches; default: 1 GiB, or what all prep workers need to work at the
            same time, 256 MiB each and 384 MiB more, if that is more; at most 15 % of a node's object store.
        prep_workers: actors that prepare, each of which reserves one CPU; default: half of the CPUs that other feeds
            have left, one of which is kept for a trial. Where that is less than one CPU, it is one worker that reserves
            as much. With dali it is at most two workers for each GPU; of sound, which is decoded on CPUs, four; as far
            as half of the CPUs of nodes with GPUs gives that. With a ``dali_share`` below 1 these divide that half
            among them, and have as many threads as CPUs.
        engine: what prepares samples: "cpu", "dali", or "auto", which is dali where there is a GPU and the pipeline can
            run on it, else cpu.
        gpus_per_worker: GPUs, or a fraction, that each worker of the dali engine reserves; 0 runs it on the CPU;
            default: it works on a GPU of which it reserves nothing, so that trials can have whole ones.
        dali_share: share of the images that the dali engine prepares with DALI; the same workers prepare the others on
            their CPUs meanwhile. Which are which stays so, so that minibatches have the same bytes as long as the share
            is the same.
        drop_last: leave out the samples at the end of an epoch that do not fill a minibatch.
        on_bad_sample: what becomes of a sample that cannot be prepared: "raise" gives consumers an error that names the
            file, "skip" leaves it out, counts it and lists it. A file of more than 1 GiB, or than 30 % of the smallest
            object store of a node that prepares, is bad, too.
        cpu_price_per_h: price of a CPU for an hour, in any currency: what loading costs a trial is then told in money,
            too.
        detached: outlive the program that serves the feed, and its Ray job: it ends with `mbaas.stop`, or with the
            cluster, which must have been started by somebody else.
        replace: end a feed of that name that you serve already, as when a notebook's cell runs again. A feed of another
            user or host is left alone.
        timeouts: how long a feed waits for consumers, for workers and for storage.
        disk: local disks of the nodes, for samples that memory has no room for; default: none.
        scaling: how many prep workers there are beyond the reserved ones, where they run, and when their number
            changes.
        lending: when idle prep workers work for other feeds of the cluster that need them more.
        threads: threads of a node, and when they move between preparing samples and reading storage.
        staging: what is fetched and prepared ahead of need, and by how many coordinators it is handed out.

    Raises:
        ConfigError: an option that there is not, or that cannot work.
        FeedExistsError: a feed of that name runs already; the message says which program serves it. One whose program
            ended does not count: what is left of it is ended first. Unless it was stopped, its epochs are not begun
            again on this cluster by a feed of the same name, dataset, pipeline, seed and order.
        ResourceError: the cluster cannot give the CPUs, at the latest after 30 s; or what is left of an earlier feed of
            that name does not end; or the feed is to be detached and there is no cluster that outlives this program.
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
    # What can be refused without a cluster was refused above: nobody should wait for Ray to learn of a typing error.
    if detached:
        ensure_lasting_ray()
    else:
        runtime.ensure_ray(start=True)
    runtime.say_joined()
    if not runtime.clear_leftovers(name):
        _replace_or_refuse(name, replace)
    gpus = runtime.gpus()
    chosen = resolve_engine(engine, pipeline, gpus=gpus)  # raises here what the coordinator would in another process
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
    """End a feed of this user's if it is to be replaced.

    Raises:
        FeedExistsError: it is not to be, or it is another user's.
    """
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
    with suppress(FeedNotFoundError, FeedFailedError):  # it has just ended by itself
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
    """Fill in what was not asked for, from what the cluster has and other feeds leave of it.

    Raises:
        ConfigError, ResourceError: there is not enough.
    """
    earlier = tuple(claim.memory for claim in claims)
    # Of those that reserve parts of GPUs more than one may not find room on each.
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
    """Start a feed; while Ray still holds a name that it needs, clear what is left and start it again.

    Raises:
        FeedExistsError: another program was faster.
        ResourceError: Ray holds the name for too long.
    """

    def clear(_: RetryCallState) -> None:
        if not runtime.clear_leftovers(name):
            raise FeedExistsError(f"a feed {name!r} was served by another program at the same time")

    patiently = Retrying(
        retry=retry_if_exception_type(ray.exceptions.ActorAlreadyExistsError),
        stop=stop_after_delay(runtime.LEFTOVERS_S),
        wait=wait_fixed(runtime.LOOK_S),  # Ray may hold a name of which nothing is left to be seen
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
    """Connect to the running cluster, which must not end with this program.

    Raises:
        ResourceError: there is none, or this program started it itself.
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
        # From what other feeds keep until this one is registered no other program may decide what its feed takes.
        with kept_claims.dividing() as number:
            settings = fill_in()
            coordinator = _registered(settings, pipeline, gpus)
            keep_server(settings.name)
            kept_claims.enter(settings.name, claims_of(settings, engine, settings.prep_workers), number)
        workers = _launched(settings, pipeline, engine, coordinator)
        # Storage that errs just now may be asked for a first sample for as long as for any other.
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
    """Return what a notebook shows of a feed's first samples, as HTML."""
    from mbaas.pictures.samples import html_of  # here: most programs draw nothing

    return html_of(dataset, pipeline, seed=settings.seed, shuffle=settings.shuffle)


def _registered(settings: FeedSettings, pipeline: Pipeline, gpus: int) -> Any:
    """Make a feed's coordinator; its name is taken when this returns."""
    detached = settings.detached
    options = {
        "name": runtime.actor_name(settings.name),
        "namespace": runtime.NAMESPACE,
        "max_concurrency": 10_000,  # every consumer has a call that waits; Ray's default of 1,000 would bound them
        "enable_task_events": False,  # a record of every call costs time, and nobody looks at it
        "max_restarts": -1,
        "lifetime": "detached" if detached else None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(runtime.lasting_node(detached=detached), soft=False),
    }
    actor: Any = ray.remote(num_cpus=0)(Coordinator)
    return actor.options(**options).remote(settings, pipeline, gpus)


def _launched(settings: FeedSettings, pipeline: Pipeline, engine: EngineName, coordinator: Any) -> dict[str, Any]:
    """Have the prep workers' actors start while the coordinator does: each takes half a second to a second."""
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
    pipeline.known(dataset.fields)  # for its error
    check_packages(pipeline)


def _prep_resources(asked: FeedOptions, claims: list[Claims], gpus: GpuRoom | None) -> PrepResources:
    """Return the prep workers that a feed begins with: as many as the user said, or what leaves room for trials."""
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
