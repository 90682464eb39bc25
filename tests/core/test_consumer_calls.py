"""A consumer's call becomes a valid event or an error for that consumer alone; it never breaks the feed for others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from mbaas.calls import encoding
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import calls, explain
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import MOST_AHEAD_EPOCHS, StagingState
from mbaas.errors import ConfigError
from mbaas.samples.order import ASIDE, MOST_NUMBER, OwnEpoch, SampleOrder, Shuffle
from mbaas.samples.placement import BlockPart
from mbaas.settings import Timeouts
from mbaas.wire.blocks import UnreadablePart
from mbaas.wire.consumers import (
    MOST_NAME,
    MOST_POLL_S,
    MOST_RANKS,
    MOST_WANTED,
    BlockCall,
    ConsumerName,
    ConsumerReport,
    JoinRequest,
    ReadBytes,
    Resumption,
    Start,
)
from mbaas.wire.ranks import RankCall, RankReport
from mbaas.wire.samples import EpochLedger

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
    st.tuples(st.just("is_given_up"), PARTS),
    st.tuples(st.just("work")), st.tuples(st.just("work")), st.tuples(st.just("good")), st.tuples(st.just("tick")),
)  # fmt: skip


GOOD = "good[0]"


def joining(block: Any, name: Any = "bad", resumed: Any = None) -> tuple[str, JoinRequest]:
    return "join", JoinRequest(ConsumerName(name), Start(block, resumed=resumed))


def sent(value: Any, kind: Any) -> Any:
    """Return a call as the coordinator decodes it.

    Raises:
        UnsendableError: msgpack has no such value.
    """
    try:
        encoded = encoding.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise UnsendableError from error
    return encoding.decoded(encoded, kind)


class UnsendableError(Exception):
    """A client with this value makes no call."""


def fields(kind: Any, *values: Any) -> dict[str, Any]:
    """Return a Struct's fields with any values, as a faulty client may send them."""
    return dict(zip(kind.__struct_fields__, values, strict=False))


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
        kind, *values = move
        match kind:
            case "join":
                self.sessions += 1
                reach, request = self.core.out_of_reach(), sent(*values, JoinRequest)
                self.send(calls.join(request, self.sessions, order=self.order, out_of_reach=reach))
            case "ask":
                *asked, parts = values
                call = {"ask": fields(ev.Ask, *asked), "poll_s": 1.0, "unreadable": parts}
                decoded = sent(call, BlockCall)
                calls.within_reach("cursor", decoded.ask.cursor, self.core.out_of_reach())
                for part in decoded.unreadable:
                    self.send(part)
                self.send(decoded.ask)
            case "hand_back":
                event = sent(fields(ev.HandBack, *values), ev.HandBack)
                calls.within_reach("cursor", event.cursor, self.core.out_of_reach())
                self.send(event)
            case "announce":
                for event in calls.announce(*values):
                    self.send(event)
            case "is_given_up":
                for part in sent(*values, tuple[UnreadablePart, ...]):
                    assert isinstance(self.core.window.has(part.block, part.part, part.task), bool)
            case "heartbeat":
                self.send(sent(fields(ev.Heartbeat, *values), ev.Heartbeat))
            case "leave":
                self.send(sent(fields(ev.Leave, *values), ev.Leave))
            case _:
                raise AssertionError(kind)

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
                except UnsendableError:
                    pass

    def work(self) -> None:
        if self.tasks:
            self.send(ev.TaskEnded(self.tasks.pop(0)))

    def ask_good(self) -> None:
        if self.waits:
            self.send(ev.Heartbeat(GOOD, self.session, self.cursor, self.cursor))
        else:
            self.waits = True  # set first: the answer may arrive immediately
            self.send(ev.Ask(GOOD, self.session, self.cursor, self.cursor, self.cursor))

    def finish(self) -> None:
        """Silence all other consumers; the good one then receives two whole epochs, in order and once."""
        for _ in range(200):
            self.now += 1.0
            self.ask_good()
            self.work()
            self.send(ev.Tick())
            if len(self.got) >= 2 * BLOCKS:
                return
        raise AssertionError(f"it was given {self.got} only: {explain.wait(self.core, GOOD)}")


