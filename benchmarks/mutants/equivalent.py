"""Mutants that do not change behaviour, each with the reason; they are not counted."""

from __future__ import annotations

_GROWS = "such numbers must only grow"
_NOBODY_GOES = "then no worker is surplus, and none is released"
_NO_VERSION = "workers only receive placement versions, and these begin with 1"
_NO_TASK = "only parts that are being prepared are looked up by task, and these have one"

_NO_CONSUMER = "without consumers no block is held, so its number has no effect"
_ONLY_SLOWER = "after an event without changes, the skipped steps would find nothing to do, only slower"
_NOTHING_TO_PART = "for a single trial `pace.best_split` finds no split"
_ALL_ROOM = "the next check lets the same blocks through"
_LAST_CUT = "cuts ascend and are above 0, so no other cut is wrong if the last one is right"
_ONE_COHORT = "all of them are in one cohort, and therefore in one stream"
_FALSY = "the caller treats None like an empty tuple"
_EQUAL_PACES = "splitting trials of equal paces gains nothing, or less than splitting them all from the slower ones"

EQUIVALENT: dict[str, str] = {
    "mbaas.core.staging.keeping Keeping._weaker: than > Reason.AHEAD -> than >= Reason.AHEAD": (
        "an awaited block is AHEAD by its position, so it is never weaker than that"
    ),
    "mbaas.core.staging.keeping Keeping._weaker: 0 -> 1": _NO_CONSUMER,
    "mbaas.core.staging.keeping Keeping._weaker: 0 -> -1": _NO_CONSUMER,
    "mbaas.core.staging.keeping Keeping.could_free: free >= nbytes -> free > nbytes": (
        "the sum that follows gives the same answer, only slower"
    ),
    "mbaas.core.staging.keeping Keeping._spans_of: len(cohort.active) < len(cohort.members) -> "
    "len(cohort.active) <= len(cohort.members)": "if all members are active, none rests",
    "mbaas.core.staging.epochs EpochTable.forget: len(self._pages) <= MOST_PAGES -> len(self._pages) < MOST_PAGES": (
        "then no page is too old, so none is forgotten, only slower"
    ),
    "mbaas.core.staging.epochs EpochTable.forget: self.number_of(block) + by -> self.number_of(block) - by": (
        "the epochs before and after are the same two"
    ),
    "mbaas.core.staging.rooms divide: 0 -> -1": "one byte less than three blocks of each is room for two, either way",
    "mbaas.core.staging.turns Turns.of: 0.0 -> -1.0": "the current virtual time, which is at least 0, is greater",
    "mbaas.core.cluster.supervisor Supervisor.__init__: 0 -> 1": _GROWS,
    "mbaas.core.cluster.supervisor Supervisor.__init__: 0 -> -1": _GROWS,
    "mbaas.core.cluster.supervisor Supervisor._open_caches: 1 -> 2": _GROWS,
    "mbaas.core.cluster.supervisor Supervisor._match_worker_count: missing < 0 -> missing <= 0": _NOBODY_GOES,
    "mbaas.core.cluster.supervisor Supervisor._match_worker_count: 0 -> 1": _NOBODY_GOES,
    "mbaas.core.cluster.supervisor Supervisor._take_off_work: 0 -> 1": _NO_VERSION,
    "mbaas.core.cluster.supervisor Supervisor._take_off_work: 0 -> -1": _NO_VERSION,
    "mbaas.core.cluster.supervisor Supervisor._fetch_back: False -> True": (
        "the next lines return it as a lent worker; only the note differs"
    ),
    "mbaas.core.staging.scheduling Scheduler._next_block: len(self._consumers.streams) > 1 -> "
    "len(self._consumers.streams) >= 1": "all blocks of a single stream have the same turn",
    "mbaas.core.staging.scheduling _OpenParts.nodes: "
    "for node in self._nodes if node in waiting -> for node in self._nodes": (
        "a node without open parts yields nothing, only later"
    ),
    "mbaas.core.staging.window StagedPart.__init__: 1 -> 2": _NO_TASK,
    "mbaas.core.staging.window StagedPart.__init__: 1 -> 0": _NO_TASK,
    "mbaas.core.cluster.homes Homes._wanted: return set() -> return None": "callers treat None like an empty set",
    "mbaas.core.staging.state StagingState.handle: self.failed is None and (not self._changed_nothing) -> "
    "self.failed is None or not self._changed_nothing": (
        "when a feed is stopped, all consequences of earlier events have been handled"
    ),
    "mbaas.core.staging.state StagingState._epoch_s: "
    "0.0 -> -1.0": "the user's limit is above 0, and the longer one counts",
    "mbaas.core.staging.state StagingState._task_failed: del self.tasks.failures[task.block] -> pass": (
        "failures of a FAILED block are not counted further, and they are deleted when it is dropped"
    ),
    "mbaas.core.staging.state StagingState._tick: False -> True": _ONLY_SLOWER,
    "mbaas.core.staging.state StagingState._tick: "
    "self._changed_nothing = not (self._out or any(resumed) or rested) -> pass": (_ONLY_SLOWER),
    "mbaas.core.staging.state StagingState._part_by_pace: 0.0 -> -1.0": "no time is below 0, and 0 is long enough",
    "mbaas.core.staging.state StagingState._part: len(paces) > 1 -> len(paces) >= 1": _NOTHING_TO_PART,
    "mbaas.core.staging.state StagingState._part: 1 -> 0": _NOTHING_TO_PART,
    "mbaas.core.staging.state StagingState._dispatch: self._changed_nothing = not self._out -> pass": _ONLY_SLOWER,
    "mbaas.core.story _after: len(text) <= LONGEST_CAUSE -> len(text) < LONGEST_CAUSE": (
        "text of exactly that length loses at most three characters"
    ),
    "mbaas.core.layout block_samples: per_s * TARGET_S -> per_s // TARGET_S": (
        "that is 1 s, and the result is rounded down"
    ),
    "mbaas.core.layout block_samples: 1e-09 -> -0.999999999": "no sample takes a negative time",
    "mbaas.core.staging.rooms Holding.__init__: min -> max": "it is used only where there is one cohort",
    "mbaas.core.staging.rooms Holding.holdable: self._end - self._lowest <= self._most - SPARED_BLOCKS -> "
    "self._end - self._lowest < self._most - SPARED_BLOCKS": _ALL_ROOM,
    "mbaas.core.staging.rooms Holding.holdable: self._end - self._lowest -> self._end + self._lowest": _ALL_ROOM,
    "mbaas.core.staging.epochs EpochTable.fix: "
    "number < ASIDE -> number <= ASIDE": "no epoch has the number just before the reserved ones",
    "mbaas.core.ledgers LedgerBook.newest: len(found) >= most -> len(found) > most": (
        "one more page is read, and cut off at the end"
    ),
    "mbaas.core.ledgers LedgerBook.newest: break -> continue": "all pages are read, and cut off at the end",
    "mbaas.core.staging.pace given_per_s: True -> False": "both have the same length",
    "mbaas.core.staging.pace best_split: for faster in range(1, len(paces)) if paces[faster - 1] > paces[faster] -> "
    "for faster in range(1, len(paces))": _EQUAL_PACES,
    "mbaas.core.staging.pace best_split: "
    "paces[faster - 1] > paces[faster] -> paces[faster - 1] >= paces[faster]": _EQUAL_PACES,
    "mbaas.core.staging.pace best_split: 1 -> 0 (2)": "paces descend, so none is faster than the first",
    "mbaas.core.staging.calls shuffle: 1 -> 2": _LAST_CUT,
    "mbaas.core.staging.calls shuffle: 1 -> 0": _LAST_CUT,
    "mbaas.core.staging.consumers Consumer.let_go_between: gap.stop > end -> gap.stop >= end": (
        "the additional range is empty"
    ),
    "mbaas.core.staging.consumers ConsumerTable.__init__: 0.0 -> -1.0": (
        "before the first measurement no trial's pace is known either, and the user's limit is longer"
    ),
    "mbaas.core.staging.consumers ConsumerTable.detach: 0 -> -1": _ONE_COHORT,
    "mbaas.core.staging.consumers ConsumerTable.detach: 0 -> -1 (2)": _ONE_COHORT,
    "mbaas.core.ranks RankTable.orders: 0 -> -1": "no epoch is below 0",
    "mbaas.core.ranks RankTable._await_signs: return () -> return None": _FALSY,
    "mbaas.core.ranks RankTable._await_signs: return () -> return None (2)": _FALSY,
    "mbaas.core.ranks RankTable._look: 0 -> -1": "no plan is older than that of epoch 0",
}
"""Key of a mutant (`mbaas.core.staging.window Window.fits: a <= b -> a < b`) -> reason for its equivalence."""
