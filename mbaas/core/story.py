"""The story of a thing: what happened to a block, a consumer or a worker, so that people can see why it is as it is.

A state changes in one place, its owner's ``transition``, which tells the story: the time that the core was given, what
changed, and the event that it followed from. Stories are bounded: the last `ENTRIES` lines of a thing, and of things
that are over the last `PAST` of a kind. Nothing is formatted before somebody asks, so telling takes well under a
microsecond and stories are always on.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mbaas.errors import ConfigError

ENTRIES = 32
"""Lines kept of one thing: a block has about ten in its life; of a consumer these are its last minutes."""

PAST = 512
"""Things of a kind that are remembered after their end: more than are staged at a time."""

LONGEST_CAUSE = 160
"""Characters of an event that a line shows."""

SHOWN_NAMES = 20
"""Names that an error lists at most."""

SHOWN_DIGITS = 8
"""Digits of a machine's id that people see; two machines with the same ones are as good as never met."""

Clock = Callable[[float], str]
"""Writes a time of the core for people."""

State = TypeVar("State", bound=enum.Enum)


def seconds(now: float) -> str:
    """Write a time of the core as it is; the shell knows which hour that was, the core does not."""
    return f"{now:.3f} s"


class InvariantError(AssertionError):
    """Something that the core never does, so a bug in mbaas. The message ends with the stories of what is concerned."""

    def __init__(self, text: str, *stories: Story) -> None:
        told = [f"\nthe story of {story.kind} {story.name!r}:\n" + "\n".join(story.lines()) for story in stories]
        super().__init__(text + "".join(told))


class Story:
    """What happened to one thing.

    Attributes:
        kind: "block", "consumer", "worker" or "cache node".
        name: what people call it; a block is "block 17".
    """

    __slots__ = ("_entries", "_stories", "kind", "name")

    def __init__(self, kind: str, name: str, stories: Stories) -> None:
        self.kind, self.name, self._stories = kind, name, stories
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=stories.entries)  # (now, cause, words, *values) each

    def tell(self, words: str, *values: object) -> None:
        """Add a line; ``words`` is a format string, filled with ``values`` only when somebody reads it."""
        stories = self._stories
        self._entries.append((stories.now, stories.cause, words, *values))

    def change(self, what: str, old: State, new: State, legal: Mapping[State, frozenset[State]], *why: object) -> None:
        """Add a line for a change of state.

        Args:
            what: whose state changes, if not the thing's own: "part 2: ".
            old: the state before.
            new: the state after.
            legal: state -> the states that may follow.
            why: words and their values, as in `tell`; none if the event says enough.

        Raises:
            InvariantError: ``new`` may not follow ``old``.
        """
        # Before anything is changed: the state that the message shows is the one that the mistake was made in.
        if new not in legal[old]:
            raise InvariantError(f"{what}{self.name} cannot change from {old.name} to {new.name}", self)
        # The event itself is kept, not its text: it is frozen, and formatting it would cost more than handling it.
        stories = self._stories
        self._entries.append((stories.now, stories.cause, "", what, old, new, *why))

    def lines(self, clock: Clock = seconds) -> list[str]:
        """The story as text, oldest line first."""
        return [
            f"{clock(now)}  {_sentence(words, values)}{_after(cause)}" for now, cause, words, *values in self._entries
        ]


class Stories:
    """The stories of all things of one core.

    Args:
        entries: lines kept of one thing.
        past: things of a kind that are remembered after their end.

    Attributes:
        now: the time of the event that is being handled.
        cause: that event.
    """

    def __init__(self, *, entries: int = ENTRIES, past: int = PAST) -> None:
        self.entries, self._most_past = entries, past
        self.now = 0.0
        self.cause: object = None
        self._living: dict[tuple[str, str], Story] = {}
        self._past: defaultdict[str, OrderedDict[str, Story]] = defaultdict(OrderedDict)

    def begin(self, kind: str, name: str) -> Story:
        """Begin the story of a thing, or go on with that of one which was over and is there again."""
        # A trial that joins again, or a block that is made again, is what one would ask about: its story goes on.
        story = self._past[kind].pop(name, None) or Story(kind, name, self)
        self._living[kind, name] = story
        return story

    def end(self, story: Story) -> None:
        """Keep the story of a thing that is over, as long as not too many others ended after it."""
        del self._living[story.kind, story.name]
        # Counted for each kind: a feed ends thousands of blocks an hour, and its trials' stories must outlive them.
        past = self._past[story.kind]
        past[story.name] = story
        if len(past) > self._most_past:
            past.popitem(last=False)

    def lines(self, name: str, clock: Clock = seconds) -> list[str]:
        """What happened to the things of that name, oldest line first; none if there is nothing of that name.

        A consumer and a worker may share a name: one story comes after the other.
        """
        return [line for story in self._all() if story.name == name for line in story.lines(clock)]

    def names(self) -> list[str]:
        """Names of all things whose story is known, those that live first."""
        return list(dict.fromkeys(story.name for story in self._all()))

    def _all(self) -> Iterable[Story]:
        yield from self._living.values()
        for past in self._past.values():
            yield from reversed(past.values())


def block_name(number: int) -> str:
    """What people call a block."""
    return f"block {number}"


def block_number(name: str) -> int | None:
    """The number of a block that is called so; None if that is no block's name."""
    found = re.fullmatch(r"block (\d+)", name)
    return int(found[1]) if found else None


def names_meant(thing: str, names: Iterable[str]) -> list[str]:
    """Those of the names that somebody means who says ``thing``: the same, or that of a cache node.

    People see the first digits of a machine's id only, so these do, with or without "cache " before them.
    """
    digits = thing.removeprefix("cache ")
    is_short = len(digits) >= SHOWN_DIGITS
    return [name for name in names if name == thing or (is_short and name.startswith(f"cache {digits}"))]


def shown_name(name: str) -> str:
    """A name that the supervisor gave, as people see it."""
    return name[: len("cache ") + SHOWN_DIGITS] if name.startswith("cache ") else name


def unknown_thing(thing: str, names: Iterable[str]) -> ConfigError:
    """The error for a thing without a story; it lists names that are near, and some of those that there are."""
    known = list(names)
    near = difflib.get_close_matches(thing, known, n=3, cutoff=0.5)
    shown = ", ".join(known[:SHOWN_NAMES]) + (
        f" and {len(known) - SHOWN_NAMES} more" if len(known) > SHOWN_NAMES else ""
    )
    return ConfigError(
        f"nothing is known of {thing!r}"
        + (f"; near it: {', '.join(near)}" if near else "")
        + f'; a story is told of a block ("block 17"), a consumer, a prep worker, a further lane ("lane 1") or a '
        f'cache node ("cache 1a2b3c4d"): '
        f"{shown or 'there are none yet'}"
    )


def _sentence(words: str, values: Sequence[object]) -> str:
    """The words of a line; those of a change of state begin with what changed from where to where."""
    if words:
        return words.format(*values)
    what, old, new, *why = values
    assert isinstance(old, enum.Enum)
    assert isinstance(new, enum.Enum)
    because = f": {str(why[0]).format(*why[1:])}" if why else ""
    return f"{what}{old.name} -> {new.name}{because}"


def _after(cause: object) -> str:
    """The event that a line followed from, shortened."""
    text = str(cause)
    shown = text if len(text) <= LONGEST_CAUSE else text[: LONGEST_CAUSE - 3] + "..."
    return f"  <- {shown}" if cause is not None else ""
