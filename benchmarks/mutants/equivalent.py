"""Mutants that change nothing which anybody could see, each with the reason; they count neither way."""

from __future__ import annotations

_SET_FIRST = "it is set from the event before anybody reads it"
_NO_SESSION = "a reservation has no session: calls find sessions above 0 only"

EQUIVALENT: dict[str, str] = {
    "mbaas.core.supervisor Supervisor.__init__: self._now = 0.0 -> pass": _SET_FIRST,
    "mbaas.core.homes Homes.__init__: self.version = 0 -> pass": "`Begin` sets it before the first move",
    "mbaas.core.homes Homes.__init__: 0 -> 1": "`Begin` sets the version before the first move",
    "mbaas.core.state StagingState._announce: 0 -> -1": _NO_SESSION,
    "mbaas.core.state StagingState._heartbeat: self._changed_nothing = True -> pass": (
        "one of an unknown session changes nothing: what follows is nothing, too, only slower"
    ),
    "mbaas.core.consumers ConsumerTable.reserve_for_successor: 0 -> -1": _NO_SESSION,
    "mbaas.core.consumers ConsumerTable.claim_reservation: 0 -> -1": _NO_SESSION,
    "mbaas.core.consumers ConsumerTable.hold_reservations: 0 -> -1": _NO_SESSION,
    "mbaas.core.story _after: len(text) <= LONGEST_CAUSE -> len(text) < LONGEST_CAUSE": (
        "a text of just that length is shortened by nothing, or by three characters: words for people"
    ),
    "mbaas.core.layout block_samples: 1e-09 -> -0.999999999": "no sample takes a negative time",
}
"""Key of a mutant (`mbaas.core.window Window.fits: a <= b -> a < b`) -> why it is equivalent."""
