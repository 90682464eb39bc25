"""Trials that train on a staging core in virtual time, with noisy paces."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import partial

from benchmarks.scale.clock import Clock
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.settings import Timeouts

LOOK_S = 1.0
"""Seconds between reports of the paces."""

NOISE = 0.04
"""Largest relative error of a reported pace."""


class Search:
    """Trials that train on a feed without end.

    Args:
        steps_s: trial -> seconds of work on a block.
        prep_s: seconds that a worker needs for a block.
        workers: number of prep workers.
        blocks: blocks per epoch.
        budget_blocks: blocks that may be staged.
        ahead_blocks: blocks prepared ahead of the fastest trial of a cohort.
        jitter: largest relative deviation of a block's preparation time.
        tells_paces: whether the paces are reported to the core.
        slack_blocks: further blocks that prep may run ahead of the slowest trial.
        pause_s: extra seconds that each trial takes once per epoch, each at a different block, as for a checkpoint.
    """

    def __init__(
        self,
        steps_s: Mapping[str, float],
        *,
        prep_s: float = 0.01,
        workers: int = 2,
        blocks: int = 40,
        budget_blocks: int = 16,
        ahead_blocks: int = 4,
        jitter: float = 0.0,
        tells_paces: bool = True,
        slack_blocks: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        timeouts = Timeouts(patience_s=1000, lease_s=1e6)
        limits = StagingLimits(budget_blocks, ahead_blocks, timeouts=timeouts, slack_blocks=slack_blocks)
        self.core = StagingState(limits, blocks, lambda _: 1)
        self.steps_s, self.prep_s, self.workers, self.tells_paces = dict(steps_s), prep_s, workers, tells_paces
        self.pause_s = pause_s
        self._pauses_at = {trial: number * blocks // len(steps_s) for number, trial in enumerate(steps_s)}
        self.clock, self.chance, self.jitter = Clock(), random.Random(7), jitter
        self.given: Counter[str] = Counter()
        self.blocks: dict[str, list[int]] = {}
        self.made = 0
        self.notes: list[str] = []
        self._free_at = [0.0] * workers
        self._asks: dict[str, ev.Ask] = {}
        for worker in range(workers):
            self.send(ev.WorkerUp(f"w{worker}", 2))
        for trial in steps_s:
            self.join(trial)
        self.clock.after(0.0, self.look)

    def join(self, trial: str) -> None:
        self.blocks[trial] = []
        self.send(ev.Join(trial, len(self.blocks)))

    def ask(self, trial: str, block: int, session: int) -> None:
        if trial in self.steps_s:
            self.send(ev.Ask(trial, session, block, block, block))

    def send(self, event: ev.Event) -> None:
        for done in self.core.handle(event, self.clock.now):
            match done:
                case ev.Admitted():
                    self.ask(done.consumer, done.cursor, done.session)
                case ev.Deliver():
                    (block,) = done.blocks
                    self.given[done.consumer] += 1
                    self.blocks[done.consumer].append(block)
                    step_s = self.steps_s[done.consumer]
                    if block % self.core.blocks_per_epoch == self._pauses_at[done.consumer]:
                        step_s += self.pause_s
                    self.clock.after(step_s, partial(self.ask, done.consumer, block + 1, done.session))
                case ev.Prepare():
                    worker = int(done.worker[1:])
                    prep_s = self.prep_s * self.chance.uniform(1 - self.jitter, 1 + self.jitter)
                    self._free_at[worker] = max(self._free_at[worker], self.clock.now) + prep_s
                    self.made += 1
                    self.clock.after(
                        self._free_at[worker] - self.clock.now, partial(self.send, ev.TaskEnded(done.task))
                    )
                case ev.Note():
                    self.notes.append(done.text)
        if self.chance.random() < 0.02:
            self.core.validate()

    def look(self) -> None:
        if self.tells_paces:
            noisy = {
                trial: step_s * self.chance.uniform(1 - NOISE, 1 + NOISE) for trial, step_s in self.steps_s.items()
            }
            paces = tuple(ev.TrialPace((trial,), 1 / step_s) for trial, step_s in noisy.items())
            self.send(ev.PacesMeasured(paces, self.workers / self.prep_s))
        self.send(ev.Tick())
        self.clock.after(LOOK_S, self.look)

    def rates(self, seconds: float, *, warm_s: float = 10.0) -> dict[str, float]:
        """Run, and return the blocks/s delivered to each trial after the warm-up."""
        self.run(warm_s)
        before, made = self.given.copy(), self.made
        self.run(seconds)
        self.made -= made
        return {trial: (self.given[trial] - before[trial]) / seconds for trial in self.steps_s}

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.clock.run(lambda: self.clock.now >= end)

    def all_exact(self) -> bool:
        """Return whether each trial received whole epochs in order, except for an unfinished last one."""
        length = self.core.blocks_per_epoch
        epochs_of = [[b[n : n + length] for n in range(0, len(b), length)] for b in self.blocks.values()]
        return all(
            epoch == list(range(epoch[0], epoch[0] + len(epoch))) and epoch[0] % length == 0
            for epochs in epochs_of
            for epoch in epochs
        )

    def cohorts(self) -> set[frozenset[str]]:
        return {frozenset(m.name for m in cohort.members) for cohort in self.core.consumers.cohorts.values()}
