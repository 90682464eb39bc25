"""Serves feeds, finds them and joins them: what users hold."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from mbaas import runtime
from mbaas.allocation.headroom import PrepResources, default_prep
from mbaas.budgets import memory_budgets
from mbaas.client.rpc import CALL_TIMEOUT_S, call, call_patiently
from mbaas.coordinator import recovery
from mbaas.coordinator.coordinator import Coordinator
from mbaas.core import calls
from mbaas.dataset import Dataset
from mbaas.errors import (
    ConfigError,
    FeedExistsError,
    FeedFailedError,
    FeedGoneError,
    FeedNotFoundError,
    MbaasError,
    ResourceError,
    shown,
)
from mbaas.ledger import to_table
from mbaas.loader import Loader
from mbaas.messages import START_TIMEOUT_S, Claims, ConsumerName, FeedInfo, JoinStart, LedgerEntry
from mbaas.prep.engines import resolve_engine
from mbaas.settings import (
    Disk,
    FeedOptions,
    FeedSettings,
    Lending,
    Scaling,
    Staging,
    Threads,
    Timeouts,
    known_keywords,
)
from mbaas.status import FeedStatus
from mbaas.transforms import Pipeline

NEEDS_LASTING_RAY = "a detached feed needs a Ray cluster that outlives the program which serves it"
START_ONE = "start one with `ray start --head` first, or name one in RAY_ADDRESS"

_START_TRIES = 5
"""Ray may hold the names of actors that are gone for a moment: a feed is started so many times before that counts."""

_CALL_S = START_TIMEOUT_S + CALL_TIMEOUT_S
"""How long a coordinator may take for a call of a `Feed`: it may be starting."""

_served: dict[str, Any] = {}
"""Coordinators of feeds that this program serves: they live as long as it does, also if their `Feed` is dropped."""


class Feed:
    """A running feed. It ends with `stop`, or with the program that served it unless it is detached.

    Attributes:
        name: the name under which trials join it.
    """

    def __init__(self, name: str, coordinator: Any) -> None:
        self.name = name
        self._coordinator = coordinator
        self._is_stopped = False

    def status(self, *, timeout_s: float = _CALL_S) -> FeedStatus:
        """Tell how the feed is doing: who takes part and where, what is staged and cached, rates, stalls, ledgers.

        Args:
            timeout_s: how long the feed's coordinator, which may be starting or restarting, may take; at least 10 s.

        Raises:
            WaitTimeoutError: it did not answer in time; it may be there all the same.
            FeedRestartingError: it did not come back in time.
            FeedGoneError: the feed ended with its program, or with the Ray cluster.
            FeedFailedError: it was stopped, or cannot go on.
        """
        status: FeedStatus = self._call(
            lambda: self._coordinator.status.remote(), f"status of feed {self.name!r}", timeout_s
        )
        return status

    def story(self, thing: str) -> list[str]:
        """Tell what happened to a thing, a line for each change: when, what, and the event that it followed from.

        Args:
            thing: a consumer or a prep worker, by its name in `status`; the cache node of a machine, by the first eight
                digits of the machine's id, or more, "cache 1a2b3c4d"; or a block, "block 17": blocks are counted over
                all epochs, so block b of epoch e is ``e * status().blocks_per_epoch + b``.

        Raises:
            ConfigError: it is no text, or nothing is known of it; the message lists what there is. The last lines are
                kept of what lives, and of some hundreds of blocks, consumers, workers and caches that are over.
        """
        lines: list[str] = self._call(
            lambda: self._coordinator.story.remote(thing), f"story of {thing!r} in feed {self.name!r}"
        )
        return lines

    def ledger(self) -> pa.Table:
        """Tell what each consumer received in each of its epochs, for as long as the feed runs.

        Returns:
            a row for each epoch that a consumer finished, in the order in which they arrived: ``consumer`` (string);
            ``epoch`` and ``feed_epoch``, the consumer's own count and the feed's; ``begin`` and ``shuffled``, which
            say with the seed what each minibatch held (`mbaas.messages.EpochLedger`); ``samples`` and ``id_hash``,
            what it received, ``expected_samples`` and ``expected_id_hash``, what the epoch must hold (int64, uint64);
            ``exact``, whether these are equal; ``seconds``; ``arrived`` (timestamp, UTC). Of a run with more than
            100,000 epochs the oldest are not there any more.

        Raises:
            FeedRestartingError, FeedGoneError, FeedFailedError: as for `status`.
        """
        entries: list[LedgerEntry] = []
        for number in itertools.count():
            ask = partial(self._ledger_page, number)
            page: tuple[LedgerEntry, ...] = self._call(ask, f"ledgers of feed {self.name!r}")
            if not page:
                break
            entries += page
        return to_table(entries)

    def _ledger_page(self, number: int) -> Any:
        return self._coordinator.ledgers.remote(number)

    def info(self) -> FeedInfo:
        """Tell what does not change: settings, order, shape of a sample."""
        info: FeedInfo = self._call(lambda: self._coordinator.info.remote(), f"info of feed {self.name!r}")
        return info

    def announce(self, consumers: Sequence[str], *, world_size: int = 1) -> None:
        """Hold a reservation for each of some consumers that will join soon, so that they begin the same epoch.

        Args:
            consumers: their names, as they will `join`.
            world_size: ranks of each of them, if they are data-parallel trials: a reservation for each rank.
        """
        names = [str(name) for consumer in consumers for name in ConsumerName.all_of(consumer, world_size)]
        self._call(lambda: self._coordinator.announce.remote(names), f"announcing consumers to feed {self.name!r}")

    def expect(self, epoch_s: float) -> None:
        """Compare a prediction of an epoch with the next one; the error shows in `status` and as a metric."""
        self._call(lambda: self._coordinator.expect.remote(epoch_s), f"telling feed {self.name!r} a prediction")

    def remove(self, consumer: str, *, reserve: bool = False, world_size: int = 1) -> None:
        """End a consumer's session, if it has one.

        Args:
            consumer: its name, as it joined.
            reserve: whether a reservation is held for a successor for a while.
            world_size: ranks of it, if it is a data-parallel trial: all of them end.
        """
        for name in map(str, ConsumerName.all_of(consumer, world_size)):
            self._end_session(name, reserve=reserve)

    def release_reservations(self, most: int) -> None:
        """Give up reservations that `remove` holds for successors, at most so many, because no successor will come."""
        free = [consumer.name for consumer in self.status().members if consumer.for_anyone]
        for name in free[:most]:
            self._end_session(name, reserve=False)

    def _end_session(self, name: str, *, reserve: bool) -> None:
        what = f"removing {name!r} from feed {self.name!r}"
        self._call(lambda: self._coordinator.leave.remote(name, None, reserve), what)

    def _call(self, ask: Callable[[], Any], what: str, timeout_s: float = _CALL_S) -> Any:
        """Call the coordinator, which may be starting or restarting; or the newer one of a feed served again."""
        try:
            return call_patiently(self._coordinator, ask, timeout_s, what)
        except FeedGoneError as error:
            successor = _successor(self.name, error)
            if successor is None:
                raise
            self._coordinator = successor
            return call_patiently(successor, ask, timeout_s, what)

    def stop(self) -> None:
        """End the feed and free what it used; trials that wait get a `FeedFailedError`. May be called twice."""
        _served.pop(self.name, None)
        # The second time its name may be that of another program's feed.
        if self._is_stopped or not ray.is_initialized() or runtime.lost_cluster():
            return
        self._is_stopped = True
        coordinator = runtime.find_coordinator(self.name)  # not the one that was known: it may have been served again
        if coordinator is None:
            recovery.forget(self.name)  # its program died: loaders wait for another one, which will not come
            return
        # It is asked first, so that those who wait hear why; it is killed in any case, because it may hang.
        with contextlib.suppress(MbaasError):
            call(coordinator.stop.remote(), CALL_TIMEOUT_S, f"stopping feed {self.name!r}")
        ray.kill(coordinator)
        runtime.end_children(self.name)  # after it, or it would start them again
        recovery.forget(self.name)  # again: it may have hung

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Feed({self.name!r})"


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
    staging_bytes: int | str | None = None,
    prep_workers: int | None = None,
    engine: Literal["auto", "cpu", "dali"] = "auto",
    gpus_per_worker: float | None = None,
    drop_last: bool = False,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    detached: bool = False,
    timeouts: Timeouts = Timeouts(),
    disk: Disk | None = None,
    scaling: Scaling = Scaling(),
    lending: Lending = Lending(),
    threads: Threads = Threads(),
    staging: Staging = Staging(),
) -> Feed:
    """Start a feed: prep workers that make each minibatch once for all consumers.

    Args:
        name: under which consumers `join` it.
        dataset: which samples there are.
        pipeline: what to do to each.
        batch_size: samples in a minibatch; consumers may ask for another size.
        seed: order and random transforms follow from it, 0 to 2**63 - 1.
        shuffle: give each epoch an order of its own; False, for validation: all have the dataset's order. If nothing in
            the pipeline is random either, and all minibatches of an epoch fit ``staging_bytes``, each is prepared once
            for all epochs and trials, and no trial waits for another.
        cache_bytes: memory for raw samples on each node, in bytes or as "2 GiB"; default: the dataset. On a node with
            a small object store it is as much as fits there.
        staging_bytes: memory for prepared minibatches; default: 15 % of the object store, at most 1 GiB.
        prep_workers: actors that prepare, one CPU each; default: half of the CPUs that other feeds have left, one of
            which is kept for a trial. Where that is less than one CPU, a worker that reserves as much. With dali at
            most one worker for each GPU.
        engine: "cpu", "dali", or "auto": dali where there is a GPU and the pipeline can run on it, else cpu.
        gpus_per_worker: GPU share that each worker of the dali engine reserves; 0 runs it on the CPU; default: it works
            on a GPU of which it reserves nothing, so that trials can have whole ones.
        drop_last: leave out the samples at the end of an epoch that do not fill a minibatch.
        on_bad_sample: "raise": consumers get an error that names the file; "skip": leave it out, count and list it.
        detached: outlive this program and its Ray job: the feed ends with `mbaas.stop` or with the cluster, which must
            have been started by somebody else.
        timeouts: how long a feed waits for consumers, for workers and for storage.
        disk: local disks of the nodes, for raw samples that memory has no room for; default: none.
        scaling: how many prep workers there are beyond the reserved ones, where they run, and when their number
            changes.
        lending: when idle prep workers work for other feeds of the cluster that need them more.
        threads: threads of a node, and when they move between preparing samples and reading storage.
        staging: what is fetched and prepared ahead of need, and by how many coordinators it is handed out.

    Raises:
        ConfigError: an option that there is not, or that cannot work.
        FeedExistsError: a feed of that name runs already. One whose program ended does not count: what is left of it is
            ended first. Unless it was stopped, its epochs are not begun again on this cluster by a feed of the same
            name, dataset, pipeline, seed and order.
        ResourceError: the cluster cannot give the CPUs, at the latest after 30 s; or what is left of an earlier feed of
            that name does not end; or the feed is to be detached and
            there is no cluster that outlives this program.
        BadSampleError: no sample could be prepared.
    """
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "cache_bytes": cache_bytes,
        "staging_bytes": staging_bytes,
        "prep_workers": prep_workers,
        "engine": engine,
        "gpus_per_worker": gpus_per_worker,
        "drop_last": drop_last,
        "on_bad_sample": on_bad_sample,
        "detached": detached,
        "timeouts": timeouts,
        "disk": disk,
        "scaling": scaling,
        "lending": lending,
        "threads": threads,
        "staging": staging,
    }
    asked = FeedOptions(**given)
    _check_types(dataset, pipeline)
    # What can be refused without a cluster was refused above: nobody should wait for Ray to learn of a typing error.
    if detached:
        ensure_lasting_ray()
    else:
        runtime.ensure_ray(start=True)
    runtime.say_joined()
    if not runtime.clear_leftovers(name):
        raise FeedExistsError(f"a feed {name!r} runs already; stop it with mbaas.stop({name!r}) or take another name")
    gpus, claims = runtime.gpus(), _claims()
    earlier = tuple(claim.memory for claim in claims)
    chosen = resolve_engine(engine, pipeline, gpus=gpus)  # raises here what the coordinator would in another process
    cache, staged = memory_budgets(
        cache_bytes=asked.cache_bytes,
        staging_bytes=asked.staging_bytes,
        dataset_bytes=dataset.total_bytes,
        stores=runtime.store_bytes(with_cpus=True).values(),
        smallest_store=min(runtime.store_bytes().values(), default=0),
        earlier=earlier,
    )
    resources = _prep_resources(asked, claims, gpus if chosen == "dali" and gpus else None)
    filled_in: dict[str, Any] = {
        "cache_bytes": cache,
        "staging_bytes": staged,
        "prep_workers": resources.workers,
        "cpus_per_worker": resources.cpus_per_worker,
        "gpus_per_worker": 0.0 if gpus_per_worker is None and not gpus else gpus_per_worker,
        "earlier": earlier,
    }
    settings = FeedSettings(name=name, **{**given, **filled_in})
    runtime.check_cpus(name, settings.prep_workers)
    return _started_where_the_name_is_free(settings, dataset, pipeline, gpus)


def _started_where_the_name_is_free(settings: FeedSettings, dataset: Dataset, pipeline: Pipeline, gpus: int) -> Feed:
    """Start a feed; while Ray still holds a name that it needs, clear what is left and start it again.

    Raises:
        FeedExistsError: another program was faster.
        ActorAlreadyExistsError: Ray holds the name for too long.
    """

    def clear(_: RetryCallState) -> None:
        if not runtime.clear_leftovers(settings.name):
            raise FeedExistsError(f"a feed {settings.name!r} was served by another program at the same time")

    patiently = Retrying(
        retry=retry_if_exception_type(ray.exceptions.ActorAlreadyExistsError),
        stop=stop_after_attempt(_START_TRIES),
        before_sleep=clear,  # which waits until it is done: there is no pause beside it
        reraise=True,
    )
    return patiently(_start, settings, dataset, pipeline, gpus)


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


def _start(settings: FeedSettings, dataset: Dataset, pipeline: Pipeline, gpus: int) -> Feed:
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
    coordinator = Coordinator.options(**options).remote(settings, pipeline, gpus)  # type: ignore[attr-defined]
    # Storage that errs just now may be asked for a first sample for so long.
    timeout_s = _CALL_S + settings.timeouts.storage_s
    try:
        call(coordinator.start.remote(dataset), timeout_s, f"starting feed {settings.name!r}")
    except BaseException:  # Ctrl-C, too: Ray would leave the coordinator and its detached actors behind
        ray.kill(coordinator)
        runtime.end_children(settings.name)
        raise
    if not detached:
        _served[settings.name] = coordinator
    return Feed(settings.name, coordinator)


def _check_types(dataset: object, pipeline: object) -> None:
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"dataset must be an mbaas Dataset, as mbaas.read_images returns it, got {type(dataset).__name__}"
        )
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"pipeline must be an mbaas.transforms.Pipeline, got {type(pipeline).__name__}")


def _claims() -> list[Claims]:
    """Ask what each of the feeds that run already keeps for itself."""
    claims = []
    for name in runtime.feed_names():
        coordinator = runtime.find_coordinator(name)
        if coordinator is None:
            continue  # it has ended since its name was listed
        with contextlib.suppress(FeedFailedError):  # or ends now: its program died
            what = f"what feed {name!r} keeps of the cluster"
            claims.append(call_patiently(coordinator, coordinator.claims.remote, CALL_TIMEOUT_S, what))
    return claims


def _prep_resources(asked: FeedOptions, claims: list[Claims], gpus: int | None) -> PrepResources:
    """Return the prep workers that a feed begins with: as many as the user said, or what leaves room for trials."""
    if asked.prep_workers is not None:
        return PrepResources(asked.prep_workers)
    resources = default_prep(cpus=runtime.cpus(), claimed_cpus=sum(claim.cpus for claim in claims), gpus=gpus)
    most = asked.scaling.max_prep_workers
    return resources if most is None else replace(resources, workers=min(resources.workers, most))


def connect(name: str) -> Feed:
    """Find a feed that runs on this cluster.

    Raises:
        FeedNotFoundError: there is none of that name; the message lists those that run.
    """
    runtime.ensure_ray(start=False)
    coordinator = runtime.find_coordinator(name)
    if coordinator is None:
        running = ", ".join(map(repr, runtime.feed_names())) or "none"
        raise FeedNotFoundError(f"no feed {name!r} runs on this cluster; running: {running}")
    return Feed(name, coordinator)


def join(
    name: str,
    consumer: str | None = None,
    *,
    batch_size: int | None = None,
    format: str = "torch",
    device: Any = None,
    start: JoinStart = "epoch",
    state: dict[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    wait_timeout_s: float = 300.0,
) -> Loader:
    """Become a consumer of a feed, from any process of the Ray cluster.

    Args:
        name: the name of the feed.
        consumer: this consumer's name, unique among the feed's; default: host and process id.
        batch_size: samples in a minibatch (over all ranks); default: the feed's.
        format: "torch" (private tensors) or "numpy" (read-only arrays, no copy).
        device: torch device to which minibatches are copied.
        start: "epoch" begins with the next epoch that others begin, and waits for it. "now" begins at once, in the
            middle of their epoch if need be, and still gets each sample once in each of its own epochs: while somebody
            is out of phase, epochs are shuffled within the segments that its beginning cuts (`mbaas.order.Shuffle`).
            In a feed with several lanes it is "epoch".
        state: what `Loader.state_dict` returned: begin exactly there, as after `Loader.load_state_dict`, but without
            joining elsewhere first, for which minibatches would be prepared that nobody uses. None for no state.
        rank, world_size: of a data-parallel trial: each rank gets its part of every minibatch (see `Loader`). All give
            the same ``consumer`` and ``world_size``; rank r is then listed as ``consumer[r]``. An epoch begins when all
            have joined.
        wait_timeout_s: a wait in which the feed makes no progress ends with an error after so long. So does the wait
            for a feed that was not stopped, but whose program is gone, to be served again.

    Raises:
        ConfigError, FeedNotFoundError, FeedFailedError; StateError: ``state`` is none of this feed.
    """
    rank, world_size = _checked_rank(rank, world_size)
    if world_size > 1 and consumer is None:
        raise ConfigError(
            "the ranks of a trial find each other by their consumer's name, which must be the same for all "
            f"{world_size}, got consumer=None for rank {rank}"
        )
    if start not in get_args(JoinStart):
        raise ConfigError(f'start must be "epoch" or "now", got {shown(start)}')
    if start == "now" and world_size > 1:
        raise ConfigError(f'start must be "epoch" for ranks, which begin together, got "now" for {world_size} ranks')
    own = calls.name(consumer if consumer is not None else f"{socket.gethostname()}:{os.getpid()}")
    calls.number("wait_timeout_s", wait_timeout_s)
    feed = connect(name)
    return Loader(
        feed._coordinator,
        ConsumerName(own, rank, world_size),
        find=partial(_successor, name),
        batch_size=batch_size,
        format=format,
        device=device,
        start=start,
        wait_timeout_s=wait_timeout_s,
        state=state,
    )


def _successor(feed: str, error: FeedGoneError) -> Any | None:
    """Find the coordinator of a feed whose coordinator was gone; None if there is none yet.

    Raises:
        FeedFailedError: nobody will serve it again, because it was stopped.
        FeedGoneError: nor because its cluster has ended.
    """
    if lost := runtime.lost_cluster():
        raise FeedGoneError(f"feed {feed!r} ended: {lost}") from error
    coordinator = runtime.find_coordinator(feed)
    if coordinator is None and not recovery.is_kept(feed):
        raise FeedFailedError(f"feed {feed!r} was stopped") from error
    return coordinator


def _checked_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the world size; 0 and 1 where neither is given."""
    if rank is None and world_size is None:
        return 0, 1
    if type(rank) is not int or type(world_size) is not int:
        raise ConfigError(
            f"rank and world_size must both be whole numbers, or both be left out, got rank={rank!r} and "
            f"world_size={world_size!r}"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, world_size - 1], world_size was {world_size} and rank was {rank}")
    return rank, world_size


def stop(name: str) -> None:
    """End a feed by name.

    Raises:
        FeedNotFoundError: there is none of that name.
    """
    connect(name).stop()
