"""The options of a feed, each once: its name, type, default, bounds, unit and meaning.

`mbaas.serve`, the file of `mbaas serve`, its JSON schema and the code inside a feed all read them here. Those that
most people need are fields of `FeedOptions`; the others are in groups by what they are about: `Timeouts`, `Disk`,
`Scaling`, `Lending`, `Threads`, `Staging`. All are frozen, check themselves, and raise `ConfigError` with both values.
Sizes may be texts such as "2 GiB", times such as "2 min".
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import field, fields
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from annotated_types import Ge, Gt, Le

from mbaas import validation
from mbaas.budgets import MemoryClaim, cache_budget, staging_room
from mbaas.errors import ConfigError, shown
from mbaas.order import MOST_SEED
from mbaas.units import Bytes, Seconds
from mbaas.validation import Checked, options

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

AtLeast1 = Annotated[int, Ge(1)]
Above0S = Annotated[Seconds, Gt(0)]
FromZeroS = Annotated[Seconds, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
"""A part of a time, above 0."""

FIRST_FETCH_THREADS = 8
"""The threads with which a node begins to read storage, if it may have as many."""

MOST_FETCH_THREADS = 256
"""The most threads with which a node reads storage. The client of an object store opens no more connections."""


@options(within="timeouts")
class Timeouts:
    """How long a feed waits for consumers, for workers and for storage."""

    lease_s: Above0S = 30.0
    """After this long without a sign of life a consumer counts as dead and is removed."""

    reservation_s: Above0S = 20.0
    """How long an epoch's start is held for a trial that was announced, until it was measured how long trials take to
    come; then it is held as long as they need, at most this long or for the time that prep takes for an epoch. A
    consumer that joined at a block of its own, or in a feed of several lanes, and asks for nothing, is waited for as
    long.
    """

    patience_s: Above0S = 30.0
    """How long all others wait for a consumer that stands still in the middle of an epoch. After that it goes on by
    itself, in a cohort of its own.
    """

    prep_s: Above0S = 120.0
    """A worker that takes longer for one block of minibatches is replaced, and so is one for its first sample. With
    several lanes a worker may have a block of each in hand, and this counts once for each."""

    storage_s: FromZeroS = 120.0
    """How long a sample that storage does not give, for a reason that may pass, is asked for again before it counts as
    bad; 0: it is bad at once."""


def _as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


@options(within="disk")
class Disk:
    """Local disks of the nodes, for samples that memory has no room for. What they hold survives a restart."""

    path: Annotated[str, Checked(_as_text, first=True)]
    """A folder, the same on each node; it is made where it is missing."""

    max_bytes: Annotated[Bytes, Ge(1)]
    """What may be kept there, on each node."""


@options(within="scaling")
class Scaling:
    """How many prep workers there are beyond the reserved ones, where they run, and when their number changes."""

    max_prep_workers: AtLeast1 | None = None
    """The most workers that may run while trials stall on prep and more would help; default: ``prep_workers``."""

    prep_labels: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes on which workers may run, such as {"zone": "a"}; default: nodes with the label
    mbaas.io/role=prep first, and others if these are full."""

    stall_high: Share = 0.10
    """Trials stall on prep from this share of their time on ..."""

    stall_low: Share = 0.03
    """... until it falls below this one."""

    idle_high: Share = 0.30
    """Workers are idle from this share of the time of all that are wanted on ..."""

    idle_low: Share = 0.15
    """... until it falls below this one."""

    grow_hold_s: FromZeroS = 15.0
    """How long trials must stall before workers are asked for."""

    idle_hold_s: FromZeroS = 300.0
    """How long workers must idle before they are retired: longer than a load that comes and goes."""

    cooldown_s: FromZeroS = 60.0
    """Pause after every change: as long as a new worker needs to show in the stalls."""

    def __post_init__(self) -> None:
        for name, low, high in (("stall", self.stall_low, self.stall_high), ("idle", self.idle_low, self.idle_high)):
            if not low < high:
                raise ConfigError(
                    f"scaling.{name}_low must be below scaling.{name}_high, got {low} and {high}", option=f"{name}_low"
                )


@options(within="lending")
class Lending:
    """When idle prep workers work for other feeds of the cluster that need them more."""

    enabled: bool = True
    """Whether the feed lends and borrows at all."""

    hold_s: FromZeroS = 3.0
    """How long a feed must have a worker too many, and another one too few, before it moves."""

    pause_s: FromZeroS = 2.0
    """Time between two moves of a feed."""


