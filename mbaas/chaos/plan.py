"""Which faults happen when: a plan follows from its seed alone."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mbaas import units
from mbaas.errors import ConfigError
from mbaas.validation import instead

Target = Literal[
    "worker", "cache", "relay", "coordinator", "lane", "trial", "node", "nodes", "raylet", "driver", "storage", "link"
]
Action = Literal["kill", "pause", "remove", "add", "hang", "err", "slow", "truncate", "lose", "cut", "drain"]

PARTICIPANTS: tuple[Target, ...] = ("worker", "cache", "coordinator", "lane", "trial")
"""Processes of a search: prep workers, cache nodes, the coordinator, those of further lanes, and trials."""

PAUSE_S = (0.5, 9.0)
"""How long what is paused stands still, and what is disturbed stays so; longer than some of a feed's patience."""

LONG_PAUSE_S = (20.0, 60.0)
"""How long a long pause lasts: most are longer than a consumer's lease and the others' patience."""

RETURN_S = (0.0, 6.0)
"""How long after a node's death another one comes."""

NOTICE_S = (5.0, 30.0)
"""How long before a node goes its users have notice; clouds give 30 s to 2 min."""

AGAIN_S = (0.0, 3.0)
"""How long after the death of the program that serves the feed it is started again."""

CUT_S = (1.0, 8.0)
"""How long a link is down: below the time after which Ray gives the node up, mostly."""

JITTER = 0.4
"""A fault happens earlier or later than its turn by up to this share of the period."""


@dataclass(frozen=True)
class Strike:
    """One thing that is done to one participant.

    Attributes:
        action: what is done.
        target: the kind of participant.
        which: of those that are there then: 0 is the first, just below 1 the last.
        lasts_s: until it is undone, for what can be undone: a pause ends, a node is replaced, the program that serves
            is started again, storage works again.
    """

    action: Action
    target: Target
    which: float
    lasts_s: float


@dataclass(frozen=True)
class Fault:
    """One or more strikes at the same moment.

    Attributes:
        at_s: since the search was seen to train.
        kind: one of `KINDS`.
        strikes: what happens, all at once.
    """

    at_s: float
    kind: str
    strikes: tuple[Strike, ...]


Draw = Callable[[random.Random], tuple[Strike, ...]]


def _single(action: Action, target: Target, lasts_s: tuple[float, float]) -> Draw:
    return lambda chance: (Strike(action, target, chance.random(), chance.uniform(*lasts_s)),)


def _anybody(action: Action, lasts_s: tuple[float, float]) -> Draw:
    """Strike one participant of any kind."""
    return lambda chance: (Strike(action, chance.choice(PARTICIPANTS), chance.random(), chance.uniform(*lasts_s)),)


def _burst(action: Action, size: int) -> Draw:
    """Strike several participants, of one kind or of several, at once."""
    return lambda chance: tuple(
        Strike(action, chance.choice(PARTICIPANTS), chance.random(), chance.uniform(*PAUSE_S)) for _ in range(size)
    )


KINDS: dict[str, Draw] = {
    **{f"kill-{target}": _single("kill", target, (0.0, 0.0)) for target in PARTICIPANTS},
    **{f"pause-{target}": _single("pause", target, PAUSE_S) for target in PARTICIPANTS},
    "kill-two": _burst("kill", 2),
    "kill-three": _burst("kill", 3),
    "pause-two": _burst("pause", 2),
    "pause-three": _burst("pause", 3),
    "kill-driver": _single("kill", "driver", AGAIN_S),
    "kill-node": _single("kill", "node", RETURN_S),
    "kill-raylet": _single("kill", "raylet", RETURN_S),
    "kill-nodes": _single("kill", "nodes", RETURN_S),
    "remove-node": _single("remove", "node", RETURN_S),
    "pause-node": _single("pause", "node", PAUSE_S),
    "add-node": _single("add", "node", PAUSE_S),
    "hang-storage": _single("hang", "storage", PAUSE_S),
    "err-storage": _single("err", "storage", PAUSE_S),
    "slow-storage": _single("slow", "storage", PAUSE_S),
    "truncate-storage": _single("truncate", "storage", PAUSE_S),
    "lose-storage": _single("lose", "storage", PAUSE_S),
    "cut-link": _single("cut", "link", CUT_S),
    "slow-link": _single("slow", "link", PAUSE_S),
}
"""What can happen, and how its strikes are drawn. The names are those of ``--kinds``."""

BY_NAME_ONLY: dict[str, Draw] = {
    "pause-long": _anybody("pause", LONG_PAUSE_S),
    "drain-node": _single("drain", "node", NOTICE_S),
}
"""Kinds that happen only where ``--kinds`` names them in full.

A plan is drawn from all kinds at once, so one more in `KINDS`, or under a pattern that was in use before it, would make
another plan of every seed.
"""

OF_OUR_SEARCH = ("kill-driver", *(kind for kind in KINDS if kind.endswith("-storage")))
"""Kinds that need a feed which is served by a program of ours, from storage that can be disturbed."""

OF_LANES = ("kill-lane", "pause-lane")
"""Kinds that need a feed with more than one lane."""

OF_LINKS = ("cut-link", "slow-link")
"""Kinds that need nodes in network namespaces of their own."""


def chosen_kinds(patterns: Sequence[str], known: Sequence[str] = tuple(KINDS)) -> tuple[str, ...]:
    """Return the kinds that patterns such as ``kill-*`` stand for, in the order of `KINDS`, then those named in full.

    Raises:
        ConfigError: a pattern stands for none of those known, and is no name of `BY_NAME_ONLY`.
    """
    for pattern in patterns:
        if pattern not in BY_NAME_ONLY and not fnmatch.filter(known, pattern):
            hint = instead(pattern, (*known, *BY_NAME_ONLY))
            raise ConfigError(f"--kinds has {pattern!r}, which is no kind of fault; {hint}")
    chosen = (kind for kind in known if any(fnmatch.fnmatchcase(kind, pattern) for pattern in patterns))
    return (*chosen, *(kind for kind in BY_NAME_ONLY if kind in patterns))


def plan(seed: int, *, faults: int, every_s: float, kinds: Sequence[str] = tuple(KINDS)) -> tuple[Fault, ...]:
    """Draw faults: about one in `every_s` seconds, each of the kinds once before any comes again.

    Args:
        seed: the same one gives the same plan.
        faults: how many, at least 1.
        every_s: mean time between two, in seconds, above 0.
        kinds: of `KINDS` and `BY_NAME_ONLY`.

    Raises:
        ConfigError: no faults, no kinds, or no time.
    """
    if faults < 1:
        raise ConfigError(f"--faults must be at least 1, got {faults}")
    if not every_s > 0:
        raise ConfigError(f"--every must be above 0 seconds, got {units.exact(every_s)}")
    if not kinds:
        raise ConfigError("--kinds must name at least one kind of fault, got none")
    chance, draws = random.Random(seed), KINDS | BY_NAME_ONLY
    drawn = []
    left: list[str] = []
    for number in range(faults):
        # All kinds in a random order, then all again: with independent draws a rare kind would be missing from a short
        # run. Sorted first, so that the plan does not depend on the order in which --kinds names them.
        if not left:
            left = chance.sample(sorted(kinds), len(kinds))
        kind = left.pop()
        # Jittered, because what happens at fixed intervals could meet a feed always in the same phase.
        at_s = (number + 1 + chance.uniform(-JITTER, JITTER)) * every_s
        drawn.append(Fault(at_s, kind, draws[kind](chance)))
    return tuple(drawn)
