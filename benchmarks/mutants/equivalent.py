"""Mutants that do not change behaviour, each with the reason; they are not counted."""

from __future__ import annotations

_GROWS = "such numbers must only grow"
_NOBODY_GOES = "then none is one too many, and of none some are let go"
_NO_VERSION = "versions of placements, which are all that workers are told, begin with 1"
_NO_TASK = "who asks for a part by its task asks for one that is made, and that has a task"

_NO_CONSUMER = "without consumers no block is held, whatever its number"
_ONLY_SLOWER = "what follows from an event that changed nothing is nothing, too, only slower"
_NOTHING_TO_PART = "for one trial alone `pace.best_split` finds no place to part it"
_ALL_ROOM = "whoever is not let through at once is let through by what is counted next"
_EQUAL_PACES = "to part trials of equal paces gains nothing, or less than to part all of them from the slower ones"

EQUIVALENT: dict[str, str] = {
    "mbaas.core.staging.keeping Keeping._weaker: than > Reason.AHEAD -> than >= Reason.AHEAD": (
        "an awaited block is AHEAD by its position, so it is never weaker than that"
    ),
    "mbaas.core.staging.keeping Keeping._weaker: 0 -> 1": _NO_CONSUMER,
    "mbaas.core.staging.keeping Keeping._weaker: 0 -> -1": _NO_CONSUMER,
    "mbaas.core.staging.keeping Keeping.could_free: free >= nbytes -> free > nbytes": (
        "the sum that follows gives the same answer, only slower"
    ),
    "mbaas.core.staging.keeping Keeping._spans: len(cohort.active) < len(cohort.members) -> "
    "len(cohort.active) <= len(cohort.members)": "of members that are all active none rests",
    "mbaas.core.cluster.supervisor Supervisor.__init__: 0 -> 1": _GROWS,
    "mbaas.core.cluster.supervisor Supervisor.__init__: 0 -> -1": _GROWS,
    "mbaas.core.cluster.supervisor Supervisor._open_caches: 1 -> 2": _GROWS,
    "mbaas.core.cluster.supervisor Supervisor._match_worker_count: missing < 0 -> missing <= 0": _NOBODY_GOES,
    "mbaas.core.cluster.supervisor Supervisor._match_worker_count: 0 -> 1": _NOBODY_GOES,
    "mbaas.core.cluster.supervisor Supervisor._take_off_work: 0 -> 1": _NO_VERSION,
    "mbaas.core.cluster.supervisor Supervisor._take_off_work: 0 -> -1": _NO_VERSION,
    "mbaas.core.cluster.supervisor Supervisor._fetch_back: False -> True": (
        "it comes back as one that was lent in the next lines; only the note is another"
    ),
    "mbaas.core.staging.scheduling _OpenParts.nodes: "
    "for node in self._nodes if node in waiting -> for node in self._nodes": (
        "for a node without open parts none is found, only later"
    ),
    "mbaas.core.staging.window StagedPart.__init__: 1 -> 2": _NO_TASK,
    "mbaas.core.staging.window StagedPart.__init__: 1 -> 0": _NO_TASK,
    "mbaas.core.cluster.homes Homes._wanted: return set() -> return None": "whoever asks takes None for an empty set",
    "mbaas.core.staging.state StagingState.handle: self.failed is None and (not self._changed_nothing) -> "
    "self.failed is None or not self._changed_nothing": (
        "when a feed is stopped, all that follows from the events before was done already"
    ),
    "mbaas.core.staging.state StagingState._epoch_s: "
    "0.0 -> -1.0": "what the user allows is above 0, and the longer counts",
    "mbaas.core.staging.state StagingState._task_failed: del self.tasks.failures[task.block] -> pass": (
        "nobody counts for a block that FAILED, and when it is dropped they are forgotten, too"
    ),
    "mbaas.core.staging.state StagingState._tick: False -> True": _ONLY_SLOWER,
    "mbaas.core.staging.state StagingState._tick: "
    "self._changed_nothing = not (self._out or any(resumed) or rested) -> pass": (_ONLY_SLOWER),
    "mbaas.core.staging.state StagingState._part_by_pace: 0.0 -> -1.0": "no time is below 0, and 0 is long enough",
    "mbaas.core.staging.state StagingState._part: len(paces) > 1 -> len(paces) >= 1": _NOTHING_TO_PART,
    "mbaas.core.staging.state StagingState._part: 1 -> 0": _NOTHING_TO_PART,
    "mbaas.core.staging.state StagingState._dispatch: self._changed_nothing = not self._out -> pass": _ONLY_SLOWER,
    "mbaas.core.story _after: len(text) <= LONGEST_CAUSE -> len(text) < LONGEST_CAUSE": (
        "a text of just that length is shortened by nothing, or by three characters: words for people"
    ),
    "mbaas.core.layout block_samples: per_s * TARGET_S -> per_s // TARGET_S": (
        "that is 1 s, and the result is rounded down"
    ),
    "mbaas.core.layout block_samples: 1e-09 -> -0.999999999": "no sample takes a negative time",
    "mbaas.core.staging.holding Holding.__init__: min -> max": "it is used only where there is one cohort",
    "mbaas.core.staging.holding Holding.holdable: self._end - self._lowest <= self._most - SPARED_BLOCKS -> "
    "self._end - self._lowest < self._most - SPARED_BLOCKS": _ALL_ROOM,
    "mbaas.core.staging.holding Holding.holdable: self._end - self._lowest -> self._end + self._lowest": _ALL_ROOM,
    "mbaas.core.staging.epochs EpochTable.fix: "
    "number < ASIDE -> number <= ASIDE": "no epoch lies just before those aside",
    "mbaas.core.ledgers LedgerBook.newest: len(found) >= most -> len(found) > most": (
        "one page more is looked at, and cut off in the end"
    ),
    "mbaas.core.ledgers LedgerBook.newest: break -> continue": "all pages are looked at, and cut off in the end",
    "mbaas.core.staging.pace given_per_s: True -> False": "the two are of the same length",
    "mbaas.core.staging.pace best_split: for faster in range(1, len(paces)) if paces[faster - 1] > paces[faster] -> "
    "for faster in range(1, len(paces))": _EQUAL_PACES,
    "mbaas.core.staging.pace best_split: "
    "paces[faster - 1] > paces[faster] -> paces[faster - 1] >= paces[faster]": _EQUAL_PACES,
    "mbaas.core.staging.pace best_split: 1 -> 0 (2)": "nobody is faster than the first, for paces descend",
}
"""Key of a mutant (`mbaas.core.staging.window Window.fits: a <= b -> a < b`) -> reason for its equivalence."""
