"""What came of a run under faults: pure, from what was planned, what happened and what trials wrote down."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mbaas.chaos.checker import Flaw, FlawKind, Row, agreed, by_epoch, check, orders_of
from mbaas.chaos.injector import Injected
from mbaas.chaos.plan import Fault
from mbaas.chaos.records import Incarnation, history
from mbaas.chaos.usage import Growth

COUNTED: tuple[FlawKind, ...] = ("missing", "repeated", "different", "misplaced", "unknown")
"""Flaws, in the order in which they are told."""

USUAL_S = 0.25
"""A trial that has waited for longer than this when a fault happens does not wait because of it."""

SHOWN = 20
"""At most this many sentences of a kind are printed; the report gives the number of all."""


@dataclass(frozen=True)
class KindReport:
    """What came of the faults of a kind.

    Attributes:
        planned: how many there were to be so far.
        happened: how many met all of their targets.
        waits_s: of each that happened the longest wait for a minibatch that is due to it; see `longest_waits`. None are
            known where trials wrote nothing down.
    """

    planned: int
    happened: int
    waits_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Checked:
    """What the checker found in what trials wrote down.

    Attributes:
        trials, minibatches, samples, epochs: how much was checked; epochs of trials (each rank counts), the last of
            which may be a part.
        cut_epochs: those of them whose order has cuts, because a consumer joined the feed in the middle of an epoch.
        incarnations: processes that the trials had.
        flaws: what is wrong.
        is_independent: it was compared with a run without faults; else with what other trials got.
        errors: class of what loaders raised -> how often.
        told: the first such errors, in words.
    """

    trials: int = 0
    minibatches: int = 0
    samples: int = 0
    epochs: int = 0
    cut_epochs: int = 0
    incarnations: int = 0
    flaws: tuple[Flaw, ...] = ()
    is_independent: bool = False
    errors: Mapping[str, int] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def count(self, kind: FlawKind) -> int:
        """Return how many samples have this flaw."""
        return sum(len(flaw.samples) for flaw in self.flaws if flaw.kind == kind)


@dataclass(frozen=True)
class Report:
    """What came of a run.

    Attributes:
        seed: of the plan.
        seconds: from the first minibatch until trials were told to end.
        kinds: by name, in the plan's order.
        checked: what trials got.
        feeds_ended: feeds that could not go on, in sentences.
        hung: trials that got nothing for too long, or did not end, in sentences.
        inexact_epochs: epochs that were not exact by the loaders' own ledgers.
        bugs: errors in mbaas itself that its logs tell of, one line each.
        growth: what there was ever more of.
        left_behind: what was there after the end, in sentences.
        command_code: exit code of the command that ran, if one was named.
        was_interrupted: somebody ended it before its time.
        kept: the folder with all records and logs, which is removed if there is nothing to look for.
    """

    seed: int
    seconds: float
    kinds: Mapping[str, KindReport]
    checked: Checked
    feeds_ended: tuple[str, ...] = ()
    hung: tuple[str, ...] = ()
    inexact_epochs: int = 0
    bugs: tuple[str, ...] = ()
    growth: tuple[Growth, ...] = ()
    left_behind: tuple[str, ...] = ()
    command_code: int | None = None
    was_interrupted: bool = False
    kept: str | None = None

    @property
    def happened(self) -> int:
        """Faults of all kinds that met somebody."""
        return sum(kind.happened for kind in self.kinds.values())

    @property
    def is_sound(self) -> bool:
        """Whether nothing was missing, repeated or different, no feed ended and nobody waited for ever."""
        bad = (self.checked.flaws, self.feeds_ended, self.hung, self.inexact_epochs, self.command_code)
        return not any(bad)


def kinds_of(
    faults: Sequence[Fault], injected: Sequence[Injected], incarnations: Mapping[str, Sequence[Incarnation]]
) -> dict[str, KindReport]:
    """Count faults by kind, and find the longest wait after each."""
    planned = Counter(fault.kind for fault in faults)
    waits = longest_waits(injected, incarnations)
    found: dict[str, list[float]] = {kind: [] for kind in planned}
    for number, each in enumerate(injected):
        if each.happened:
            found[each.kind].append(waits.get(number, 0.0))
    return {
        kind: KindReport(planned[kind], len(found[kind]), tuple(found[kind]) if incarnations else ())
        for kind in planned
    }


def longest_waits(injected: Sequence[Injected], incarnations: Mapping[str, Sequence[Incarnation]]) -> dict[int, float]:
    """Find for each fault, by its number, the longest wait of a trial for a minibatch, in seconds.

    A wait is due to the last fault before it, or just after it began; later ones within it come on top. Trials that
    were struck themselves do not count for that fault.
    """
    times = [each.at for each in injected]
    longest: dict[int, float] = {}
    for processes in incarnations.values():
        for process in processes:
            for step in process.steps:
                number = bisect_right(times, min(step.asked_at + USUAL_S, step.got_at)) - 1
                if number < 0 or process.pid in injected[number].pids:
                    continue
                longest[number] = max(longest.get(number, 0.0), step.got_at - step.asked_at)
    return longest


def checked(
    incarnations: Mapping[str, Sequence[Incarnation]], reference: Mapping[int, Sequence[Row]] | None, *, samples: int
) -> Checked:
    """Check what all trials wrote down.

    Args:
        incarnations: of each trial, in order. Names such as "ranks[0]" and "ranks[1]" are the ranks of one trial.
        reference: of a run without faults; None: trials are compared with each other.
        samples: number of samples in an epoch.
    """
    steps = {trial: history(processes) for trial, processes in incarnations.items()}
    histories = {trial: [step.delivery for step in each] for trial, each in steps.items()}
    trials: dict[str, list[str]] = {}
    for name in histories:
        trials.setdefault(name.partition("[")[0], []).append(name)
    singles = [histories[names[0]] for names in trials.values() if len(names) == 1]
    against = agreed(singles, samples) if reference is None else reference
    orders = orders_of(singles, samples)
    flaws: list[Flaw] = []
    for trial, names in trials.items():
        was_cut_off = not all(incarnations[name][-1].is_closed for name in names)
        flaws += check(trial, [histories[name] for name in names], against, orders=orders, was_cut_off=was_cut_off)
    errors = [error for processes in incarnations.values() for process in processes for error in process.errors]
    return Checked(
        trials=len(trials),
        minibatches=sum(map(len, histories.values())),
        samples=sum(len(delivery.rows) for each in histories.values() for delivery in each),
        epochs=sum(len({delivery.epoch for delivery in each}) for each in histories.values()),
        cut_epochs=sum(bool(each[0].order) for history in histories.values() for each in by_epoch(history).values()),
        incarnations=sum(map(len, incarnations.values())),
        flaws=tuple(flaws),
        is_independent=reference is not None,
        errors=dict(Counter(kind for _, kind, _ in errors)),
        told=tuple(f"{kind}: {message}" for _, kind, message in sorted(errors)[:SHOWN]),
    )
