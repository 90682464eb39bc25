"""The options of a feed, each defined once: name, type, default, bounds, unit and description.

`mbaas.serve` and its help, the file of `mbaas serve`, its JSON schema and the code inside a feed all read them here: a
new option is a new field. `FeedOptions` has the common options as fields; the others are grouped in `Timeouts`, `Disk`,
`Scaling`, `Lending`, `Threads` and `Staging`. All classes are frozen, validate themselves, and raise `ConfigError` with
both values. Sizes may be strings such as "2 GiB", times such as "2 min".
"""

from __future__ import annotations

import os
from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from mbaas.base import units
from mbaas.base.validation import Checked, OneOrMore, option, options
from mbaas.errors import ConfigError, shown
from mbaas.memory.budgets import MemoryClaim
from mbaas.samples.order import MOST_SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mbaas.base.validation import Accepts

    # Type checkers accept strings with units, and read numbers.
    Bytes = Accepts[int, int | str]
    BytesOrNone = Accepts[int | None, int | str | None]
    SomeBytesOrNone = BytesOrNone
    Seconds = Accepts[float, float | str]
else:
    Bytes, Seconds = units.Bytes, units.Seconds
    BytesOrNone = Bytes | None
    SomeBytesOrNone = Annotated[Bytes, Ge(1)] | None

