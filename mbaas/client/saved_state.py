"""What `Loader.state_dict` returns: a small JSON value with a version, checked when it is loaded.

States lie in checkpoints of users, pass through files and tools of others, and come back years later. So one place says
what they hold, and nothing of one is used before all of it was checked.
"""

from __future__ import annotations

import functools
import json
from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from mbaas import validation
from mbaas.core.calls import DEEPEST
from mbaas.errors import ConfigError, StateError, shown
from mbaas.messages import Resumption
from mbaas.order import OwnEpoch, SampleOrder, Shuffle
from mbaas.validation import options

if TYPE_CHECKING:
    from pydantic import TypeAdapter

STATE_VERSION = 2
"""Version of a loader's state: a state that an older version of mbaas saved must load, or be refused with a sentence.

It changes when a key is added, or means something else. In version 1 all epochs began where those of the feed did, and
each was shuffled as a whole.
"""

Count = Annotated[int, Ge(0), Le(2**53 - 1)]
"""A whole number that every reader of JSON keeps exact."""

FeedEpoch = Annotated[int, Ge(0), Le(2**31)]
"""The number of an epoch of a feed; no feed lives for a billion epochs."""

Hash = Annotated[int, Ge(0), Le(2**64 - 1)]


@options(within="state.share")
class SavedRank:
    """What one rank of a data-parallel trial had of the epoch."""

    rank: Count
    """Which rank saved the state; 0 for a trial that is one consumer."""

    world_size: Annotated[int, Ge(1), Le(2**53 - 1)]
    """How many ranks there were; 1 for a trial that is one consumer."""

    samples: Count
    """Samples that this rank received in the epoch."""

    id_hash: Hash
    """The order-independent hash of their ids."""


@options(within="state")
class SavedState:
    """Where a loader stands: after the last minibatch that it handed out."""

    version: Literal[1, 2]
    """Version of the state."""

    fingerprint: str
    """Digest of dataset, pipeline, seed and order: a state belongs to feeds that have the same."""

    epoch: Count
    """Epochs that the loader finished or left."""

    feed_epoch: FeedEpoch
    """The feed's number of the epoch in which it began its own, or is about to."""

    position: Count
    """Where in the loader's own epoch the next sample is: 0 at its beginning, the number of samples at its end."""

    samples: Count
    """Samples before the position that trials received, over all ranks; bad ones are not counted."""

    id_hash: Hash
    """The order-independent hash of their ids."""

    left_out: list[Count] = field(default_factory=list)
    """Ids of the epoch's bad samples, as far as they are known."""

    share: SavedRank | None = None
    """What the rank that saved the state had of it; states of the first versions lack it."""

    begin: Count = 0
    """Where in the order of the feed's epoch the loader began its own: not 0 if it joined in the middle of one."""

    shuffle: list[tuple[FeedEpoch, list[Count]]] = field(default_factory=list)
    """How the feed's epoch is shuffled in which the position lies: (epoch, cuts) of the shuffles that lie within each
    other, that of all samples first; none for one that is shuffled as a whole. See `mbaas.order.Shuffle`.
    """


def schema() -> dict[str, Any]:
    """Return the JSON schema of a loader's state."""
    return _reader().json_schema()


@functools.cache
def _reader() -> TypeAdapter[SavedState]:
    from pydantic import TypeAdapter

    return TypeAdapter(SavedState)


def read_state(state: object, *, order: SampleOrder, fingerprint: str) -> SavedState:
    """Read a loader's state.

    Args:
        state: what the user gave.
        order: the order of the feed that it is loaded into.
        fingerprint: of that feed.

    Raises:
        StateError: it cannot be a state of this feed: says which value, what it is and what it must be.
    """
    if not isinstance(state, dict):
        raise StateError(f"loader state must be the dict that state_dict() returned, got {type(state).__name__}")
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= STATE_VERSION:
        raise StateError(f"loader state must have a version from 1 to {STATE_VERSION}, got {shown(version)}")
    saved = _of_types(state)
    if saved.fingerprint != fingerprint:
        raise StateError(
            "the state belongs to another dataset, pipeline, seed or order: its fingerprint is "
            f"{saved.fingerprint}, the feed's is {fingerprint}"
        )
    _check_together(saved, order.num_samples)
    return saved


def levels_of(shuffle: Shuffle | None) -> list[list[Any]]:
    """Return a shuffle as plain JSON types: what `SavedState.shuffle` holds."""
    return [] if shuffle is None else [*levels_of(shuffle.base), [shuffle.epoch, [*shuffle.cuts]]]


def shuffle_of(saved: SavedState) -> Shuffle:
    """Return how the feed's epoch is shuffled in which a state's position lies.

    Raises:
        ConfigError: there can be no such shuffle.
    """
    shuffle: Shuffle | None = None
    for epoch, cuts in saved.shuffle:
        shuffle = Shuffle(epoch, tuple(cuts), shuffle)
    return shuffle or Shuffle(saved.feed_epoch)


def resumption(saved: SavedState, order: SampleOrder) -> tuple[Resumption, int]:
    """Return where a state goes on in the middle of an epoch, and the first row of that block which it lacks.

    Args:
        saved: the state; its position is above 0.
        order: of the feed, whose blocks may be others than when the state was saved.
    """
    blocks, size, shuffle = order.blocks_per_epoch, order.block_samples, shuffle_of(saved)
    first = saved.feed_epoch * blocks + saved.begin // size
    own_epoch = OwnEpoch(first, first + blocks + (saved.begin % size > 0), saved.begin)
    # an epoch that only lacks its end has no block after its last
    later, place = divmod(saved.begin + min(saved.position, order.num_samples - 1), order.num_samples)
    block = (saved.feed_epoch + later) * blocks + place // size
    row = place - place // size * size + (saved.position == order.num_samples)
    return Resumption(block, own_epoch, shuffle.epoch, shuffle), row


def _of_types(state: dict[Any, Any]) -> SavedState:
    from pydantic import ValidationError

    try:
        text = json.dumps(state, ensure_ascii=False).encode()  # halves of characters are no text
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"loader state must be plain JSON: {error}") from None
    try:
        saved: SavedState = _reader().validate_json(text, strict=True)
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
    """Check what each value alone does not show."""
    bounds: list[tuple[str, int, int, str]] = [
        ("begin", saved.begin, num_samples - 1, "the last sample's position"),
        *(("shuffle", cut, num_samples - 1, "the last sample's position") for _, cuts in saved.shuffle for cut in cuts),
        ("shuffle", len(saved.shuffle), DEEPEST, "shuffles within each other"),
        ("position", saved.position, num_samples, "the number of samples of the dataset"),
        ("samples", saved.samples, saved.position, "the position"),
        *(("left_out", sample, num_samples - 1, "the last sample's id") for sample in saved.left_out),
    ]
    if saved.share is not None:
        bounds += [
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
    later = int(saved.begin + saved.position > num_samples)  # it lies in the epoch after the one in which it began
    if saved.position and shuffle.epoch != saved.feed_epoch + later:
        raise StateError(
            f"state.shuffle must be of epoch {saved.feed_epoch + later}, in which position {saved.position} lies, got "
            f"one of epoch {shuffle.epoch}"
        )
    if len(set(saved.left_out)) < len(saved.left_out):
        raise StateError(f"state.left_out must name each sample once, got {len(saved.left_out)} with repetitions")
