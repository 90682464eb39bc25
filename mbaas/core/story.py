"""Stories: the history of each block, consumer and worker, for diagnosis.

A state changes only in its owner's ``transition`` method, which adds a line: the time, the change, and the event that
caused it. Stories are bounded: the last `ENTRIES` lines per object, and the last `PAST` ended objects of each kind.
Lines are formatted only when read. Adding one takes well under a microsecond, so stories are always on.
"""

from __future__ import annotations

import difflib
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mbaas.errors import ConfigError

ENTRIES = 32
"""Lines kept per object: a block has about ten in its life; a consumer's lines cover its last minutes."""

PAST = 512
"""Ended objects kept per kind: more than are staged at a time."""

LONGEST_CAUSE = 160
"""Largest number of characters of an event in a line."""

SHOWN_NAMES = 20
"""Largest number of names in an error message."""

SHOWN_DIGITS = 8
"""Digits of a node id shown to users; collisions are practically impossible."""

Clock = Callable[[float], str]
"""Formats a time of the core for users."""

State = TypeVar("State", bound=enum.Enum)


def seconds(now: float) -> str:
    """Format a time of the core as seconds; only the shell can convert it to the time of day."""
    return f"{now:.3f} s"


class InvariantError(AssertionError):
    """A bug in mbaas: an impossible state of the core. The message ends with the stories of the objects concerned."""

    def __init__(self, text: str, *stories: Story) -> None:
        told = [f"\nthe story of {story.kind} {story.name!r}:\n" + "\n".join(story.lines()) for story in stories]
        super().__init__(text + "".join(told))


class Story:
    """History of one object: its ``kind`` ("worker", "cache node", ...), and the ``name`` shown to users."""

    __slots__ = ("_entries", "_stories", "kind", "name")

    def __init__(self, kind: str, name: str, stories: Stories) -> None:
        self.kind, self.name, self._stories = kind, name, stories
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=stories.entries)  # entries (now, cause, words, *values)

    def tell(self, words: str, *values: object) -> None:
        """Add a line; ``words`` is a format string, filled with ``values`` only when the line is read."""
        stories = self._stories
        self._entries.append((stories.now, stories.cause, words, *values))

    def change(self, what: str, old: State, new: State, legal: Mapping[State, frozenset[State]], *why: object) -> None:
        """Add a line for a transition, or raise InvariantError if ``new`` may not follow ``old``.

        Args:
            what: prefix if a part of the object changes: "part 2: ".
            old: state before.
            new: state after.
            legal: state -> the allowed next states.
            why: format string and values, as in `tell`; none if the event explains enough.
        """
        # Check before the change, so that the message shows the state before the error.
        if new not in legal[old]:
            raise InvariantError(f"{what}{self.name} cannot change from {old.name} to {new.name}", self)
        # Keep the event, not its text: it is frozen, and formatting it would cost more than processing it.
        stories = self._stories
        self._entries.append((stories.now, stories.cause, "", what, old, new, *why))

    def lines(self, clock: Clock = seconds) -> list[str]:
        """Return the story as text, oldest line first."""
        return [
            f"{clock(now)}  {_sentence(words, values)}{_after(cause)}" for now, cause, words, *values in self._entries
        ]


class Stories:
    """Stories of all objects of one core.

    Args:
        entries: lines kept per object.
        past: ended objects kept per kind.

    Attributes:
        now, cause: time of the current event, and the event.
    """

    def __init__(self, *, entries: int = ENTRIES, past: int = PAST) -> None:
        self.entries, self._most_past = entries, past
        self.now = 0.0
        self.cause: object = None
        self._living: dict[tuple[str, str], Story] = {}
        self._past: defaultdict[str, OrderedDict[str, Story]] = defaultdict(OrderedDict)

    def begin(self, kind: str, name: str) -> Story:
        """Start the story of an object, or continue the story of an earlier object of the same name."""
        # A trial that joins again, or a block that is prepared again, is of interest: its story continues.
        story = self._past[kind].pop(name, None) or Story(kind, name, self)
        self._living[kind, name] = story
        return story

    def end(self, story: Story) -> None:
        """Move a story to the ended ones, which are dropped oldest first."""
        del self._living[story.kind, story.name]
        # Limited per kind: a feed ends thousands of blocks per hour, and its trials' stories must outlive them.
        past = self._past[story.kind]
        past[story.name] = story
        if len(past) > self._most_past:
            past.popitem(last=False)

    def lines(self, name: str, clock: Clock = seconds) -> list[str]:
        """Return the lines of all objects with that name, oldest first.

        A consumer and a worker may share a name: their stories follow each other.
        """
        return [line for story in self._all() if story.name == name for line in story.lines(clock)]

    def names(self) -> list[str]:
        """Return the names of all objects with a story, living ones first."""
        return list(dict.fromkeys(story.name for story in self._all()))

    def _all(self) -> Iterable[Story]:
        yield from self._living.values()
        for past in self._past.values():
            yield from reversed(past.values())


def names_meant(thing: str, names: Iterable[str]) -> list[str]:
    """Return the names that a user may mean by ``thing``: an exact match, or cache nodes by the start of their node id.

    Users see only the first digits of a node id, so these are accepted, with or without the prefix "cache ".
    """
    digits = thing.removeprefix("cache ")
    is_short = len(digits) >= SHOWN_DIGITS
    return [name for name in names if name == thing or (is_short and name.startswith(f"cache {digits}"))]


def shown_name(name: str) -> str:
    """Return a name given by the supervisor as shown to users."""
    return name[: len("cache ") + SHOWN_DIGITS] if name.startswith("cache ") else name


def unknown_thing(thing: str, names: Iterable[str]) -> ConfigError:
    """Return the error for an object without a story; it lists similar names and some of the known ones."""
    known = list(names)
    near = difflib.get_close_matches(thing, known, n=3, cutoff=0.5)
    shown = ", ".join(known[:SHOWN_NAMES]) + (
        f" and {len(known) - SHOWN_NAMES} more" if len(known) > SHOWN_NAMES else ""
    )
    return ConfigError(
        f"nothing is known of {thing!r}"
        + (f"; near it: {', '.join(near)}" if near else "")
        + f'; a story is told of a block ("block 17"), a consumer, a prep worker or a '
        f'cache node ("cache 1a2b3c4d"): '
        f"{shown or 'there are none yet'}"
    )


def _sentence(words: str, values: Sequence[object]) -> str:
    if words:
        return words.format(*values)
    what, old, new, *why = values
    assert isinstance(old, enum.Enum)
    assert isinstance(new, enum.Enum)
    because = f": {str(why[0]).format(*why[1:])}" if why else ""
    return f"{what}{old.name} -> {new.name}{because}"


def _after(cause: object) -> str:
    text = str(cause)
    shown = text if len(text) <= LONGEST_CAUSE else text[: LONGEST_CAUSE - 3] + "..."
    return f"  <- {shown}" if cause is not None else ""