@options(within="threads")
class Threads:
    """Threads of a node, and when they move between preparing samples and reading storage."""

    prep: AtLeast1 = 1
    """Threads of each prep worker's engine, at most: fetch may get some of them."""

    fetch: Annotated[int, Ge(1), Le(MOST_FETCH_THREADS)] = 32
    """Threads that read storage on each node, at most: it begins with 8 and has more if that was measured to help."""

    tuned: bool = True
    """Whether threads move at all."""

    window_s: Above0S = 4.0
    """The time over which rates are measured, after each change anew."""

    hold_s: Above0S = 3.0
    """How long a change must be worth while before it is made."""

    @property
    def first_fetch(self) -> int:
        """Threads that read storage on a node before anything is measured."""
        return min(FIRST_FETCH_THREADS, self.fetch)


@options(within="staging")
class Staging:
    """What is fetched and prepared ahead of need, and by how many coordinators it is handed out."""

    ahead_blocks: AtLeast1 | None = None
    """How far prep runs ahead of the furthest consumer, in blocks; default: enough to keep the workers busy. Slower
    ones may be behind that one as long as ``staging_bytes`` has room for the blocks between them."""

    readahead_bytes: Bytes | None = None
    """Raw bytes read ahead of prep, at most; less where the measured rates say that less is enough. Default: enough
    for the blocks that are being made."""

    lanes: AtLeast1 = 1
    """Coordinators among which blocks are dealt out, each with its part of ``staging_bytes``. More than one helps where
    one cannot keep up with the calls of all trials. Minibatches stay the same.
    """


