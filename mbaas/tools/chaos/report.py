"""Results of a run under faults, computed from the plan, the executed faults and the trials' records. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mbaas.tools.chaos.checker import Flaw, FlawKind, Row, agreed, by_epoch, check, orders_of, with_pipelines
from mbaas.tools.chaos.injector import FaultOutcome
from mbaas.tools.chaos.plan import Fault
from mbaas.tools.chaos.records import Incarnation, history
from mbaas.tools.chaos.usage import Growth

COUNTED: tuple[FlawKind, ...] = ("missing", "repeated", "different", "misplaced", "unknown")
"""Kinds of flaws, in the order of the report."""

USUAL_S = 0.25
"""A wait that began more than this many seconds before a fault is not attributed to the fault."""

SHOWN = 20
"""Maximum number of printed lines of a kind; the report contains the total number."""


@dataclass(frozen=True)
class KindReport:
    """Planned faults of one kind, and faults that hit all of their targets.

    ``waits_s`` is the longest wait after each that happened, in s (see `longest_waits`); empty without trial records.
    """

    planned: int
    happened: int
    waits_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Checked:
    """Results of checking the trials' records.

    Attributes:
        trials, minibatches, samples, epochs: amounts checked. Epochs are counted per trial and rank, and the last one
            may be partial.
        cut_epochs: epochs whose order has cuts, because a consumer joined the feed mid-epoch.
        incarnations: number of trial processes.
        is_independent: the reference was a run without faults, rather than other trials.
        errors, told: class of exceptions raised by loaders -> count, and the first such exceptions as text.
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
        return sum(len(flaw.samples) for flaw in self.flaws if flaw.kind == kind)


@dataclass
class Report:
    """Results of a run, which sets them as they come.

    Attributes:
        seconds: from the first minibatch until the end of the faults.
        kinds: results by kind, in the plan's order.
        feeds_ended: messages about feeds that failed or ended.
        hung: messages about trials that received nothing for too long, or did not end.
        inexact_epochs: epochs that were not exact according to the loaders' ledgers.
        bugs: internal errors of mbaas found in its logs, one line each.
        left_behind: processes and files that remained after the end.
        command_code: exit code of the command, if one was run.
        was_interrupted: the run was ended by Ctrl-C.
        kept: folder with all records and logs; None if it was removed because nothing was wrong.
    """

    seed: int
    seconds: float = 0.0
    kinds: Mapping[str, KindReport] = field(default_factory=dict)
    checked: Checked = Checked()
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
        return sum(kind.happened for kind in self.kinds.values())

    @property
    def is_sound(self) -> bool:
        """True if the samples were exact, no feed ended and no trial hung."""
        bad = (self.checked.flaws, self.feeds_ended, self.hung, self.inexact_epochs, self.command_code)
        return not any(bad)


def kinds_of(
    faults: Sequence[Fault], injected: Sequence[FaultOutcome], incarnations: Mapping[str, Sequence[Incarnation]]
) -> dict[str, KindReport]:
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


def longest_waits(
    injected: Sequence[FaultOutcome], incarnations: Mapping[str, Sequence[Incarnation]]
) -> dict[int, float]:
    """Return for each fault, by its index, the longest wait of a trial for a minibatch, in seconds.

    A wait is attributed to the last fault before its start or shortly after it, unless that fault hit the trial itself.
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


def check_records(
    incarnations: Mapping[str, Sequence[Incarnation]],
    references: Mapping[int, Mapping[int, Sequence[Row]]] | None,
    *,
    samples: int,
) -> Checked:
    """Check the records of all trials, whose epochs have ``samples`` samples each.

    Args:
        incarnations: processes of each trial, in order. "ranks[0]" and "ranks[1]" are the ranks of one trial.
        references: pipeline -> samples of a run without faults; None to compare the trials with each other.
    """
    steps = {trial: history(processes) for trial, processes in incarnations.items()}
    histories = {trial: [step.delivery for step in each] for trial, each in steps.items()}
    trials: dict[str, list[str]] = {}
    for name in histories:
        trials.setdefault(name.partition("[")[0], []).append(name)
    singles = [histories[names[0]] for names in trials.values() if len(names) == 1]
    if references is None:
        pipelines = {each.pipeline for history in singles for each in history}
        of = {number: [[d for d in history if d.pipeline == number] for history in singles] for number in pipelines}
        against: Mapping[int, Mapping[int, Sequence[Row]]] = {n: agreed(each, samples) for n, each in of.items()}
    else:
        against = references
    orders = orders_of(singles, samples)
    flaws: list[Flaw] = []
    for trial, names in trials.items():
        was_cut_off = not all(incarnations[name][-1].is_closed for name in names)
        ranks = [histories[name] for name in names]
        flaws += check(trial, ranks, with_pipelines(ranks, against), orders=orders, was_cut_off=was_cut_off)
    errors = [error for processes in incarnations.values() for process in processes for error in process.errors]
    return Checked(
        trials=len(trials),
        minibatches=sum(map(len, histories.values())),
        samples=sum(len(delivery.rows) for each in histories.values() for delivery in each),
        epochs=sum(len({delivery.epoch for delivery in each}) for each in histories.values()),
        cut_epochs=sum(bool(each[0].order) for history in histories.values() for each in by_epoch(history).values()),
        incarnations=sum(map(len, incarnations.values())),
        flaws=tuple(flaws),
        is_independent=references is not None,
        errors=dict(Counter(kind for _, kind, _ in errors)),
        told=tuple(f"{kind}: {message}" for _, kind, message in sorted(errors)[:SHOWN]),
    )
