"""The kinds and times of faults. A plan depends only on its seed and the settings."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mbaas.base import units
from mbaas.base.validation import instead
from mbaas.errors import ConfigError

Target = Literal[
    "worker", "cache", "relay", "coordinator", "trial", "node", "nodes", "raylet", "driver", "storage", "link"
]
Action = Literal["kill", "pause", "remove", "add", "hang", "err", "slow", "truncate", "lose", "cut", "drain"]

PARTICIPANTS: tuple[Target, ...] = ("worker", "cache", "coordinator", "trial")
"""Processes of a search: prep workers, cache nodes, the coordinator, and trials."""

PAUSE_S = (0.5, 9.0)
"""Duration of a pause or disturbance, from and to; the upper end exceeds some of a feed's timeouts."""

LONG_PAUSE_S = (20.0, 60.0)
"""Duration of a long pause; mostly longer than a consumer's lease and other consumers' patience."""

RETURN_S = (0.0, 6.0)
"""Delay between a node's death and its replacement."""

NOTICE_S = (5.0, 30.0)
"""Notice before a node is reclaimed; clouds give 30 s to 2 min."""

AGAIN_S = (0.0, 3.0)
"""Delay between the death of the program that serves the feed and its restart."""

CUT_S = (1.0, 8.0)
"""Duration of a link failure; mostly below Ray's timeout for a node."""

JITTER = 0.4
"""Largest deviation of a fault's time from a regular schedule, as a fraction of the period."""


@dataclass(frozen=True)
class Strike:
    """One action on one target.

    Attributes:
        which: position among the targets that exist then, from 0 (the first) to just below 1 (the last).
        lasts_s: seconds until a temporary action is undone: a pause ends, a node is replaced, the serving program
            restarts, storage works again.
    """

    action: Action
    target: Target
    which: float
    lasts_s: float


@dataclass(frozen=True)
class Fault:
    """Simultaneous strikes, ``at_s`` seconds after training was first observed."""

    at_s: float
    kind: str
    strikes: tuple[Strike, ...]


Draw = Callable[[random.Random], tuple[Strike, ...]]


def _single(action: Action, target: Target, lasts_s: tuple[float, float]) -> Draw:
    return lambda chance: (Strike(action, target, chance.random(), chance.uniform(*lasts_s)),)


def _burst(action: Action, size: int, lasts_s: tuple[float, float] = PAUSE_S) -> Draw:
    return lambda chance: tuple(
        Strike(action, chance.choice(PARTICIPANTS), chance.random(), chance.uniform(*lasts_s)) for _ in range(size)
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
"""Kinds of faults, by their names in ``--kinds``, and functions that draw their strikes."""

BY_NAME_ONLY: dict[str, Draw] = {
    "pause-long": _burst("pause", 1, LONG_PAUSE_S),
    "drain-node": _single("drain", "node", NOTICE_S),
}
"""Kinds that occur only if ``--kinds`` contains their full name: new ones in `KINDS` would change every seed's plan."""

OF_OUR_SEARCH = ("kill-driver", *(kind for kind in KINDS if kind.endswith("-storage")))
"""Kinds that need the default search, whose serving program can be killed and whose storage can fail."""

OF_LINKS = ("cut-link", "slow-link")
"""Kinds that need nodes in separate network namespaces."""


def chosen_kinds(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds that match patterns such as ``kill-*``, then those in `BY_NAME_ONLY` that are named in full.

    Raises:
        ConfigError: a pattern matches no known kind, and is not a name in `BY_NAME_ONLY`.
    """
    for pattern in patterns:
        if pattern not in BY_NAME_ONLY and not fnmatch.filter(KINDS, pattern):
            hint = instead(pattern, (*KINDS, *BY_NAME_ONLY))
            raise ConfigError(f"--kinds has {pattern!r}, which is no kind of fault; {hint}")
    chosen = (kind for kind in KINDS if any(fnmatch.fnmatchcase(kind, pattern) for pattern in patterns))
    return (*chosen, *(kind for kind in BY_NAME_ONLY if kind in patterns))


def plan(seed: int, *, faults: int, every_s: float, kinds: Sequence[str] = tuple(KINDS)) -> tuple[Fault, ...]:
    """Draw faults, about one per `every_s` seconds. Each kind occurs once before any kind is repeated.

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
        # All kinds in random order, then all again: with independent draws, a short run would miss some kinds. Sorted
        # first, so that the plan does not depend on the order in --kinds.
        if not left:
            left = chance.sample(sorted(kinds), len(kinds))
        kind = left.pop()
        # Jittered, because faults at fixed intervals might always hit the same phase of a feed.
        at_s = (number + 1 + chance.uniform(-JITTER, JITTER)) * every_s
        drawn.append(Fault(at_s, kind, draws[kind](chance)))
    return tuple(drawn)
