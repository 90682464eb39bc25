"""Idle time of prep is charged to the consumers that cause it, with simulated trials and one simulated worker."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mbaas.client.stalls import StreamStats
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.settings import Timeouts

PREP_S = 0.030
EPOCH = 100


@dataclass
class Trial:
    """A trial that requests a block, works on it and requests the next; its loader requests nothing ahead.

    Attributes:
        keeps: number of blocks held at each request.
        left: number of blocks still to request.
    """

    name: str
    step_s: float
    session: int
    keeps: int = 0
    left: int = 10**9
    cursor: int = 0
    asked_at: float = 0.0

    def __post_init__(self) -> None:
        self.stats, self.begun = StreamStats(), 0

    @property
    def shares(self) -> tuple[float, float]:
        """Seconds per block spent waiting for prep and for other consumers."""
        blocks, stats = self.cursor, self.stats
        return (stats.wait_s - stats.peer_stall_s) / blocks, stats.peer_stall_s / blocks


class Play:
    """One worker that prepares a block in 30 ms, and trials with given steps, on a virtual clock."""

    def __init__(self, ahead: int = 2, budget: int = 1000, slack: int = 0) -> None:
        timeouts = Timeouts(lease_s=1e9, patience_s=1e9)
        self.core = StagingState(StagingLimits(budget, ahead, timeouts, slack_blocks=slack), EPOCH, lambda _: 1)
        self.now, self._queue, self._count = 0.0, [], itertools.count()
        self.trials: dict[str, Trial] = {}
        self._busy_until = 0.0
        self.send(ev.WorkerUp("prep-0", 2, "node"))

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + after_s, next(self._count), action))

    def send(self, event: ev.Event) -> None:
        for said in self.core.handle(event, self.now):
            match said:
                case ev.Prepare():
                    self._busy_until = max(self._busy_until, self.now) + PREP_S
                    self.later(self._busy_until - self.now, lambda task=said.task: self.send(ev.TaskEnded(task)))
                case ev.Admitted():
                    self.trials[said.consumer].cursor = said.cursor
                case ev.Deliver():
                    self._take(self.trials[said.consumer], said)

    def _take(self, trial: Trial, delivery: ev.Deliver) -> None:
        asked, now = trial.asked_at, self.now
        trial.stats.block_came(asked, now, fetch_s=0.0, prep_s=PREP_S, peer_idle_s=delivery.peer_idle_s)
        trial.cursor = delivery.blocks[-1] + 1
        self.later(trial.step_s, lambda: self.ask(trial))

    def ask(self, trial: Trial) -> None:
        if not trial.left:
            return
        trial.asked_at, trial.left = self.now, trial.left - 1
        released = max(trial.begun, trial.cursor - trial.keeps)
        self.send(ev.Ask(trial.name, trial.session, trial.cursor, released, trial.cursor, 1))

    def join(self, name: str, step_s: float, start: int | None = None, *, keeps: int = 0, left: int = 10**9) -> Trial:
        trial = self.trials[name] = Trial(name, step_s, next(self._count) + 1, keeps=keeps, left=left)
        self.send(ev.Join(name, trial.session, start, False))
        trial.begun = trial.cursor
        self.ask(trial)
        return trial

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end
        self.core.validate()


def test_a_trial_alone_waits_for_nobody():
    play = Play()
    trial = play.join("fast", 0.010)
    play.run(1.9)
    assert trial.shares == pytest.approx((PREP_S - 0.010, 0.0), abs=1e-3)


@pytest.mark.parametrize(("slack", "is_idle"), [(0, True), (20, False)])
def test_prep_is_not_idle_because_of_one_that_is_behind_while_nothing_is_held_back_for_it(slack, is_idle):
    """Both are slower than prep. In 2 s one gets 33 blocks and the other 25, which a slack of 20 covers."""
    play = Play(slack=slack)
    play.join("ahead", 0.060)
    play.join("behind", 0.080)
    play.run(2.0)
    (cohort,) = play.core.consumers.cohorts.values()
    assert (cohort.peer_idle_s > 0.0 or cohort.peer_idle_since is not None) is is_idle


def test_trials_of_the_same_speed_wait_for_prep():
    play = Play()
    one, other = play.join("one", 0.010), play.join("other", 0.010)
    play.run(1.9)
    for trial in (one, other):
        assert trial.shares == pytest.approx((PREP_S - 0.010, 0.0), abs=1e-3)


def test_a_fast_trial_waits_for_a_slow_one_as_much_longer_as_it_would_not_wait_alone():
    """Both get a block every 100 ms. Alone, the fast one would get one every 30 ms, after a wait of 20 ms."""
    play = Play()
    fast, slow = play.join("fast", 0.010), play.join("slow", 0.100)
    play.run(2.0)
    blocks, waited_s, peers_s = fast.cursor, fast.stats.wait_s, fast.stats.peer_stall_s
    play.run(5.0)
    blocks, waited_s = fast.cursor - blocks, fast.stats.wait_s - waited_s
    peers_s = fast.stats.peer_stall_s - peers_s
    assert blocks == 50
    assert peers_s / blocks == pytest.approx(0.100 - PREP_S)
    assert (waited_s - peers_s) / blocks == pytest.approx(PREP_S - 0.010)
    assert slow.stats.wait_s == pytest.approx(PREP_S, abs=1e-3), "only for its first block"
    assert slow.stats.peer_stall_s == 0.0


def test_a_newcomer_that_waits_for_the_next_epoch_waits_for_others():
    play = Play(budget=4)  # blocks that the slow one has used are gone
    slow = play.join("slow", 0.100)
    play.run(5.0)
    newcomer = play.join("newcomer", 0.010)
    assert (slow.cursor, newcomer.cursor) == (50, EPOCH)
    play.run(6.0)
    assert newcomer.cursor > EPOCH
    assert newcomer.stats.wait_s > 4.0
    assert newcomer.stats.peer_stall_s > 0.6 * newcomer.stats.wait_s


def test_a_trial_that_has_room_for_one_block_because_another_hoards_waits_for_that_one():
    """Alone, its next block would be prepared while it works: 10 ms of each 30 ms wait are due to the hoarder."""
    play = Play(budget=3)
    hoarder = play.join("hoarder", 0.001, start=10, keeps=2, left=2)
    play.run(1.0)
    assert hoarder.cursor == 12
    trial = play.join("trial", 0.010, start=50)
    play.run(1.0)
    blocks, waited_s, peers_s = trial.cursor, trial.stats.wait_s, trial.stats.peer_stall_s
    play.run(1.0)
    blocks, peers_s = trial.cursor - blocks, trial.stats.peer_stall_s - peers_s
    assert blocks == 25
    assert peers_s / blocks == pytest.approx(0.010)
    assert (trial.stats.wait_s - waited_s) / blocks == pytest.approx(PREP_S)


def test_a_trial_waits_for_one_that_holds_what_it_is_done_with_itself_although_both_were_given_the_same():
    """The budget is three blocks, and another loader holds all three for a second."""
    play = Play(ahead=4, budget=3)
    fast = play.join("fast", 0.010)
    holder = play.join("holder", 0.0, start=0, keeps=3, left=3)
    play.run(1.0)
    assert fast.cursor == holder.cursor == 3
    before_s = fast.stats.wait_s
    play.send(ev.Heartbeat("holder", holder.session, 3, 3))
    play.run(0.05)
    assert fast.cursor == 4
    last_s = fast.stats.wait_s - before_s
    assert fast.stats.peer_stall_s == pytest.approx(last_s - PREP_S, abs=0.03)
    assert last_s > 0.8


def test_a_trial_alone_whose_own_blocks_take_the_room_waits_for_nobody_else():
    """It keeps two of three blocks and copies later ones, which prep prepares while it works on those."""
    play = Play(budget=3)
    trial = play.join("trial", 0.010, keeps=2)
    play.run(1.9)
    prep_s, peers_s = trial.shares
    assert PREP_S - 0.010 <= prep_s <= PREP_S
    assert peers_s == 0.0


def test_who_is_moved_to_another_cohort_is_not_charged_with_what_happened_before():
    play = Play()
    fast, slow = play.join("fast", 0.010), play.join("slow", 0.100)
    play.run(2.95)
    cursor, waits_s, peers_s = fast.cursor, play.now - fast.asked_at, fast.stats.peer_stall_s
    assert 0.02 < waits_s < 0.09, "it waits for the slow one"
    play.core.consumers.detach([play.core.consumers.by_name["fast"]], "it is tested")
    play.send(ev.Leave("slow", slow.session))
    play.run(1.02 * PREP_S)
    assert fast.cursor == cursor + 1
    assert fast.stats.peer_stall_s == peers_s