def check_feed_name(name: object) -> str:
    """Check and return the name of a feed.

    Raises:
        ConfigError: no feed can have it.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a feed's name must be text, got {shown(name)}")
    if not name or "/" in name or name != name.strip():
        raise ConfigError(f"a feed's name must be non-empty, without slashes and outer spaces, got {name!r}")
    return name


FeedName = Annotated[str, Checked(check_feed_name, says={"minLength": 1, "not": {"pattern": r"/|^\s|\s$"}})]


@options()
class FeedOptions:
    """What users may say about a feed, besides its name, data and pipeline."""

    batch_size: AtLeast1
    """Samples in a minibatch; a consumer may ask for another size."""

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    """Order and random transforms follow from it; 0 to 2**63 - 1."""

    shuffle: bool = True
    """Give each epoch an order of its own; false, for validation: all have the dataset's order. If nothing in the
    pipeline is random either, and all minibatches of an epoch fit ``staging_bytes``, each is prepared once for all
    epochs and trials, and no trial waits for another."""

    cache_bytes: Bytes | None = None
    """Memory for samples, on each node; default: the size of the dataset, or with ``decoded`` that of its decoded
    samples, measured when the feed starts, up to half of the free memory. A node with a small object store gets as
    much as fits there."""

    decoded: bool = True
    """Keep samples decoded in the caches, as they are before the pipeline's first random transform, where measured
    times say that memory saves more so than with the bytes that storage has. Minibatches have the same bytes."""

    staging_bytes: Annotated[Bytes, Ge(1)] | None = None
    """Memory for prepared minibatches; default: 1 GiB, or what all prep workers need to work at the same time, 256 MiB
    each and 384 MiB more, if that is more; at most 15 % of a node's object store.
    """

    prep_workers: AtLeast1 | None = None
    """Actors that prepare, each of which reserves one CPU; default: half of the CPUs that other feeds have left, one of
    which is kept for a trial. Where that is less than one CPU, it is one worker that reserves as much. With dali it is
    at most two workers for each GPU; of sound, which is decoded on CPUs, four; as far as half of the CPUs of nodes with
    GPUs gives that. With a ``dali_share`` below 1 these divide that half among them, and have as many threads as
    CPUs."""

    engine: Literal["auto", "cpu", "dali"] = "auto"
    """What prepares samples: "cpu", "dali", or "auto", which is dali where there is a GPU and the pipeline can run on
    it, else cpu."""

    gpus_per_worker: Annotated[float, Ge(0)] | None = None
    """GPUs, or a fraction, that each worker of the dali engine reserves; 0 runs it on the CPU; default: it works on a
    GPU of which it reserves nothing, so that trials can have whole ones."""

    dali_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the images that the dali engine prepares with DALI; the same workers prepare the others on their CPUs
    meanwhile. Which are which stays so, so that minibatches have the same bytes as long as the share is the same."""

    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a minibatch."""

    on_bad_sample: Literal["raise", "skip"] = "raise"
    """What becomes of a sample that cannot be prepared: "raise" gives consumers an error that names the file, "skip"
    leaves it out, counts it and lists it. A file of more than 1 GiB, or than 30 % of the smallest object store of a
    node that prepares, is bad, too."""

    cpu_price_per_h: Annotated[float, Ge(0)] | None = None
    """Price of a CPU for an hour, in any currency: what loading costs a trial is then told in money, too."""

    detached: bool = False
    """Outlive the program that serves the feed, and its Ray job: it ends with `mbaas.stop`, or with the cluster, which
    must have been started by somebody else."""

    timeouts: Timeouts = Timeouts()
    disk: Disk | None = None
    scaling: Scaling = Scaling()
    lending: Lending = Lending()
    threads: Threads = Threads()
    staging: Staging = Staging()

    def __post_init__(self) -> None:
        most, reserved = self.scaling.max_prep_workers, self.prep_workers
        if most is not None and reserved is not None and most < reserved:
            raise ConfigError(
                f"scaling.max_prep_workers must be at least prep_workers, {reserved}, got {most}", option="scaling"
            )

    def given(self) -> dict[str, Any]:
        """Return the options by name, as keywords of `mbaas.serve`."""
        return {each.name: getattr(self, each.name) for each in fields(FeedOptions)}


@options()
class FeedSettings(FeedOptions):
    """The options of a feed that is to run: all that nobody said is filled in."""

    name: FeedName
    """Unique on the cluster."""

    cache_bytes: Bytes
    """The most on any node; a node with a small object store gets less."""

    sizes_cache: bool = False
    """`cache_bytes` is a default, to be lowered to the measured size of the samples."""

    staging_bytes: Annotated[Bytes, Ge(1)]
    prep_workers: AtLeast1
    cpus_per_worker: Annotated[float, Ge(0)] = 1.0
    """What each prep worker reserves: 1; or a part of a CPU where a whole one would leave none to trials; or more where
    a few workers on GPUs prepare on CPUs, too."""

    earlier: tuple[MemoryClaim, ...] = ()
    """What the feeds that ran already may take of each node's memory."""

    @property
    def undecoded_share(self) -> float:
        """Return the share of the samples of which none is kept decoded: DALI's, if the cpu engine makes others."""
        return self.dali_share if self.dali_share < 1 else 0.0

    @property
    def memory(self) -> MemoryClaim:
        """Return what this feed may take of each node's memory, at most."""
        return MemoryClaim(self.cache_bytes, self.staging_bytes)

    def cache_bytes_on(self, store_bytes: int) -> int:
        """Return the budget of the cache on a node with an object store of ``store_bytes``."""
        return cache_budget(store_bytes, self.memory, self.earlier)

    def staging_room_on(self, store_bytes: int) -> int:
        """Return how much of what is prepared fits a node with an object store of ``store_bytes``."""
        return staging_room(store_bytes, self.earlier)


GROUPED = {
    option.name: f"{group}.{option.name}"
    for group, kind in {
        "timeouts": Timeouts,
        "disk": Disk,
        "scaling": Scaling,
        "lending": Lending,
        "threads": Threads,
        "staging": Staging,
    }.items()
    for option in fields(kind)
}
"""Options that belong to a group, by their name without it: "lease_s" -> "timeouts.lease_s"."""


def known_keywords(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Answer a keyword that a function of options does not take with the one that was meant."""
    # Python's own TypeError would name the keyword too, but not what the option is called now, or which group has it.
    takes = inspect.signature(function).parameters
    known = [name for name, parameter in takes.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    grouped = {name: in_python(option) for name, option in GROUPED.items()}

    @functools.wraps(function)
    def checked(*given: Parameters.args, **named: Parameters.kwargs) -> Returned:
        for name in named:
            if name not in takes:
                hint = validation.instead(name, known, grouped)
                raise ConfigError(f"mbaas.{function.__name__} has no option {name!r}; {hint}")
        return function(*given, **named)

    return checked


def in_python(option: str) -> str:
    """Write an option as Python code: "timeouts=mbaas.Timeouts(lease_s=...)" for "timeouts.lease_s"."""
    group, _, name = option.partition(".")
    return f"{group}=mbaas.{group.title()}({name}=...)"