@pytest.mark.slow
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
    service.play(("is_given_up", [UnreadablePart(0, part, 0)]))
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
    request = sent(JoinRequest(ConsumerName("a"), Start(4, resumed=resumed)), JoinRequest)
    return calls.join(request, 1, order=ORDER)


def join(name: Any = "a", block: Any = 2, born: int = 0, **start: Any) -> ev.Join:
    who = ConsumerName(name) if isinstance(name, str) else name
    request = sent(JoinRequest(who, Start(block, **start), born=born), JoinRequest)
    return calls.join(request, 1, order=ORDER)


CALL = BlockCall(ev.Ask("a", 1, 1, 1, 1, 1, 1, 1, (0, 1)), 0.5, (UnreadablePart(1, 2, 3),))


def called(poll_s: Any = 0.5, unreadable: Any = (), **changed: Any) -> BlockCall:
    """A valid call for blocks, except for the changes."""
    ask = structs.asdict(CALL.ask) | changed
    return sent({"ask": ask, "poll_s": poll_s, "unreadable": unreadable}, BlockCall)


def nested(levels: int) -> Shuffle:
    shuffle = Shuffle(0)
    for _ in range(levels):
        shuffle = Shuffle(0, (2,), shuffle)
    return shuffle


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: join(block=-3), "start.block must be .* >= 0, got -3"),
        (lambda: join(block=2.5), r"start.block must be `int \| null`, got 2.5"),
        (lambda: join(block=True), r"start.block must be `int \| null`, got True"),
        (lambda: join(flexible="yes"), "flexible must be `bool`, got 'yes'"),
        (lambda: join(now="no"), "now must be `bool`, got 'no'"),
        (lambda: join(7), "name must be `object`, got 7"),
        (lambda: join(ConsumerName(7)), "name.trial must be `str`, got 7"),  # type: ignore[arg-type]
        (lambda: join("a\nb"), r"must be 1 to 500 printable characters, got 'a\\nb'"),
        (lambda: join(""), "name.trial must be `str` of length >= 1, got ''"),
        (lambda: join(ConsumerName("a", 2, 2)), r"rank must be in \[0, 1\], got 2"),
        (lambda: join(ConsumerName("a" * 499, 1, 2)), "must be 1 to 500 printable characters, got 'a"),
        (lambda: sent("a", JoinRequest), "JoinRequest must be `object`, got 'a'"),
        (lambda: sent({"name": {"trial": "a"}}, JoinRequest), "JoinRequest must be complete, got {.*field `start`"),
        (lambda: join(born=-1), "born must be `int` >= 0, got -1"),
        (lambda: resume(own_epoch="far"), "start.resumed.own_epoch must be `array`, got 'far'"),
        (lambda: resume(own_epoch=OwnEpoch(2, 7, 9)), r"resumed.own_epoch.begin must be in \[0, 4\], got 9"),
        (lambda: resume(own_epoch=OwnEpoch(2, 7, 3)), "must begin in the block of position 3, got block 2"),
        (lambda: resume(own_epoch=OwnEpoch(2, 8, 2)), "resumed.own_epoch must have 5 blocks, got OwnEpoch"),
        (lambda: resume(start=7), r"resumed.start must be in \[2, 6\], got 7"),
        (
            lambda: resume(epoch=3, shuffle=Shuffle(3)),
            "resumed.epoch must be that of block 4 or of the one before, got 3",
        ),
        (lambda: resume(shuffle=Shuffle(1)), "resumed.shuffle must be of epoch 0, got one of epoch 1"),
        (lambda: resume(shuffle=None), "start.resumed.shuffle must be `array`, got None"),
        (lambda: resume(shuffle=[0, [3, 2], [1]]), r"cuts must ascend, and be above 0, got \(3, 2\)"),
        (lambda: resume(shuffle=Shuffle(0, (5,), Shuffle(3))), r"shuffle.cuts must be in \[1, 4\], got 5"),
        (lambda: resume(shuffle=nested(200)), "a shuffle must have at most 128 levels, got 129"),
        (lambda: called(want=0), "ask.want must be `int` >= 1, got 0"),
        (lambda: called(session=None), "ask.session must be `int`, got None"),
        (lambda: called(cursor=2.5), "ask.cursor must be `int`, got 2.5"),
        (lambda: called(consumer="a\nb"), r"a consumer's name must be 1 to 500 printable characters, got 'a\\nb'"),
        (lambda: sent(["a", 1], BlockCall), r"BlockCall must be `object`, got \['a', 1\]"),
        (lambda: called(unreadable=[[1, 2]]), r"unreadable\[0\] must be `object`, got \[1, 2\]"),
        (
            lambda: called(unreadable=[fields(UnreadablePart, 1, 2, "x")]),
            r"unreadable\[0\].task must be `int`, got 'x'",
        ),
        (lambda: called(unheld=[1]), r"unheld must be `array` of length 2, got \[1\]"),
        (lambda: called(poll_s=float("nan")), "poll_s must be `float` >= 0.0, got nan"),
        (lambda: encoding.decoded(b"\xc1", BlockCall), r"a call must be a BlockCall in msgpack, got b'\\xc1'"),
        (
            lambda: encoding.decoded(encoding.encode(CALL)[:-1], BlockCall),
            "a call must be a BlockCall in msgpack, got b'",
        ),
        (
            lambda: encoding.decoded(
                encoding.encode({"samples": "many", "x": "ab"})[:-2] + b"\xff\xff", ConsumerReport
            ),
            r"samples must be `int`, got b'.*\\xff'",
        ),
        (lambda: encoding.decoded(["a"], BlockCall), r"a call must be a BlockCall in msgpack, got \['a'\]"),  # type: ignore[arg-type]
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
REPORT = ConsumerReport("loader", 5, 4, 1.0, 0.5, 0.1, 2.0, ReadBytes(3, 4), (LEDGER,))