AtLeast1 = Annotated[int, Ge(1)]
Above0S = Annotated[Seconds, Gt(0)]
FromZeroS = Annotated[Seconds, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
"""A fraction of a time, above 0."""

FETCH_THREADS = 32
"""Threads that read storage on a node. They mostly wait for storage, and take little CPU time meanwhile."""

MOST_FETCH_THREADS = 256
"""Upper bound on the threads that read storage on a node. The object store client opens no more connections."""


@options(within="timeouts")
class Timeouts:
    """Time limits for consumers, prep workers and storage."""

    lease_s: Above0S = option(default=30.0)
    """Time without a heartbeat after which a consumer counts as dead and is removed."""

    reservation_s: Above0S = option(default=20.0)
    """Time that the start of an epoch waits for an announced trial, until arrivals have been measured. Then the wait is
    twice the longest recent one; if that exceeds both ``reservation_s`` and the prep time of an epoch, the epoch starts
    at once. A consumer that joined at its own block also has this long for its first request."""

    patience_s: Above0S = option(default=30.0)
    """Time that other consumers wait for one that stalls in the middle of an epoch. After that it continues in a cohort
    of its own."""

    prep_s: Above0S = option(default=120.0)
    """Time limit for one block or for the first sample; a worker that exceeds it is replaced."""

    storage_s: FromZeroS = option(default=120.0)
    """Time during which a sample is requested again after a transient storage error before it counts as bad; 0: it is
    bad at once."""


def _as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


@options(within="disk")
class Disk:
    """A disk of each node, for samples that do not fit in memory. Its contents survive a restart."""

    path: Annotated[str, Checked(_as_text, first=True)]
    """A folder, under the same path on each node; it is created if it is missing."""

    max_bytes: Annotated[Bytes, Ge(1)]
    """Bytes that may be stored there: on each node, or in a shared folder in total."""

    shared: bool = False
    """The path is one folder for all nodes, for example on NFS, and other feeds may use it at the same time with
    ``shared=True``. Each finds the samples that the others have stored. It stores no decoded samples."""


if TYPE_CHECKING:
    Disks = Accepts[tuple[Disk, ...], Disk | Sequence[Disk] | None]
else:
    Disks = Annotated[tuple[Disk, ...], OneOrMore()]


@options(within="scaling")
class Scaling:
    """Limits, nodes and thresholds for prep workers beyond the reserved ones."""

    max_prep_workers: AtLeast1 | None = None
    """Upper bound on running workers, reached only while trials stall on prep and more workers would help. Default:
    ``prep_workers``."""

    prep_labels: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes for workers, such as {"zone": "a"}. Default: nodes with the label
    mbaas.io/role=prep first, and others if these are full."""

    stall_high: Share = 0.10
    """Trials count as stalled on prep when they spend at least this fraction of their time waiting for it ..."""

    stall_low: Share = 0.03
    """... until the fraction falls below this value."""

    idle_high: Share = 0.30
    """Workers count as idle when at least this fraction of all wanted workers' time is idle ..."""

    idle_low: Share = 0.15
    """... until the fraction falls below this value."""

    grow_hold_s: FromZeroS = option(default=15.0)
    """Time that trials must be stalled before workers are requested."""

    idle_hold_s: FromZeroS = option(default=300.0)
    """Time that workers must be idle before they are retired; longer than the pauses of an intermittent load."""

    cooldown_s: FromZeroS = option(default=60.0)
    """Pause after every change: the time until a new worker shows up in the stalls."""

    def __post_init__(self) -> None:
        for name, low, high in (("stall", self.stall_low, self.stall_high), ("idle", self.idle_low, self.idle_high)):
            if not low < high:
                raise ConfigError(
                    f"scaling.{name}_low must be below scaling.{name}_high, got {low} and {high}", option=f"{name}_low"
                )


@options(within="lending")
class Lending:
    """Sharing of idle prep workers with other feeds of the cluster."""

    enabled: bool = True
    """Lend and borrow workers."""

    hold_s: FromZeroS = option(default=3.0)
    """Time that one feed must have a worker too many, and another one too few, before a worker moves."""

    pause_s: FromZeroS = option(default=2.0)
    """Time between two moves of a feed."""

    min_workers: AtLeast1 = 1
    """Workers that this feed does not lend, even if they are idle."""

    max_borrowed: Annotated[int, Ge(0)] | None = None
    """Upper bound on the workers that this feed borrows at a time. Default: as many as it can use."""

    weight: Annotated[float, Gt(0), Le(1000)] = 1.0
    """Priority among feeds that lack workers when idle ones do not suffice: with weight 2, each worker that this feed
    lacks counts twice."""


@options(within="threads")
class Threads:
    """Threads of a node that prepare samples and read storage."""

    prep: AtLeast1 = 1
    """Threads of each prep worker's engine."""

    fetch: Annotated[int, Ge(1), Le(MOST_FETCH_THREADS)] = FETCH_THREADS
    """Threads that read storage on each node. Where reads come from memory, one of them reads."""


@options(within="staging")
class Staging:
    """Limits on fetching and preparing ahead."""

    ahead_blocks: AtLeast1 | None = None
    """Blocks prepared ahead of the fastest consumer. Slower ones may lag while ``staging_bytes`` has room. Default:
    enough to keep the workers busy."""

    readahead_bytes: BytesOrNone = option(default=None)
    """Upper bound on the raw bytes that each node reads ahead of prep; measured rates may lower it. Default: enough for
    the blocks in preparation."""


def check_feed_name(name: object) -> str:
    """Return ``name`` if it is valid as the name of a feed.

    Raises:
        ConfigError: the name is not a string, is empty, or contains a slash or outer spaces.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a feed's name must be text, got {shown(name)}")
    if not name or "/" in name or name != name.strip():
        raise ConfigError(f"a feed's name must be non-empty, without slashes and outer spaces, got {name!r}")
    return name


FeedName = Annotated[str, Checked(check_feed_name, says={"minLength": 1, "not": {"pattern": r"/|^\s|\s$"}})]


@options()
class FeedOptions:
    """Options of a feed, without its name, dataset and pipeline."""

    batch_size: AtLeast1
    """Samples in a minibatch; a consumer may choose another size."""

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    """Determines the order and the random transforms; 0 to 2**63 - 1."""

    shuffle: bool = True
    """Shuffle each epoch differently. False, for validation, keeps the order of the dataset in every epoch. If the
    pipeline is deterministic too and an epoch fits ``staging_bytes``, minibatches are prepared once for all epochs and
    trials, and trials do not wait for each other."""

    cache_bytes: BytesOrNone = option(default=None)
    """Memory for samples on each node. Default: the size of the dataset, or with ``cache_decoded`` the measured size of
    its decoded samples, up to half of the free memory. A node with a small object store gets what fits there."""

    cache_decoded: bool = True
    """Cache samples after the deterministic prefix of the pipeline (for example decoded images) where measurements show
    that this saves more time per byte than caching encoded samples. Minibatches are the same either way."""

    staging_bytes: SomeBytesOrNone = option(default=None)
    """Memory for prepared minibatches. Default: 256 MiB for each prep worker plus 384 MiB, at least 1 GiB, and at most
    15 % of the smallest object store."""

    prep_workers: AtLeast1 | None = None
    """Prep workers, which reserve one CPU each. Default for the cpu engine: half of the CPUs that other feeds left, not
    counting one for a trial; if that is less than one CPU, a single worker that reserves the fraction. Default for
    dali: 2 per GPU (4 for audio, which is decoded on CPUs), at most half of the CPUs of nodes with GPUs. With
    ``dali_share`` below 1, these workers divide that half and run one thread per CPU."""

    engine: Literal["auto", "cpu", "dali"] = "auto"
    """Engine that prepares samples: "cpu", "dali", or "auto". If the cluster has a GPU and DALI supports the pipeline,
    "auto" measures both on some samples before the feed starts. The feed keeps its engine for its whole life."""

    step_per_s: Annotated[float, Gt(0)] | None = None
    """Samples/s that one trial's training step takes on its own GPU without prep there, as `mbaas analyze` measures it.
    If given, ``engine="auto"`` also counts what prep on that GPU takes from the step."""

    gpus_per_worker: Annotated[float, Ge(0)] | None = None
    """GPUs, or a fraction of one, that each dali worker reserves; 0 runs dali on the CPU. Default: workers use a GPU
    without reserving it, so that trials can have whole GPUs."""

    dali_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the images that the dali engine prepares with DALI; its workers prepare the others on their CPUs at
    the same time. A given fraction always selects the same images, so minibatches do not change between runs."""

    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a minibatch."""

    on_bad_sample: Literal["raise", "skip"] = "raise"
    """Handling of a sample that cannot be prepared: "raise" gives consumers an error with the name of the file, "skip"
    leaves the sample out, counts it and lists it. A file larger than 1 GiB, or than 30 % of the smallest object store
    of a node that prepares, is also bad."""

    cpu_price_per_h: Annotated[float, Ge(0)] | None = None
    """Price of one CPU-hour, in any currency. If it is set, loading costs are also reported in money."""

    detached: bool = False
    """Keep the feed running after the program that serves it, and its Ray job, have ended. It ends with `mbaas.stop`,
    or with the cluster, which must have been started by another program."""

    timeouts: Timeouts = Timeouts()
    disk: Disks = option(default=())
    """Disks for samples that do not fit in memory: one or several. The fastest by measurement is filled first. Default:
    none."""
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
    """Options of a feed with all defaults filled in."""

    name: FeedName
    """Unique on the cluster."""

    cache_bytes: Bytes
    """Upper bound on any node; a node with a small object store gets less."""

    sizes_cache: bool = False
    """`cache_bytes` is a default, to be lowered to the measured size of the samples."""

    staging_bytes: Annotated[Bytes, Ge(1)]
    prep_workers: AtLeast1
    cpus_per_worker: Annotated[float, Ge(0)] = 1.0
    """CPUs that each prep worker reserves: 1; a fraction where a whole CPU would leave none to trials; more where a few
    GPU workers also prepare on CPUs."""

    earlier: tuple[MemoryClaim, ...] = ()
    """Memory claims of the feeds that were already running, on each node."""

    @property
    def undecoded_share(self) -> float:
        """Fraction of the samples that are never cached decoded: DALI's share, if the cpu engine prepares the
        others.
        """
        return self.dali_share if self.dali_share < 1 else 0.0

    @property
    def memory(self) -> MemoryClaim:
        """Upper bound on this feed's share of each node's memory."""
        return MemoryClaim(self.cache_bytes, self.staging_bytes)


GROUPS: dict[str, type] = {
    "timeouts": Timeouts,
    "disk": Disk,
    "scaling": Scaling,
    "lending": Lending,
    "threads": Threads,
    "staging": Staging,
}
"""Classes of the grouped options, by the name of their field."""

_GROUPED = [(group, each.name) for group, kind in GROUPS.items() for each in fields(kind)]

GROUPED = {name: tuple(f"{group}.{name}" for group, each in _GROUPED if each == name) for _, name in _GROUPED}
"""Options that belong to a group, by their name without it: "lease_s" -> ("timeouts.lease_s",)."""


def in_python(option: str) -> str:
    """Return an option as Python code: "timeouts=mbaas.Timeouts(lease_s=...)" for "timeouts.lease_s"."""
    group, _, name = option.partition(".")
    return f"{group}=mbaas.{group.title()}({name}=...)"
