"""What a feed is, as plain frozen values that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbaas.allocation.lending import LendingSettings
from mbaas.allocation.scaling import ScalingSettings
from mbaas.allocation.tuning import TuningSettings
from mbaas.errors import ConfigError
from mbaas.order import check_seed

ENGINES = ("auto", "cpu", "dali")
ON_BAD_SAMPLE = ("raise", "skip")

MOST_FETCH_THREADS = 256
"""A node reads storage with at most so many threads; connections are what a client of an object store opens at most."""


@dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """Options of `mbaas.serve` after defaults were filled in.

    Attributes:
        name: of the feed; unique on the cluster.
        batch_size: samples in a minibatch, unless a consumer asks for another size.
        seed: order and random transforms follow from it.
        cache_bytes: memory for raw samples, on each node.
        disk_path: a folder on a local disk of each node, for raw samples that memory has no room for; what it holds is
            there again after a restart. None: no disk is used.
        disk_bytes: that may be kept there, on each node.
        staging_bytes: memory for prepared minibatches.
        prep_workers: actors that prepare; each reserves one CPU.
        engine: "auto", "cpu" or "dali".
        gpus_per_worker: GPUs, or a fraction, that each worker of the dali engine reserves; 0 runs it on the CPU.
        threads: threads of each worker's engine, at most; fetch may get some of them.
        fetch_threads: threads that read storage on each node, at most; it begins with 8 and has more where that was
            measured to help.
        tuning: when threads of a node move between fetch and prep.
        drop_last: leave out the samples of an epoch that do not fill a minibatch.
        on_bad_sample: "raise" or "skip".
        max_prep_workers: so many may run when trials stall on prep and more would help; None: never more than
            ``prep_workers``, which are reserved.
        prep_labels: labels of the nodes on which workers may run, such as {"zone": "a"}; none: on nodes with the label
            mbaas.io/role=prep, and on others if these are full.
        scaling: when the number of workers changes.
        lending: when workers go to other feeds of the cluster that have more need of them.
        ahead_blocks: how far prep runs ahead of the slowest consumer, in blocks; None: enough to keep the workers
            busy.
        lanes: coordinators among which blocks are dealt out, each with its part of ``staging_bytes``; more than one
            helps where one cannot keep up with the calls of all trials, at about a thousand deliveries a second.
        readahead_bytes: raw bytes read ahead of prep, at most; less where the measured rates say that less is enough.
            None: enough for the blocks that are being made.
        lease_s, reservation_s, patience_s, prep_timeout_s: see `mbaas.core.layout.StagingLimits`; with several lanes a
            worker may have a block of each in hand, and ``prep_timeout_s`` counts once for each.
    """

    name: str
    batch_size: int
    seed: int = 0
    cache_bytes: int
    staging_bytes: int
    prep_workers: int
    engine: str = "auto"
    gpus_per_worker: float = 0.0
    threads: int = 1
    fetch_threads: int = 32
    tuning: TuningSettings = field(default_factory=TuningSettings)
    drop_last: bool = False
    on_bad_sample: str = "raise"
    disk_path: str | None = None
    disk_bytes: int = 0
    max_prep_workers: int | None = None
    prep_labels: Mapping[str, str] = field(default_factory=dict)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    lending: LendingSettings = field(default_factory=LendingSettings)
    ahead_blocks: int | None = None
    lanes: int = 1
    readahead_bytes: int | None = None
    lease_s: float = 30.0
    reservation_s: float = 20.0
    patience_s: float = 30.0
    prep_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not self.name or "/" in self.name or self.name != self.name.strip():
            raise ConfigError(f"a feed's name must be non-empty, without slashes and outer spaces, got {self.name!r}")
        _at_least("batch_size", self.batch_size, 1)
        _at_least("prep_workers", self.prep_workers, 1)
        _at_least("threads", self.threads, 1)
        _at_least("fetch_threads", self.fetch_threads, 1)
        if self.fetch_threads > MOST_FETCH_THREADS:
            raise ConfigError(f"fetch_threads must be at most {MOST_FETCH_THREADS}, got {self.fetch_threads}")
        _at_least("cache_bytes", self.cache_bytes, 0)
        _at_least("staging_bytes", self.staging_bytes, 1)
        _at_least("disk_bytes", self.disk_bytes, 0)
        if (self.disk_path is None) != (self.disk_bytes == 0):
            raise ConfigError(
                f"disk_path and disk_bytes need each other, got {self.disk_path!r} and {self.disk_bytes} bytes"
            )
        _one_of("engine", self.engine, ENGINES)
        _one_of("on_bad_sample", self.on_bad_sample, ON_BAD_SAMPLE)
        if self.max_prep_workers is not None:
            _at_least("max_prep_workers", self.max_prep_workers, self.prep_workers)
        if self.ahead_blocks is not None:
            _at_least("ahead_blocks", self.ahead_blocks, 1)
        _at_least("lanes", self.lanes, 1)
        if self.readahead_bytes is not None:
            _at_least("readahead_bytes", self.readahead_bytes, 0)
        for name in ("lease_s", "reservation_s", "patience_s", "prep_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.gpus_per_worker < 0:
            raise ConfigError(f"gpus_per_worker must be 0 or more, got {self.gpus_per_worker}")


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