def reported(**changed: Any) -> ConsumerReport:
    return sent(replace(REPORT, **changed), ConsumerReport)


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
        {"ledgers": None},
        {"first_ledger": -1},
    ],
    ids=str,
)
def test_a_report_whose_numbers_cannot_be_added_up_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        reported(**wrong)


def test_a_hash_of_more_than_64_bits_is_never_sent():
    with pytest.raises(UnsendableError):
        reported(ledgers=(replace(LEDGER, id_hash=2**64),))


RANK_REPORT = RankReport(ConsumerName("trial", 1, 2), 64, 5, "n0", 0, True)


def ranked(**changed: Any) -> RankReport:
    found: RankReport = sent(structs.replace(RANK_REPORT, **changed), RankReport)
    calls.consumer_name(found.name)
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "trial"},
        {"name": ConsumerName("trial", 2, 2)},
        {"name": ConsumerName("trial", 0, 10**12)},
        {"name": ConsumerName("a\nb", 1, 2)},
        {"batch_size": 0},
        {"session": None},
        {"cursor": -1},
        {"floats": 1},
        {"node": 3},
        {"aside": -1},
        {"aside": "far"},
    ],
    ids=str,
)
def test_a_rank_report_that_cannot_be_is_refused(wrong):
    """A world size of 10**12 alone would occupy the coordinator for hours."""
    with pytest.raises(ConfigError):
        ranked(**wrong)


def test_bounds_are_included():
    assert calls.number("epoch_s", 0) == 0
    assert calls.number("epoch_s", 0.5) == 0.5
    with pytest.raises(ConfigError, match=r"epoch_s must be in \[0, .*\], got -1e-09"):
        calls.number("epoch_s", -1e-9)
    with pytest.raises(ConfigError, match="epoch_s must be a number, got True"):
        calls.number("epoch_s", True)


def test_what_fits_is_an_event_with_just_these_values():
    rank = JoinRequest(ConsumerName("a", 1, 2), Start(None, flexible=True), "n0", 5)
    joined = ev.Join("a[1]", 3, None, True, trial="a", world_size=2, node="n0", born=5)
    assert calls.join(rank, 3, order=ORDER) == joined
    alone = JoinRequest(ConsumerName("a"), Start(8))
    assert calls.join(alone, 3, order=ORDER) == ev.Join("a", 3, 8, trial="a")
    assert calls.announce(["a", "b"], 3) == [ev.Announce("a"), ev.Announce("b", others=3)]


