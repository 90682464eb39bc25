"""A consumer's call becomes a valid event or an error for that consumer alone; it never breaks the feed for others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from mbaas.core import calls
from mbaas.core import events as ev
from mbaas.core.layout import StagingLimits
from mbaas.core.state import MOST_AHEAD_EPOCHS, StagingState
from mbaas.errors import ConfigError
from mbaas.messages import (
    MOST_NAME,
    BlockCall,
    ConsumerName,
    ConsumerReport,
    EpochLedger,
    JoinRequest,
    RankReport,
    ReadBytes,
    Resumption,
    Start,
    UnreadablePart,
)
from mbaas.order import ASIDE, OwnEpoch, SampleOrder, Shuffle
from mbaas.placement import BlockPart
from mbaas.settings import Timeouts

BLOCKS = 5
LEASE_S = 20.0

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.integers(), max_size=3), st.sampled_from([10**5000, -(10**5000), 2**62, 2**63, float("nan"), object()]),
)  # fmt: skip
NUMBERS = st.integers(-2, 3 * BLOCKS)
FAR = st.sampled_from([BLOCKS << 20, BLOCKS * (ASIDE - 1), BLOCKS * ASIDE])
VALUES = st.one_of(NUMBERS, NUMBERS, NUMBERS, ANYTHING, FAR)
NAMES = st.one_of(st.sampled_from(["bad", "worse"]), st.sampled_from(["bad", "worse", "bad[0]", "good[1]"]), ANYTHING)
WHO = st.one_of(
    st.sampled_from(
        [ConsumerName("bad"), ConsumerName("worse"), ConsumerName("bad", 0, 2), ConsumerName("good", 1, 2)]
    ),
    st.builds(ConsumerName, st.sampled_from(["bad", "worse"]) | ANYTHING, VALUES, VALUES),
    ANYTHING,
)
TRUTHS = st.one_of(st.booleans(), st.booleans(), ANYTHING)
PARTS = st.lists(st.one_of(st.builds(UnreadablePart, VALUES, VALUES, VALUES), ANYTHING), max_size=3) | ANYTHING


@st.composite
def resumptions(draw: st.DrawFn) -> Any:
    """Resumptions that are plausible, or wrong in one value."""
    own = OwnEpoch.at(draw(st.integers(0, 3 * BLOCKS)), BLOCKS, 1)
    start = draw(st.integers(own.first, own.end - 1))
    epoch = draw(st.sampled_from([(start - 1) // BLOCKS, start // BLOCKS]))
    cuts = draw(st.sets(st.integers(1, BLOCKS - 1), max_size=2))
    base = Shuffle(draw(st.integers(0, 3)))
    shuffle = Shuffle(epoch, tuple(sorted(cuts)), base if cuts else None)
    found = Resumption(start, own, epoch, shuffle, taken=draw(st.booleans()))
    if draw(st.integers(0, 3)):
        return found
    field = draw(st.sampled_from(["start", "own_epoch", "epoch", "shuffle", "taken"]))
    return structs.replace(
        found, **{field: draw(st.one_of(ANYTHING, NUMBERS, st.just(Shuffle(2)), st.just(OwnEpoch(1, 2))))}
    )


STARTS = st.builds(Start, VALUES | st.none(), TRUTHS, TRUTHS, st.none() | resumptions() | ANYTHING)

MOVES = st.one_of(
    st.tuples(st.just("join"), st.builds(JoinRequest, WHO, STARTS, st.just("n0") | ANYTHING, VALUES)),
    st.tuples(st.just("join"), ANYTHING | st.builds(JoinRequest, WHO, ANYTHING)),
    st.tuples(st.just("ask"), NAMES, VALUES, VALUES, VALUES, VALUES, VALUES, VALUES, VALUES | st.none(),
              st.tuples(VALUES, VALUES) | st.none() | ANYTHING, PARTS),
    st.tuples(st.just("hand_back"), NAMES, VALUES, VALUES, VALUES, VALUES),
    st.tuples(st.just("heartbeat"), NAMES, VALUES, VALUES, VALUES),
    st.tuples(st.just("leave"), NAMES, VALUES | st.none(), VALUES),
    st.tuples(st.just("announce"), st.lists(NAMES, max_size=2) | ANYTHING, VALUES),
    st.tuples(st.just("is_given_up"), VALUES, st.lists(st.tuples(VALUES, VALUES) | ANYTHING, max_size=2) | ANYTHING),
    st.tuples(st.just("work")), st.tuples(st.just("work")), st.tuples(st.just("good")), st.tuples(st.just("tick")),
)  # fmt: skip


GOOD = "good[0]"


def joining(block: Any, name: Any = "bad", resumed: Any = None) -> tuple[str, JoinRequest]:
    return "join", JoinRequest(ConsumerName(name), Start(block, resumed=resumed))


def plain(value: Any) -> Any:
    """The value as `BlockCall.plain` sends it: lists, without types of this project."""
    if isinstance(value, UnreadablePart):
        return [value.block, value.part, value.task]
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


class Service:
    """The call handling of a coordinator without Ray: the core, a worker, and one well-behaved consumer.

    Args:
        trial: trial whose rank the good consumer is; None if the consumer is a trial.

    Attributes:
        got: blocks delivered to the good consumer.
        refused: messages of the errors that calls raised.
    """

    def __init__(self, trial: str | None = None) -> None:
        limits = StagingLimits(
            budget_bytes=40, ahead_blocks=3, timeouts=Timeouts(lease_s=LEASE_S, patience_s=5.0), max_deaths=3
        )
        cut = lambda block, _: (BlockPart("n0", 1), BlockPart("n1", 1))[: 1 + block % 2]  # noqa: E731
        self.core = StagingState(limits, BLOCKS, lambda block: 10, cut)
        self.trial = trial
        self.order = SampleOrder(BLOCKS, 0, 1)
        self.now, self.sessions = 0.0, 0
        self.refused: list[str] = []
        self.tasks: list[int] = []
        self.got: list[int] = []
        self.cursor = 0
        self.waits = False
        self.send(ev.WorkerUp("w", 2, "n0"))
        self.join_good(0)

    def join_good(self, start: int) -> None:
        self.sessions += 1
        self.session, self.waits = self.sessions, False
        name = ConsumerName(GOOD) if self.trial is None else ConsumerName(self.trial, 0, 2)
        self.send(calls.join(JoinRequest(name, Start(start)), self.session, order=self.order))

    def send(self, event: ev.Event) -> None:
        for instruction in self.core.handle(event, self.now):
            match instruction:
                case ev.Prepare():
                    self.tasks.append(instruction.task)
                case ev.Deliver(consumer=name) if name == GOOD:
                    self.got += instruction.blocks
                    self.cursor, self.waits = instruction.blocks[-1] + 1, False
                case ev.RemoveConsumer(consumer=name) if name == GOOD:
                    self.join_good(self.cursor)
        self.core.validate()

    def call(self, move: tuple[Any, ...]) -> None:
        """Mirror `ConsumerApi`: check all arguments, then send."""
        kind, *sent = move
        match kind:
            case "join":
                self.sessions += 1
                reach = self.core.out_of_reach
                self.send(calls.join(*sent, self.sessions, order=self.order, out_of_reach=reach))
            case "ask":
                first, others = sent[:6], [*sent[6:-1], *(0, None, None)[len(sent) - 7 :]]
                number, began, unheld = others
                sent = [*first, 1.0, plain(sent[-1]), number, began, plain(unheld)]
                event, unreadable, _ = calls.block_call(sent)
                calls.within_reach("cursor", event.cursor, self.core.out_of_reach)
                for part in unreadable:
                    self.send(part)
                self.send(event)
            case "hand_back":
                event = calls.hand_back(*sent)
                calls.within_reach("cursor", event.cursor, self.core.out_of_reach)
                self.send(event)
            case "announce":
                for event in calls.announce(*sent):
                    self.send(event)
            case "is_given_up":
                block, parts = calls.made_parts(*sent)
                assert all(isinstance(self.core.window.has(block, part, task), bool) for part, task in parts)
            case _:
                self.send(getattr(calls, kind)(*sent))

    def play(self, move: tuple[Any, ...]) -> None:
        self.now += 0.5
        match move[0]:
            case "work":
                self.work()
            case "good":
                self.ask_good()
            case "tick":
                self.now += 5.0
                self.send(ev.Tick())
            case _:
                try:
                    self.call(move)
                except ConfigError as error:
                    self.refused.append(str(error))

    def work(self) -> None:
        if self.tasks:
            self.send(ev.TaskEnded(self.tasks.pop(0)))

    def ask_good(self) -> None:
        if self.waits:
            self.send(calls.heartbeat(GOOD, self.session, self.cursor, self.cursor))
        else:
            self.waits = True  # set first: the answer may arrive immediately
            self.send(calls.ask(GOOD, self.session, self.cursor, self.cursor, self.cursor))

    def finish(self) -> None:
        """Silence all other consumers; the good one then receives two whole epochs, in order and once."""
        for _ in range(200):
            self.now += 1.0
            self.ask_good()
            self.work()
            self.send(ev.Tick())
            if len(self.got) >= 2 * BLOCKS:
                return
        raise AssertionError(f"it was given {self.got} only: {self.core.explain_wait(GOOD)}")


@example(None, [joining(7)])  # the good consumer moves ahead to it
@example(None, [("announce", [], 1)])
@given(st.sampled_from([None, "good"]), st.lists(MOVES, max_size=40))
@settings(max_examples=600, deadline=None)
def test_no_value_that_a_consumer_sends_breaks_the_feed_or_costs_others_a_block(trial, moves):
    service = Service(trial)
    for move in moves:
        service.play(move)
    service.finish()
    epochs = [service.got[first : first + BLOCKS] for first in range(0, len(service.got), BLOCKS)]
    begins = [epoch[0] // BLOCKS for epoch in epochs]
    if trial is None:  # it may skip ahead, to share an epoch with a consumer that starts there
        assert begins == sorted(set(begins))
    else:
        assert begins == [*range(len(epochs))]
    assert epochs == [[*range(n * BLOCKS, (n + 1) * BLOCKS)][: len(e)] for n, e in zip(begins, epochs, strict=True)]
    assert all(" must " in sentence and ", got " in sentence for sentence in service.refused)


def test_the_moves_of_the_property_reach_the_core_as_well():
    """Otherwise the property could hold because every call is refused."""
    service = Service()
    for move in [joining(2), ("ask", "bad", 2, 2, 2, 2, 1, []), ("leave", "bad", None, 1)]:
        service.play(move)
    assert service.refused == []
    assert "reservation 0" in service.core.consumers.by_name
    resumed = Resumption(3, OwnEpoch(2, 7, 2), 0, Shuffle(0, (2,), Shuffle(3)))
    service.play(joining(3, resumed=resumed))
    assert service.refused == []
    assert service.core.epochs.is_aside(service.core.consumers.by_name["bad"].cursor)


@pytest.mark.parametrize("part", [1, 2, 2**62])
def test_a_part_that_a_block_does_not_have_is_neither_lost_nor_there(part):
    service = Service()
    service.ask_good()
    service.work()
    assert service.got == [0], "block 0 has one part"
    service.play(("ask", "bad", 1, 0, 0, 0, 1, [UnreadablePart(0, part, 0)]))
    service.play(("is_given_up", 0, [(part, 0)]))
    assert service.refused == []
    service.finish()


def test_nobody_takes_the_feed_to_numbers_that_others_cannot_use():
    """Newcomers would start after a position far beyond all other epochs, and finally reach the `ASIDE` range."""
    service, reach = Service(), MOST_AHEAD_EPOCHS * BLOCKS
    first = reach + BLOCKS
    far = Resumption(first + 1, OwnEpoch.at(first, BLOCKS, 1), MOST_AHEAD_EPOCHS + 1, Shuffle(MOST_AHEAD_EPOCHS + 1))
    for move in (
        joining(reach + BLOCKS),
        joining(BLOCKS * (ASIDE - 1)),
        joining(0, resumed=far),
        ("ask", "bad", 1, reach + BLOCKS, 0, 0, 1, 1, None, None, []),
        ("hand_back", "bad", 1, reach + BLOCKS, 0),
    ):
        service.play(move)
    wrong = rf"(start|cursor) must be a block below {reach + BLOCKS}, far beyond which .*, got \d+"
    assert [bool(re.match(f"(resumed.)?{wrong}", sentence)) for sentence in service.refused] == [True] * 5
    service.play(joining(reach + BLOCKS - 1))
    assert len(service.refused) == 5, "the last that may be"


ORDER = SampleOrder(5, 0, 1)


def resume(**changed: Any) -> ev.Join:
    """Join with a valid resumption except for the changes."""
    resumed = structs.replace(Resumption(4, OwnEpoch(2, 7, 2), 0, Shuffle(0)), **changed)
    return calls.join(JoinRequest(ConsumerName("a"), Start(4, resumed=resumed)), 1, order=ORDER)


def join(name: Any = "a", block: Any = 2, **start: Any) -> ev.Join:
    who = ConsumerName(name) if isinstance(name, str) else name
    return calls.join(JoinRequest(who, Start(block, **start)), 1, order=ORDER)


def called(**changed: Any) -> object:
    """A valid call for blocks, except for the changes."""
    right = BlockCall("a", 1, 1, 1, 1, 1, 0.5, (), 1, 1, None).plain()
    named = dict(zip(BlockCall.__struct_fields__, right, strict=True))
    return calls.block_call([*(named | changed).values()])


def nested(levels: int) -> Shuffle:
    shuffle = Shuffle(0)
    for _ in range(levels):
        shuffle = Shuffle(0, (2,), shuffle)
    return shuffle


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: join(block=-3), r"start must be in \[0, 4611686018427387904\], got -3"),
        (lambda: join(block=2.5), "start must be a whole number, got 2.5"),
        (lambda: join(block=True), "start must be a whole number, got True"),
        (lambda: join(flexible="yes"), "flexible must be True or False, got 'yes'"),
        (lambda: join(now="no"), "now must be True or False, got 'no'"),
        (lambda: join(7), "a consumer must be named by a ConsumerName, got 7"),
        (lambda: join(ConsumerName(7)), "a consumer's name must be text, got 7"),  # type: ignore[arg-type]
        (lambda: join("a\nb"), r"must be 1 to 500 printable characters, got 'a\\nb'"),
        (lambda: join(""), "must be 1 to 500 printable characters, got ''"),
        (lambda: join(ConsumerName("a", 2, 2)), r"rank must be in \[0, 1\], got 2"),
        (lambda: join(ConsumerName("a" * 499, 1, 2)), "must be 1 to 500 printable characters, got 'a"),
        (lambda: calls.join("a", 1, order=ORDER), "a consumer must join by a JoinRequest, got 'a'"),
        (
            lambda: calls.join(JoinRequest(ConsumerName("a"), Start(), born=-1), 1, order=ORDER),
            r"born must be in \[0, 4611686018427387904\], got -1",
        ),
        (lambda: resume(own_epoch=(0, 5, 0)), "resumed must be a Resumption"),
        (lambda: resume(own_epoch=OwnEpoch(2, 7, 9)), r"resumed.own_epoch.begin must be in \[0, 4\], got 9"),
        (lambda: resume(own_epoch=OwnEpoch(2, 7, 3)), "must begin in the block of position 3, got block 2"),
        (lambda: resume(own_epoch=OwnEpoch(2, 8, 2)), "resumed.own_epoch must have 5 blocks, got OwnEpoch"),
        (lambda: resume(start=7), r"resumed.start must be in \[2, 6\], got 7"),
        (
            lambda: resume(epoch=3, shuffle=Shuffle(3)),
            "resumed.epoch must be that of block 4 or of the one before, got 3",
        ),
        (lambda: resume(shuffle=Shuffle(1)), "resumed.shuffle must be of epoch 0, got one of epoch 1"),
        (lambda: resume(shuffle=None), "a shuffle must be a Shuffle, got None"),
        (lambda: resume(shuffle=Shuffle(0, (5,), Shuffle(3))), r"shuffle.cuts must be in \[1, 4\], got 5"),
        (lambda: resume(shuffle=nested(200)), "a shuffle must have at most 128 levels, got 129"),
        (lambda: calls.ask("a", 1, 10**5000, 0, 0), "cursor must be in .*, got a value of type int"),
        (lambda: calls.ask("a", 1, 0, 0, 0, 0), r"want must be in \[1, 10000\], got 0"),
        (lambda: calls.block_call(("a", 1)), r"a call for blocks must be a list of 11 values, got \('a', 1\)"),
        (lambda: calls.block_call([1] * 12), "a call for blocks must be a list of 11 values, got "),
        (
            lambda: called(unreadable=[[1, 2]]),
            r"unreadable must hold lists of a block, a part and its task, got \[1, 2\]",
        ),
        (lambda: called(unreadable=[[1, 2, "x"]]), "task must be a whole number, got 'x'"),
        (lambda: called(unheld=[1]), r"unheld must be two block numbers, got \(1,\)"),
        (lambda: called(cursor=2.5), "cursor must be a whole number, got 2.5"),
        (lambda: calls.poll_s(float("nan")), r"poll_s must be in \[0, 60\], got nan"),
        (lambda: calls.unreadable([(1, 2, 3)]), r"unreadable must hold UnreadablePart values, got \(1, 2, 3\)"),
        (lambda: calls.made_parts(1, [(1, 2, 3)]), r"parts must hold pairs of a part's number and its task, got"),
        (lambda: calls.announce("abc", 0), "consumers must be a list, got 'abc'"),
        (lambda: calls.announce(["a"], 10**6), r"others must be in \[0, 10000\], got 1000000"),
        (lambda: calls.announce([], 2), "others must be 0 where no consumer is named, got 2"),
        (lambda: calls.thing(17), 'a thing is named by text, such as "trial-3" or "block 17", got 17'),
        (lambda: calls.thing("block " + "9" * 5000), "a thing's name has at most 500 characters, got 5,006"),
    ],
)
def test_an_error_names_the_field_and_says_what_it_is_and_what_it_must_be(call: Callable[[], object], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        call()


LEDGER = EpochLedger(0, 0, 5, 2**64 - 1, 5, 1)
REPORT = ConsumerReport("loader", 5, 4, 1.0, 0.5, 0.1, 2, ReadBytes(3, 4), (LEDGER,))


def test_a_report_that_fits_comes_through_as_it_is():
    assert calls.report(REPORT) is REPORT


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": "many"},
        {"samples": -1},
        {"step_s": float("nan")},
        {"wait_s": float("inf")},
        {"read_bytes": None},
        {"read_bytes": ReadBytes(3, 4.5)},
        {"loader": b""},
        {"ledgers": (LEDGER, None)},
        {"ledgers": (replace(LEDGER, epoch=0.5),)},
        {"ledgers": (replace(LEDGER, id_hash=2**64),)},
        {"ledgers": None},
        {"first_ledger": -1},
    ],
    ids=str,
)
def test_a_report_whose_numbers_cannot_be_added_up_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"report.{next(iter(wrong))}"):
        calls.report(replace(REPORT, **wrong))


RANK_REPORT = RankReport(ConsumerName("trial", 1, 2), 64, 5, "n0", 0, True)


def test_a_rank_report_that_fits_comes_through_as_it_is():
    assert calls.rank_report(RANK_REPORT) is RANK_REPORT


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "trial"},
        {"name": ConsumerName("trial", 2, 2)},
        {"name": ConsumerName("trial", 0, 10**12)},
        {"batch_size": 0},
        {"session": None},
        {"cursor": -1},
        {"floats": 1},
        {"node": 3},
        {"aside": -1},
    ],
    ids=str,
)
def test_a_rank_report_that_cannot_be_is_refused(wrong):
    """A world size of 10**12 alone would occupy the coordinator for hours."""
    with pytest.raises(ConfigError):
        calls.rank_report(structs.replace(RANK_REPORT, **wrong))


def test_bounds_are_included():
    assert calls.number("epoch_s", 0) == 0
    assert calls.number("epoch_s", 0.5) == 0.5
    with pytest.raises(ConfigError, match=r"epoch_s must be in \[0, .*\], got -1e-09"):
        calls.number("epoch_s", -1e-9)
    with pytest.raises(ConfigError, match="epoch_s must be a number, got True"):
        calls.number("epoch_s", True)
    assert calls.made_parts(3, [(0, 5), (2, -1)]) == (3, [(0, 5), (2, -1)])
    assert len(calls.unreadable([UnreadablePart(0, 0, 0)] * calls.MOST_WANTED)) == calls.MOST_WANTED
    with pytest.raises(ConfigError, match=f"unreadable must hold at most {calls.MOST_WANTED} values"):
        calls.unreadable([UnreadablePart(0, 0, 0)] * (calls.MOST_WANTED + 1))


def test_what_fits_is_an_event_with_just_these_values():
    rank = JoinRequest(ConsumerName("a", 1, 2), Start(None, flexible=True), "n0", 5)
    joined = ev.Join("a[1]", 3, None, True, trial="a", world_size=2, node="n0", born=5)
    assert calls.join(rank, 3, order=ORDER) == joined
    alone = JoinRequest(ConsumerName("a"), Start(8))
    assert calls.join(alone, 3, order=ORDER) == ev.Join("a", 3, 8, trial="a")
    assert calls.ask("a", 1, 5, 3, 4, 2, 9) == ev.Ask("a", 1, cursor=5, released=3, done=4, want=2, number=9)
    parts = UnreadablePart(1, 2, 3), UnreadablePart(0, 0, -1)
    sent = BlockCall("a", 1, 5, 3, 4, 2, 0.5, parts, 9, 7, (6, 8)).plain()
    asked = ev.Ask("a", 1, cursor=5, released=3, done=4, want=2, number=9, began=7, unheld=(6, 8))
    assert calls.block_call(sent) == (asked, [*parts], 0.5)
    assert calls.block_call(BlockCall("a", 1, 5, 3, 4, 2, 0.5, (), 9, None, None).plain()) == (
        calls.ask("a", 1, 5, 3, 4, 2, 9), [], 0.5
    )  # fmt: skip
    assert calls.hand_back("a", 1, 5, 3, 9) == ev.HandBack("a", 1, cursor=5, released=3, number=9)
    assert calls.heartbeat("a", 1, 3, 4) == ev.Heartbeat("a", 1, released=3, done=4)
    assert calls.leave("a", None, 3) == ev.Leave("a", None, 3)
    assert calls.leave("a", 1, 0) == ev.Leave("a", 1, 0)
    assert calls.announce(["a", "b"], 3) == [ev.Announce("a"), ev.Announce("b", others=3)]
    assert calls.unreadable((UnreadablePart(1, 2, 3), UnreadablePart(0, 0, -1))) == [
        UnreadablePart(1, 2, 3),
        UnreadablePart(0, 0, -1),
    ]
    assert calls.poll_s(0.5) == 0.5


def renamed(trial="trial", rank=1, size=2, **changes):
    return structs.replace(RANK_REPORT, name=ConsumerName(trial, rank, size), **changes)


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda value: calls.name("a" * value), MOST_NAME),
        (lambda value: calls.whole("start", value), calls.MOST_NUMBER),
        (lambda value: calls.ask("a", 1, 0, 0, 0, value), calls.MOST_WANTED),
        (lambda value: calls.poll_s(value), int(calls.MOST_POLL_S)),
        (lambda value: calls.report(replace(REPORT, loader="a" * value)), MOST_NAME),
        (lambda value: calls.report(replace(REPORT, ledgers=(LEDGER,) * value)), calls.MOST_WANTED),
        (lambda value: calls.rank_report(structs.replace(RANK_REPORT, node="a" * value)), MOST_NAME),
        (lambda value: calls.rank_report(renamed(size=value)), calls.MOST_RANKS),
        (lambda value: calls.rank_report(renamed(rank=value)), 1),
        (lambda value: calls.rank_report(structs.replace(RANK_REPORT, aside=value)), calls.MOST_NUMBER),
    ],
)
def test_the_largest_that_fits_is_taken_and_one_more_is_not(call, most):
    call(most)
    with pytest.raises(ConfigError):
        call(most + 1)


@pytest.mark.parametrize(
    ("call", "least"),
    [
        (lambda value: calls.name("a" * value), 1),
        (lambda value: calls.whole("start", value), 0),
        (lambda value: calls.ask("a", 1, 0, 0, 0, value), 1),
        (lambda value: calls.unreadable([UnreadablePart(0, 0, value)]), -1),
        (lambda value: calls.made_parts(0, [(0, value)]), -1),
        (lambda value: calls.rank_report(structs.replace(RANK_REPORT, batch_size=value)), 1),
        (lambda value: calls.rank_report(renamed(rank=0, size=value)), 1),
        (lambda value: calls.rank_report(structs.replace(RANK_REPORT, aside=value)), 0),
    ],
)
def test_the_smallest_that_fits_is_taken_and_one_less_is_not(call, least):
    call(least)
    with pytest.raises(ConfigError):
        call(least - 1)


@pytest.mark.parametrize("field", ["samples", "prepared", "wait_s", "fetch_stall_s", "peer_stall_s", "step_s"])
def test_every_figure_of_a_report_is_checked(field):
    with pytest.raises(ConfigError, match=f"report.{field} must be in"):
        calls.report(replace(REPORT, **{field: -1}))


@pytest.mark.parametrize("field", ["local", "remote"])
def test_every_figure_of_what_was_read_is_checked(field):
    with pytest.raises(ConfigError, match=f"report.read_bytes.{field} must be in"):
        calls.report(replace(REPORT, read_bytes=replace(REPORT.read_bytes, **{field: -1})))


@pytest.mark.parametrize(
    "field", ["epoch", "feed_epoch", "samples", "expected_samples", "id_hash", "expected_id_hash", "seconds"]
)
def test_every_figure_of_a_ledger_is_checked(field):
    with pytest.raises(ConfigError, match=f"report.ledgers.{field} must be in"):
        calls.report(replace(REPORT, ledgers=(replace(LEDGER, **{field: -1}),)))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        structs.replace(RANK_REPORT, name=ConsumerName("a\nb", 1, 2)),
        structs.replace(RANK_REPORT, aside="far"),
    ],
)
def test_what_is_inside_of_a_rank_report_is_checked(wrong):
    with pytest.raises(ConfigError):
        calls.rank_report(wrong)


def test_what_is_no_report_is_refused():
    with pytest.raises(ConfigError, match="report must be a ConsumerReport, got 'fine'"):
        calls.report("fine")
