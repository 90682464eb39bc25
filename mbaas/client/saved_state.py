"""The state that `Loader.state_dict` returns: a small versioned JSON value, validated when it is loaded.

Users store states in checkpoints, pass them through other tools, and load them years later. So this module alone
defines their contents, and a state is used only after it was validated completely.
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from mbaas.base import validation
from mbaas.base.validation import options
from mbaas.core.staging.calls import DEEPEST
from mbaas.errors import ConfigError, StateError, shown
from mbaas.samples.order import OwnEpoch, SampleOrder, Shuffle
from mbaas.wire.consumers import FeedInfo, Resumption
from mbaas.wire.samples import EngineName

_log = logging.getLogger(__name__)

STATE_VERSION = 3
"""Version of a loader's state. A state saved by an older version of mbaas must load, or raise a clear error.

Increment it when a key is added or its meaning changes.
"""

Count = Annotated[int, Ge(0), Le(2**53 - 1)]
"""An integer that every JSON reader represents exactly."""

FeedEpoch = Annotated[int, Ge(0), Le(2**31)]
"""The number of a feed's epoch; no feed lives for a billion epochs."""

Hash = Annotated[int, Ge(0), Le(2**64 - 1)]


@options(within="state.share")
class SavedRank:
    """One rank's part of the epoch in a data-parallel trial."""

    rank: Count
    """Rank that saved the state; 0 for a single consumer."""

    world_size: Annotated[int, Ge(1), Le(2**53 - 1)]
    """Number of ranks; 1 for a single consumer."""

    samples: Count
    """Samples that this rank received in the epoch."""

    id_hash: Hash
    """Order-independent hash of their ids."""


@options(within="state")
class SavedState:
    """Position of a loader, after the last minibatch that it returned."""

    version: Literal[3]
    """Version of the state format."""

    fingerprint: str
    """Digest of dataset, pipeline, seed and order. A state can be loaded only into feeds with the same digest."""

    engine: EngineName
    """Engine that prepared the minibatches; the other one makes slightly different pixels."""

    epoch: Count
    """Epochs that the loader finished or skipped."""

    feed_epoch: FeedEpoch
    """The feed's epoch number at the start of the loader's own epoch."""

    position: Count
    """Position of the next sample in the loader's own epoch: 0 at its start, the number of samples at its end."""

    samples: Count
    """Samples before the position that were received, over all ranks, without bad ones."""

    id_hash: Hash
    """Order-independent hash of their ids."""

    left_out: list[Count]
    """Ids of the epoch's bad samples found so far."""

    share: SavedRank
    """Samples received by the rank that saved the state."""

    begin: Count
    """Position in the feed's epoch at which the loader's own epoch began; above 0 if it joined mid-epoch."""

    shuffle: list[tuple[FeedEpoch, list[Count]]]
    """Shuffle of the feed's epoch at the position, as a list of nested (epoch, cuts), outermost first.

    Empty if the epoch is shuffled as a whole. See `mbaas.samples.order.Shuffle`.
    """


def schema() -> dict[str, Any]:
    """Return the JSON schema of a loader's state."""
    return validation.adapter_of(SavedState).json_schema()


def read_state(state: object, *, info: FeedInfo, any_pipeline: bool = False) -> SavedState:
    """Validate a loader's state for a feed.

    With ``any_pipeline``, it may have been saved with another pipeline. It may have been saved with another engine if
    the feed's program named one, instead of ``engine="auto"``.

    Raises:
        StateError: the state is invalid or belongs to another feed; the message shows the actual and the allowed value.
    """
    if not isinstance(state, dict):
        raise StateError(f"loader state must be the dict that state_dict() returned, got {type(state).__name__}")
    version = state.get("version")
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(f"loader state must have version {STATE_VERSION}, got {shown(version)}")
    saved, fingerprint = _of_types(state), info.fingerprint
    is_of_same_order = _without_pipeline(saved.fingerprint) == _without_pipeline(fingerprint)
    if saved.fingerprint != fingerprint and is_of_same_order and not any_pipeline:
        raise StateError(
            "the state belongs to another pipeline of the same dataset, seed and order: its fingerprint is "
            f"{saved.fingerprint}, the feed's is {fingerprint}; join with pipeline=... to continue with another one"
        )
    if not is_of_same_order:
        raise StateError(
            "the state belongs to another dataset, pipeline, seed or order: its fingerprint is "
            f"{saved.fingerprint}, the feed's is {fingerprint}"
        )
    _check_engine(saved, info)
    _check_together(saved, info.order.num_samples)
    return saved