@pytest.mark.parametrize(
    "call",
    [
        JoinRequest(ConsumerName("a", 1, 2), Start(4, resumed=Resumption(4, OwnEpoch(2, 7, 2), 0, nested(3))), "n0", 5),
        CALL,
        BlockCall(ev.Ask("a", 1, 5, 3, 4), 0.0),
        ev.HandBack("a", 1, cursor=5, released=3, number=9),
        ev.Heartbeat("a", 1, released=3, done=4),
        ev.Leave("a", None, 3),
        ev.Leave("a", 1),
        REPORT,
        RANK_REPORT,
        RankCall(RANK_REPORT, 3, 0.5, nested(2)),
    ],
    ids=lambda call: type(call).__name__,
)
def test_what_fits_comes_through_as_it_is(call: Any):
    found = sent(call, type(call))
    assert found == call
    assert repr(found) == repr(call), "also in fields that are not compared"


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda value: calls.name("a" * value), MOST_NAME),
        (lambda value: called(consumer="a" * value), MOST_NAME),
        (lambda value: join("a" * value), MOST_NAME),
        (lambda value: join(block=value), MOST_NUMBER),
        (lambda value: called(want=value), MOST_WANTED),
        (lambda value: called(poll_s=value), MOST_POLL_S),
        (lambda value: called(unreadable=[UnreadablePart(0, 0, 0)] * value), MOST_WANTED),
        (lambda value: reported(loader="a" * value), MOST_NAME),
        (lambda value: reported(ledgers=(LEDGER,) * value), MOST_WANTED),
        (lambda value: ranked(node="a" * value), MOST_NAME),
        (lambda value: ranked(name=ConsumerName("trial", 1, value)), MOST_RANKS),
        (lambda value: ranked(name=ConsumerName("trial", value, 2)), 1),
        (lambda value: ranked(aside=value), MOST_NUMBER),
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
        (lambda value: called(consumer="a" * value), 1),
        (lambda value: join(block=value), 0),
        (lambda value: called(want=value), 1),
        (lambda value: called(unreadable=[UnreadablePart(0, 0, value)]), -1),
        (lambda value: ranked(batch_size=value), 1),
        (lambda value: ranked(name=ConsumerName("trial", 0, value)), 1),
        (lambda value: ranked(aside=value), 0),
    ],
)
def test_the_smallest_that_fits_is_taken_and_one_less_is_not(call, least):
    call(least)
    with pytest.raises(ConfigError):
        call(least - 1)


@pytest.mark.parametrize("field", ["samples", "prepared", "wait_s", "fetch_stall_s", "peer_stall_s", "step_s"])
def test_every_figure_of_a_report_is_checked(field):
    with pytest.raises(ConfigError, match=f"{field} must be .* got -1"):
        reported(**{field: -1})


@pytest.mark.parametrize("field", ["local", "remote"])
def test_every_figure_of_what_was_read_is_checked(field):
    with pytest.raises(ConfigError, match=f"read_bytes.{field} must be .* got -1"):
        reported(read_bytes=replace(REPORT.read_bytes, **{field: -1}))


@pytest.mark.parametrize(
    "field", ["epoch", "feed_epoch", "samples", "expected_samples", "id_hash", "expected_id_hash", "seconds", "begin"]
)
def test_every_figure_of_a_ledger_is_checked(field):
    with pytest.raises(ConfigError, match=rf"ledgers\[0\].{field} must be .* got -1"):
        reported(ledgers=(replace(LEDGER, **{field: -1}),))


def test_what_is_no_report_is_refused():
    with pytest.raises(ConfigError, match="ConsumerReport must be `object`, got 'fine'"):
        sent("fine", ConsumerReport)


class Middle(NamedTuple):
    """Where a consumer is that began in the middle of block 1 of epoch 1: epochs have 4 blocks, of 10 samples in 3s."""

    start: int = 6
    own: OwnEpoch = OwnEpoch(5, 10, 4)
    epoch: int = 1

    def check(self) -> None:
        value = Resumption(self.start, self.own, self.epoch, Shuffle(self.epoch))
        calls.resumption(value, SampleOrder(10, seed=0, block_samples=3))


