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
from mbaas.errors import StateError, shown
from mbaas.order import SampleOrder
from mbaas.validation import options

if TYPE_CHECKING:
    from pydantic import TypeAdapter

STATE_VERSION = 1
"""Version of a loader's state: a state that an older version of mbaas saved must load, or be refused with a sentence.

It changes when a key is added, or means something else.
"""

Count = Annotated[int, Ge(0), Le(2**53 - 1)]
"""A whole number that every reader of JSON keeps exact."""

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

    version: Literal[1]
    """Version of the state."""

    fingerprint: str
    """Digest of dataset, pipeline, seed and order: a state belongs to feeds that have the same."""

    epoch: Count
    """Epochs that the loader finished or left."""

    feed_epoch: Annotated[int, Ge(0), Le(2**40)]
    """The feed's number of the epoch that it is in, or is about to begin; no feed lives for a trillion epochs."""

    position: Count
    """Where in the epoch's order the next sample is: 0 at its beginning, the number of samples at its end."""

    samples: Count
    """Samples before the position that trials received, over all ranks; bad ones are not counted."""

    id_hash: Hash
    """The order-independent hash of their ids."""

    left_out: list[Count] = field(default_factory=list)
    """Ids of the epoch's bad samples, as far as they are known."""

    share: SavedRank | None = None
    """What the rank that saved the state had of it; states of the first versions lack it."""


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
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(f"loader state must have version {STATE_VERSION}, got {shown(version)}")
    saved = _of_types(state)
    if saved.fingerprint != fingerprint:
        raise StateError(
            "the state belongs to another dataset, pipeline, seed or order: its fingerprint is "
            f"{saved.fingerprint}, the feed's is {fingerprint}"
        )
    _check_together(saved, order.num_samples)
    return saved


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
    if len(set(saved.left_out)) < len(saved.left_out):
        raise StateError(f"state.left_out must name each sample once, got {len(saved.left_out)} with repetitions")