def _check_engine(saved: SavedState, info: FeedInfo) -> None:
    if saved.engine == info.engine:
        return
    feed = info.settings
    if feed.engine == "auto":
        raise StateError(
            f"the state's minibatches were prepared by engine {saved.engine!r}, and feed {feed.name!r} has "
            f"{info.engine!r}, which engine='auto' chose ({info.engine_reason}): serve it with engine={saved.engine!r} "
            f"to continue with the same bytes, or with engine={info.engine!r} to accept slightly different ones"
        )
    _log.warning(
        "the state's minibatches were prepared by engine %r, those of feed %r are by %r: their bytes differ slightly",
        saved.engine, feed.name, info.engine,
    )  # fmt: skip


def _without_pipeline(fingerprint: str) -> tuple[str, ...]:
    # See `fingerprint_of`.
    dataset, *others = fingerprint.split("-")
    return dataset, *others[1:]


def levels_of(shuffle: Shuffle | None) -> list[list[Any]]:
    """Return a shuffle as plain JSON types, for `SavedState.shuffle`."""
    return [] if shuffle is None else [*levels_of(shuffle.base), [shuffle.epoch, [*shuffle.cuts]]]


def shuffle_of(saved: SavedState) -> Shuffle:
    """Return the shuffle of the feed's epoch at a state's position.

    Raises:
        ConfigError: the shuffle is invalid.
    """
    shuffle: Shuffle | None = None
    for epoch, cuts in saved.shuffle:
        shuffle = Shuffle(epoch, tuple(cuts), shuffle)
    return shuffle or Shuffle(saved.feed_epoch)


def resumption(saved: SavedState, order: SampleOrder) -> tuple[Resumption, int]:
    """Return the block at which a state with a position above 0 continues, and its first row to return.

    The block size of ``order`` may differ from when the state was saved.
    """
    blocks, size, shuffle = order.blocks_per_epoch, order.block_samples, shuffle_of(saved)
    first = saved.feed_epoch * blocks + saved.begin // size
    own_epoch = OwnEpoch(first, first + blocks + (saved.begin % size > 0), saved.begin)
    # at the epoch's end, continue within its last block, because the epoch has no block after that
    later, place = divmod(saved.begin + min(saved.position, order.num_samples - 1), order.num_samples)
    block = (saved.feed_epoch + later) * blocks + place // size
    row = place - place // size * size + (saved.position == order.num_samples)
    return Resumption(block, own_epoch, shuffle.epoch, shuffle), row


def _of_types(state: dict[Any, Any]) -> SavedState:
    from pydantic import ValidationError

    try:
        text = json.dumps(state, ensure_ascii=False).encode()  # lone surrogates cannot be encoded
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"loader state must be plain JSON: {error}") from None
    try:
        saved = validation.adapter_of(SavedState).validate_json(text, strict=True)
    except ValidationError as error:
        details = validation.worst(error.errors(include_url=False))
        if not details["loc"]:
            raise StateError(f"loader state must be plain JSON: {details['msg']}") from None
        path = ".".join(["state", *map(str, details["loc"])])
        if details["type"] in validation.UNKNOWN:
            known = ", ".join(each.name for each in fields(SavedState))
            raise StateError(f"{path} is not known; a loader's state of version {STATE_VERSION} has {known}") from None
        if details["type"] in validation.LACKING:
            raise StateError(f"{path} is missing") from None
        wrong = validation.wrong(details, str(details["loc"][-1]))
        raise StateError(f"{path} {wrong}, got {shown(details['input'])}") from None
    return saved


def _check_together(saved: SavedState, num_samples: int) -> None:
    bounds: list[tuple[str, int, int, str]] = [
        ("begin", saved.begin, num_samples - 1, "the last sample's position"),
        *(("shuffle", cut, num_samples - 1, "the last sample's position") for _, cuts in saved.shuffle for cut in cuts),
        ("shuffle", len(saved.shuffle), DEEPEST, "shuffles within each other"),
        ("position", saved.position, num_samples, "the number of samples of the dataset"),
        ("samples", saved.samples, saved.position, "the position"),
        *(("left_out", sample, num_samples - 1, "the last sample's id") for sample in saved.left_out),
        ("share.rank", saved.share.rank, saved.share.world_size - 1, "the last rank"),
        ("share.samples", saved.share.samples, saved.samples, "the samples of all ranks"),
    ]
    for name, value, most, meaning in bounds:
        if value > most:
            raise StateError(f"state.{name} must be at most {most}, {meaning}, got {value}")
    try:
        shuffle = shuffle_of(saved)
    except ConfigError as error:
        raise StateError(f"state.shuffle cannot be: {error}") from None
    # the position is in the next epoch of the feed after ``feed_epoch``
    later = int(saved.begin + saved.position > num_samples)
    if saved.position and shuffle.epoch != saved.feed_epoch + later:
        raise StateError(
            f"state.shuffle must be of epoch {saved.feed_epoch + later}, the epoch of position {saved.position}, got "
            f"one of epoch {shuffle.epoch}"
        )
    if len(set(saved.left_out)) < len(saved.left_out):
        raise StateError(f"state.left_out must name each sample once, got {len(saved.left_out)} with repetitions")