@pytest.mark.parametrize(("start", "epoch"), [(5, 1), (7, 1), (8, 1), (8, 2), (9, 2)])
def test_who_began_in_the_middle_of_a_block_is_in_the_epoch_of_its_block_or_at_the_end_of_the_one_before(
    start: int, epoch: int
) -> None:
    Middle(start, epoch=epoch).check()
    for other in {0, 1, 2, 3} - {epoch} - ({1, 2} if start == 8 else set()):
        with pytest.raises(ConfigError, match=f"resumed.epoch must be that of block {start} or of the one before"):
            Middle(start, epoch=other).check()


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (Middle(start=4), r"resumed.start must be in \[5, 9\], got 4"),
        (Middle(start=10), r"resumed.start must be in \[5, 9\], got 10"),
        (Middle(own=OwnEpoch(5, 9, 4)), "resumed.own_epoch must have 5 blocks"),
        (Middle(own=OwnEpoch(5, 10, 3)), "resumed.own_epoch must have 4 blocks"),
        (Middle(own=OwnEpoch(5, 10, 6)), "must begin in the block of position 6, got block 5"),
        (Middle(own=OwnEpoch(5, 10, 10)), r"resumed.own_epoch.begin must be in \[0, 9\], got 10"),
        (Middle(own=OwnEpoch(-3, 2, 4), start=1), "resumed.own_epoch.first must be in .*, got -3"),
        (Middle(epoch=MOST_NUMBER // 4 + 1), f"resumed.epoch must be in .0, {MOST_NUMBER // 4}., got"),
        (Middle(epoch=-1), "resumed.epoch must be in .*, got -1"),
    ],
)
def test_a_place_that_contradicts_itself_is_refused(place: Middle, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        place.check()


def test_cuts_lie_within_an_epoch_in_all_levels_of_a_shuffle() -> None:
    plain = Shuffle(0)
    calls.shuffle(Shuffle(0, (1, 9), Shuffle(0, (9,), plain)), 10)
    for wrong in Shuffle(0, (10,), plain), Shuffle(0, (1,), Shuffle(0, (3, 10), plain)):
        with pytest.raises(ConfigError, match=r"shuffle.cuts must be in \[1, 9\], got 10"):
            calls.shuffle(wrong, 10)
    many = Shuffle(0, tuple(range(1, MOST_WANTED + 2)), plain)
    with pytest.raises(ConfigError, match=r"shuffle.cuts must hold at most"):
        calls.shuffle(many, MOST_NUMBER)


def test_a_shuffle_has_at_most_the_deepest_number_of_levels() -> None:
    """`nested` adds its levels to a plain one."""
    calls.shuffle(nested(calls.DEEPEST - 1), 5)
    with pytest.raises(ConfigError, match=f"at most {calls.DEEPEST} levels, got {calls.DEEPEST + 1}"):
        calls.shuffle(nested(calls.DEEPEST), 5)


@pytest.mark.parametrize("epoch", [ASIDE, ASIDE + 7])
def test_only_an_epoch_aside_may_be_shuffled_like_another_one(epoch: int) -> None:
    """It continues an epoch of the feed, whose shuffle it has; epochs have 4 blocks of up to 3 of 10 samples."""
    order = SampleOrder(10, seed=0, block_samples=3)
    calls.resumption(Resumption(4 * epoch + 2, OwnEpoch.at(4 * epoch, 4, 3), epoch, Shuffle(7)), order)
    last = ASIDE - 1
    with pytest.raises(ConfigError, match=f"resumed.shuffle must be of epoch {last}, got one of epoch 7"):
        calls.resumption(Resumption(4 * last + 2, OwnEpoch.at(4 * last, 4, 3), last, Shuffle(7)), order)


def test_limits_themselves_are_allowed() -> None:
    assert calls.number("x", MOST_NUMBER) == MOST_NUMBER
    assert len(calls.several("x", [0] * MOST_WANTED)) == MOST_WANTED
    assert calls.thing("a" * MOST_NAME) == "a" * MOST_NAME
