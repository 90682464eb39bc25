"""Joins a feed: the options of a consumer, and its stream, which may be the one of a rank of a data-parallel trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from mbaas.calls.client import call_patiently
from mbaas.client.collate import Collate
from mbaas.client.rank_group import RankGroup, RankSession
from mbaas.client.rank_stream import RankStream
from mbaas.client.session import Session
from mbaas.client.sharding import RankSharding
from mbaas.client.stalls import StreamStats
from mbaas.client.stream import Stream
from mbaas.core import calls
from mbaas.errors import ConfigError, shown
from mbaas.messages import ConsumerName, FeedInfo, JoinStart, Start


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Options of a consumer, the same for `mbaas.join` and `tune_integration.get_loader`."""

    batch_size: int | None = None
    """Samples in a global minibatch, which the ranks of a trial divide. Default: the feed's."""

    format: Literal["torch", "numpy"] = "torch"
    """Private tensors ("torch"), or read-only arrays without a copy ("numpy")."""

    device: Any = None
    """Torch device that minibatches are copied to."""

    collate: Collate = "list"
    """Batching of fields whose values differ in length, such as boxes. "list": a list of arrays, one per sample; "pad":
    one array, with shorter values padded with zeros, and their lengths as ``NAME_length`` int64[n]; "packed": all
    values concatenated, and ``NAME_bounds`` int64[n + 1], so that sample i has the values from bounds[i] to bounds[i +
    1]. Padded images of different sizes have zeros to the right and below, and ``image_size`` int64[n, 2]. Packed
    images are pixels [total, 3], also with ``image_size``. Masks are batched like their images."""

    start: JoinStart | None = None
    """"epoch" waits for the next epoch that other consumers begin. "now" begins immediately, in the middle of their
    epoch if necessary, and each of its own epochs still contains every sample once. While any consumer is out of phase,
    epochs are shuffled within the segments defined by its starting position (`mbaas.order.Shuffle`). Ranks
    always use "epoch". Default: "epoch", and "now" for `tune_integration.get_loader`."""

    state: dict[str, Any] | None = None
    """A result of `mbaas.Loader.state_dict` to resume from. The same as `mbaas.Loader.load_state_dict`, but without
    preparing minibatches at another position first. None: no state."""

    rank: int | None = None
    """Rank in a data-parallel trial: each rank gets its part of every minibatch (see `mbaas.Loader`), and is listed as
    ``consumer[rank]``. All ranks pass the same ``consumer`` and ``world_size``. An epoch begins when all have joined.
    Default: a single consumer; in a Ray Train worker, `tune_integration.get_loader` uses the worker's rank."""

    world_size: int | None = None
    """Number of ranks of the trial."""

    wait_timeout_s: float = 300.0
    """Time limit for a wait without progress of the feed, and for the restart of a feed whose program died without
    stopping it."""

    def __post_init__(self) -> None:
        # Without pydantic, because each trial runs this.
        rank, world_size = self.ranks
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, world_size - 1], world_size was {world_size} and rank was {rank}")
        if self.start is not None and self.start not in get_args(JoinStart):
            raise ConfigError(f'start must be "epoch" or "now", got {shown(self.start)}')
        if self.collate not in get_args(Collate):
            raise ConfigError(f'collate must be "list", "pad" or "packed", got {shown(self.collate)}')
        if self.start == "now" and world_size > 1:
            raise ConfigError(
                f'start must be "epoch" for ranks, which begin together, got "now" for {world_size} ranks'
            )
        calls.number("wait_timeout_s", self.wait_timeout_s)

    @property
    def ranks(self) -> tuple[int, int]:
        """Rank and world size: (0, 1) for a single consumer."""
        rank, world_size = self.rank, self.world_size
        if rank is None and world_size is None:
            return 0, 1
        if type(rank) is not int or type(world_size) is not int:
            raise ConfigError(
                f"rank and world_size must both be whole numbers, or both be left out, got rank={rank!r} and "
                f"world_size={world_size!r}"
            )
        return rank, world_size


def feed_info(coordinator: Any, name: ConsumerName, timeout_s: float) -> FeedInfo:
    """Return the description of a feed before joining it. Wait up to ``timeout_s`` seconds for the feed to open."""
    what = f"consumer {str(name)!r} joins"
    info: FeedInfo = call_patiently(coordinator, coordinator.info.remote, timeout_s, what)
    return info


def open_stream(
    coordinator: Any,
    name: ConsumerName,
    *,
    start: Start,
    sharding: RankSharding,
    wait_timeout_s: float,
    stats: StreamStats,
    born: int,
) -> Stream:
    """Join a feed.

    Args:
        start: position of the first block.
        wait_timeout_s: longest wait without progress of the feed, in seconds.
        born: creation time of the consumer's loader, Unix time in nanoseconds.
    """
    if name.world_size == 1:
        session = Session(coordinator, name, start=start, wait_timeout_s=wait_timeout_s, born=born)
        session.on_renumbered = sharding.renumber
        return Stream(session, stats)
    rank = RankSession(coordinator, name, sharding, start=start, wait_timeout_s=wait_timeout_s, born=born)
    rank.on_renumbered = sharding.renumber
    group = RankGroup(rank, sharding, wait_timeout_s=wait_timeout_s)
    return RankStream(rank, stats, group=group, sharding=sharding)
