"""Ranks at different positions get every epoch in the same order, whichever process dies, in random schedules.

The epochs have cuts because other consumers begin in mid-epoch. Ranks die and return with their own states. The
coordinator also dies, and its successor has only the persisted data.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.samples.order import ASIDE, OwnEpoch, SampleOrder, Shuffle
from mbaas.settings import Timeouts
from mbaas.wire.consumers import Resumption

pytestmark = pytest.mark.slow

BLOCKS, SAMPLES = 6, 4
ORDER = SampleOrder(BLOCKS * SAMPLES, 0, SAMPLES)
STEPS = 250


@dataclass
class Reader:
    """A rank, or a lone consumer that begins in mid-epoch, reads one epoch and leaves.

    Attributes:
        trial: trial of the rank; None for a lone consumer.
        cursor: next block; None before the first join.
        own: its own epoch.
        known: (epoch, shuffle) of the last block received.
        had: samples received from its own epoch.
    """

    name: str
    trial: str | None = None
    session: int = 0
    cursor: int | None = None
    own: OwnEpoch = field(default_factory=lambda: OwnEpoch(0, 0))
    known: tuple[int, Shuffle] | None = None
    had: list[int] = field(default_factory=list)

    def start(self, session: int) -> ev.Join:
        """Join or rejoin, like `Position.start_at`."""
        self.session = session
        name, trial = self.name, self.trial
        if self.cursor is None:
            return ev.Join(name, session, now=trial is None, trial=trial, world_size=2 if trial else 1)
        if self.known is None or not self.had:
            return ev.Join(name, session, self.cursor, trial=trial, world_size=2 if trial else 1)
        resumed = Resumption(self.cursor, self.own, *self.known)
        return ev.Join(name, session, self.cursor, resumed=resumed, trial=trial, world_size=2 if trial else 1)


class Schedule:
    """One random schedule.

    Args:
        seed: determines the whole schedule.
        writes: whether a successor coordinator gets the persisted shuffles.
    """

    def __init__(self, seed: int, *, writes: bool = True) -> None:
        self.rng, self.writes = random.Random(seed), writes
        self.written: dict[int, Shuffle] = {}
        self.orders: dict[int, Shuffle] = {}  # epoch -> the first rank's shuffle
        self.cut = 0
        self.now, self.sessions, self.names = 0.0, 0, 0
        self.ranks = [Reader(f"t[{number}]", "t") for number in range(2)]
        self.away: dict[str, float] = {}
        self.others: list[Reader] = []
        self._begin()

    def _begin(self) -> None:
        limits = StagingLimits(10 * 40, 3, Timeouts(lease_s=30.0, patience_s=2.0), slack_blocks=2)
        self.core = StagingState(
            limits, BLOCKS, lambda _: 10, block_samples=SAMPLES, written=self.written if self.writes else {}
        )
        self._send(ev.WorkerUp("w", 2))

    def _send(self, event: ev.Event) -> list[ev.Instruction]:
        done, new = [], self.core.handle(event, self.now)
        while new:
            done += new
            todo, new = new, []
            for each in todo:
                if isinstance(each, ev.Prepare):
                    new += self.core.handle(ev.TaskEnded(each.task), self.now)
                elif isinstance(each, ev.WriteEpochs):
                    kept = {number: how for number, how in self.written.items() if number // 64 != each.page}
                    self.written = {**kept, **each.shuffles}
                    new += self.core.handle(ev.EpochsWritten(tuple(each.shuffles)), self.now)
        self.core.validate()
        return done

    def _join(self, reader: Reader) -> None:
        self.sessions += 1
        done = self._send(reader.start(self.sessions))
        admitted = next(each for each in done if isinstance(each, ev.Admitted) and each.session == self.sessions)
        if reader.had:
            by = admitted.cursor - (reader.cursor or 0)
            assert reader.known is not None
            reader.known = reader.known[0] + by // BLOCKS, reader.known[1]
        reader.cursor, reader.own = admitted.cursor, admitted.own_epoch

    def _read(self, reader: Reader) -> None:
        """Take the reader's next block, or rejoin first if its session has ended."""
        member = self.core.consumers.session(reader.name, reader.session)
        if member is None:
            self._join(reader)
        assert reader.cursor is not None
        at, own = reader.cursor, reader.own
        began = own.first if at < own.end else own.end
        done = self._send(ev.Ask(reader.name, reader.session, at, at, at, began=began))
        for each in done:
            if isinstance(each, ev.Deliver) and (each.consumer, each.session) == (reader.name, reader.session):
                self._take(reader, each.blocks[0])

    def _take(self, reader: Reader, block: int) -> None:
        if not reader.had:
            reader.own = OwnEpoch.at(block, BLOCKS, SAMPLES)
        how = self.core.epochs.shuffle_of(block)
        if reader.trial is not None:
            first = self.orders.setdefault(how.epoch, how)
            told = f"{reader.name} has epoch {how.epoch} as {how.text}, another had it as {first.text}"
            assert how == first, told
            self.cut += bool(how.cuts)
        reader.had += ORDER.sample_ids(block, how).tolist()
        reader.cursor, reader.known = block + 1, (block // BLOCKS, how)
        if reader.cursor == reader.own.end:
            assert sorted(reader.had) == [*range(ORDER.num_samples)], f"{reader.name} had {sorted(reader.had)}"
            reader.had = []
            if reader.trial is None:
                self._send(ev.Leave(reader.name, reader.session))
                self.others.remove(reader)

    def _step(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.0, 0.2, 1.0])
        self._send(ev.Tick())
        luck = rng.random()
        if luck < 0.02:
            self._begin()
        elif luck < 0.05:
            self.away[rng.choice(self.ranks).name] = self.now + rng.choice([5.0, 60.0])
        elif luck < 0.2 and len(self.others) < 2:
            self.names += 1
            self.others.append(Reader(f"n{self.names}"))
        elif luck < 0.5 and self.others:
            self._read(rng.choice(self.others))
        else:
            ranks = [rank for rank in self.ranks if self.away.get(rank.name, 0.0) <= self.now]
            if ranks:
                self._read(rng.choice(ranks))

    def run(self) -> None:
        for _ in range(STEPS):
            self._step()


def test_ranks_have_each_epoch_in_the_same_order() -> None:
    cut = 0
    for seed in range(60):
        schedule = Schedule(seed)
        schedule.run()
        cut += schedule.cut
    assert cut > 300, "blocks that ranks had of epochs with cuts"
    assert not any(epoch >= ASIDE for epoch in schedule.orders)


def test_they_part_if_a_coordinators_successor_does_not_know_what_was_written_down() -> None:
    def run_some() -> None:
        for seed in range(150):
            Schedule(seed, writes=False).run()

    with pytest.raises(AssertionError, match=r"^t\[\d\] has epoch \d+ as .*, another had it as "):
        run_some()
