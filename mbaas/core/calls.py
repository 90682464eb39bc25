"""Validation of client calls: arbitrary values become events and values that the core can rely on.

A client may be of another version, or have a bug. The core's tables serve all consumers, and a single cursor of 2.5
would end the whole feed. Each call is therefore checked before anything changes; an invalid value raises an error in
that call only.
"""

from __future__ import annotations

from mbaas.core import events as ev
from mbaas.errors import ConfigError, shown
from mbaas.messages import (
    MOST_NAME,
    MOST_SHUFFLED,
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
from mbaas.order import ASIDE, MOST_LEVELS, OwnEpoch, SampleOrder, Shuffle

MOST_NUMBER = 2**62
"""Largest block number, session number or count; at a million blocks per second, reached after 146,000 years."""

MOST_WANTED = 10_000
"""Longest list in a call: requested blocks, unreadable parts, ledgers, announced trials."""

MOST_POLL_S = 60
"""Longest time in seconds that a call may wait for blocks."""

DEEPEST = 4 * MOST_LEVELS
"""Deepest nesting of shuffles in a call. From `MOST_LEVELS` on, no newcomer starts in the middle of an epoch, but a
restored consumer may.
"""

MOST_RANKS = 65_536
"""Largest number of ranks of one trial."""


def join(request: object, session: int, *, order: SampleOrder, out_of_reach: range = range(0)) -> ev.Join:
    """Check a call that opens a session, and return its event.

    Args:
        request: as received from the consumer.
        session: number of the new session, assigned by the service.
        order: order of the feed's samples.
        out_of_reach: see `within_reach`.

    Raises:
        ConfigError: a value is invalid. The message contains its name, the value and the allowed values. All functions
            of this module raise this error.
    """
    if not isinstance(request, JoinRequest) or not isinstance(request.start, Start):
        raise ConfigError(f"a consumer must join by a JoinRequest, got {shown(request)}")
    who, begin = consumer_name(request.name), request.start
    block = None
    if begin.block is not None:
        block = within_reach("start", whole("start", begin.block), out_of_reach)
    resumed = None
    if begin.resumed is not None:
        resumed = resumption(begin.resumed, order)
        within_reach("resumed.start", resumed.start, out_of_reach)
    _node("node", request.node)
    return ev.Join(
        str(who),
        session,
        block,
        _truth("flexible", begin.flexible),
        _truth("now", begin.now),
        resumed,
        trial=who.trial,
        world_size=who.world_size,
        node=request.node,
        born=whole("born", request.born),
    )


def within_reach(field: str, block: int, out_of_reach: range) -> int:
    """Check and return a block where a consumer starts or is; for ``out_of_reach``, see `StagingState.out_of_reach`.

    Newcomers start at the first epoch that was never started. A single consumer far beyond all others would move all
    newcomers there, and could exhaust the block numbers.
    """
    if block in out_of_reach:
        raise ConfigError(
            f"{field} must be a block below {out_of_reach.start}, far beyond which the feed has not come, got {block}"
        )
    return block


def resumption(value: object, order: SampleOrder) -> Resumption:
    """Check and return the position where a consumer resumes inside its epoch."""
    if not isinstance(value, Resumption) or not isinstance(value.own_epoch, OwnEpoch):
        raise ConfigError(f"resumed must be a Resumption, got {shown(value)}")
    own, blocks = value.own_epoch, order.blocks_per_epoch
    whole("resumed.own_epoch.begin", own.begin, most=order.num_samples - 1)
    whole("resumed.epoch", value.epoch, most=MOST_NUMBER // blocks)
    _truth("resumed.taken", value.taken)
    shuffle(value.shuffle, order.num_samples)
    in_mid_block = own.begin % order.block_samples > 0
    # The core relies on these numbers being consistent.
    whole("resumed.own_epoch.first", own.first, most=MOST_NUMBER)
    if own.first % blocks != own.begin // order.block_samples:
        raise ConfigError(f"resumed.own_epoch must begin in the block of position {own.begin}, got block {own.first}")
    if own.end != own.first + blocks + in_mid_block:
        raise ConfigError(f"resumed.own_epoch must have {blocks + in_mid_block} blocks, got {shown(own)}")
    whole("resumed.start", value.start, least=own.first, most=own.end - 1)
    if value.epoch < ASIDE and value.shuffle.epoch != value.epoch:
        raise ConfigError(f"resumed.shuffle must be of epoch {value.epoch}, got one of epoch {value.shuffle.epoch}")
    if value.epoch not in ((value.start - 1) // blocks, value.start // blocks):
        raise ConfigError(f"resumed.epoch must be that of block {value.start} or of the one before, got {value.epoch}")
    return value


def shuffle(value: object, num_samples: int) -> None:
    """Check the shuffle of an epoch."""
    levels = 0
    while value is not None or not levels:
        if not isinstance(value, Shuffle) or not isinstance(value.cuts, tuple):
            raise ConfigError(f"a shuffle must be a Shuffle, got {shown(value)}")
        whole("shuffle.epoch", value.epoch)
        for cut in _several("shuffle.cuts", list(value.cuts)):
            whole("shuffle.cuts", cut, least=1, most=num_samples - 1)
        if list(value.cuts) != sorted({*value.cuts}) or bool(value.cuts) != (value.base is not None):
            raise ConfigError(f"shuffle.cuts must ascend, and need a base, got {shown(value)}")
        levels, value = levels + 1, value.base
        if levels > DEEPEST:
            raise ConfigError(f"a shuffle must have at most {DEEPEST} levels, got {levels}")


def ask(
    consumer: object,
    session: object,
    cursor: object,
    released: object,
    done: object,
    want: object = 1,
    number: object = 0,
    began: object = None,
    unheld: object = None,
) -> ev.Ask:
    """Check a request for blocks, and return its event."""
    if unheld is not None:
        if not isinstance(unheld, tuple) or len(unheld) != 2:
            raise ConfigError(f"unheld must be two block numbers, got {shown(unheld)}")
        unheld = whole("unheld", unheld[0]), whole("unheld", unheld[1])
    return ev.Ask(
        name(consumer),
        whole("session", session),
        whole("cursor", cursor),
        whole("released", released),
        whole("done", done),
        whole("want", want, least=1, most=MOST_WANTED),
        whole("number", number),
        None if began is None else whole("began", began),
        unheld,
    )


def block_call(value: object) -> tuple[ev.Ask, list[UnreadablePart], float]:
    """Check a request for blocks as in `BlockCall.plain`; return its event, unreadable parts and ``poll_s``."""
    if not isinstance(value, list) or len(value) != len(BlockCall.__struct_fields__):
        raise ConfigError(
            f"a call for blocks must be a list of {len(BlockCall.__struct_fields__)} values, got {shown(value)}"
        )
    consumer, session, cursor, released, done, want, wait_s, parts, number, began, unheld = value
    found = []
    for part in _several("unreadable", parts):
        if not isinstance(part, list) or len(part) != len(UnreadablePart.__struct_fields__):
            raise ConfigError(f"unreadable must hold lists of a block, a part and its task, got {shown(part)}")
        found.append(UnreadablePart(*part))
    if isinstance(unheld, list):
        unheld = tuple(unheld)
    event = ask(consumer, session, cursor, released, done, want, number, began, unheld)
    return event, unreadable(found), poll_s(wait_s)


def hand_back(consumer: object, session: object, cursor: object, released: object, number: object = 0) -> ev.HandBack:
    """Check a call that returns blocks delivered ahead, and return its event."""
    return ev.HandBack(
        name(consumer),
        whole("session", session),
        whole("cursor", cursor),
        whole("released", released),
        whole("number", number),
    )


def heartbeat(consumer: object, session: object, released: object, done: object) -> ev.Heartbeat:
    """Check a heartbeat, and return its event."""
    return ev.Heartbeat(name(consumer), whole("session", session), whole("released", released), whole("done", done))


def leave(consumer: object, session: object, successors: object) -> ev.Leave:
    """Check a call that ends a session, and return its event."""
    number = None if session is None else whole("session", session)
    return ev.Leave(name(consumer), number, whole("successors", successors))


def announce(consumers: object, others: object) -> list[ev.Announce]:
    """Check the names of trials that will join soon; return an event for each. ``others`` more will follow soon."""
    more, names = whole("others", others, most=MOST_WANTED), list(map(name, _several("consumers", consumers)))
    if more and not names:
        raise ConfigError(f"others must be 0 where no consumer is named, got {more}")
    # Only with the last one: the named trials first take over existing reservations.
    return [ev.Announce(each, more if number == len(names) else 0) for number, each in enumerate(names, 1)]


def unreadable(parts: object) -> list[UnreadablePart]:
    """Check parts that a consumer could not read, and return them as events."""
    found = []
    for part in _several("unreadable", parts):
        if not isinstance(part, UnreadablePart):
            raise ConfigError(f"unreadable must hold UnreadablePart values, got {shown(part)}")
        found.append(
            UnreadablePart(whole("unreadable.block", part.block), whole("unreadable.part", part.part), _task(part.task))
        )
    return found


def made_parts(block: object, parts: object) -> tuple[int, list[tuple[int, int]]]:
    """Check a block number and pairs (part number, task that prepared it), and return both."""
    found = []
    for part in _several("parts", parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise ConfigError(f"parts must hold pairs of a part's number and its task, got {shown(part)}")
        found.append((whole("part", part[0]), _task(part[1])))
    return whole("block", block), found


def poll_s(value: object) -> float:
    """Check and return the seconds that a call may wait."""
    return number("poll_s", value, most=MOST_POLL_S)


def report(value: object) -> ConsumerReport:
    """Check and return a consumer's report."""
    # The numbers are summed over consumers: a single NaN would make the feed's sums NaN.
    if not isinstance(value, ConsumerReport):
        raise ConfigError(f"report must be a ConsumerReport, got {shown(value)}")
    if not isinstance(value.loader, str) or len(value.loader) > MOST_NAME:
        raise ConfigError(f"report.loader must be text of at most {MOST_NAME} characters, got {shown(value.loader)}")
    for field in ("samples", "prepared", "first_ledger"):
        whole(f"report.{field}", getattr(value, field))
    if not isinstance(value.read_bytes, ReadBytes):
        raise ConfigError(f"report.read_bytes must be ReadBytes, got {shown(value.read_bytes)}")
    for field in ("local", "remote"):
        whole(f"report.read_bytes.{field}", getattr(value.read_bytes, field))
    for field in ("wait_s", "fetch_stall_s", "peer_stall_s", "step_s", "time_to_first_batch_s"):
        number(f"report.{field}", getattr(value, field))
    for ledger in _several("report.ledgers", value.ledgers):
        _check_ledger(ledger)
    return value


def _check_ledger(ledger: object) -> None:
    if not isinstance(ledger, EpochLedger):
        raise ConfigError(f"report.ledgers must hold EpochLedger values, got {shown(ledger)}")
    for field in ("epoch", "feed_epoch", "samples", "expected_samples"):
        whole(f"report.ledgers.{field}", getattr(ledger, field))
    for field in ("id_hash", "expected_id_hash"):
        whole(f"report.ledgers.{field}", getattr(ledger, field), most=2**64 - 1)
    number("report.ledgers.seconds", ledger.seconds)
    whole("report.ledgers.begin", ledger.begin)
    if not isinstance(ledger.shuffled, str) or len(ledger.shuffled) > MOST_SHUFFLED:
        raise ConfigError(
            f"report.ledgers.shuffled must be text of at most {MOST_SHUFFLED} characters, got {shown(ledger.shuffled)}"
        )


def thing(value: object) -> str:
    """Check and return the name of an object whose story is requested."""
    if not isinstance(value, str):
        raise ConfigError(f'a thing is named by text, such as "trial-3" or "block 17", got {shown(value)}')
    if len(value) > MOST_NAME:  # the search for similar names is slow for long ones
        raise ConfigError(f"a thing's name has at most {MOST_NAME} characters, got {len(value):,}")
    return value


def rank_report(value: object) -> RankReport:
    """Check and return the report of a rank of a data-parallel trial."""
    if not isinstance(value, RankReport):
        raise ConfigError(f"a rank must report itself as a RankReport, got {shown(value)}")
    consumer_name(value.name)
    whole("batch_size", value.batch_size, least=1)
    whole("session", value.session)
    whole("cursor", value.cursor)
    _truth("floats", value.floats)
    _node("node", value.node)
    whole("aside", value.aside)
    if value.due is not None:
        whole("due", value.due)
    return value


# ---- single values ----


def name(value: object) -> str:
    """Check and return a consumer's name, which appears in logs, in the status and in errors of other consumers."""
    if not isinstance(value, str):
        raise ConfigError(f"a consumer's name must be text, got {shown(value)}")
    # Line breaks would forge log lines, and lone surrogates cannot be written to a log; both are not printable.
    if not 0 < len(value) <= MOST_NAME or not value.isprintable():
        raise ConfigError(f"a consumer's name must be 1 to {MOST_NAME} printable characters, got {shown(value)}")
    return value


def consumer_name(value: object) -> ConsumerName:
    """Check and return the name of a consumer: its trial and rank."""
    if not isinstance(value, ConsumerName):
        raise ConfigError(f"a consumer must be named by a ConsumerName, got {shown(value)}")
    name(value.trial)
    world_size = whole("world_size", value.world_size, least=1, most=MOST_RANKS)
    whole("rank", value.rank, most=world_size - 1)
    name(str(value))  # includes the rank
    return value


def whole(field: str, value: object, *, least: int = 0, most: int = MOST_NUMBER) -> int:
    """Check and return an integer in [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool):  # bool is a subclass of int
        raise ConfigError(f"{field} must be a whole number, got {shown(value)}")
    if not least <= value <= most:
        raise ConfigError(f"{field} must be in [{least}, {most}], got {shown(value)}")
    return value


def _task(value: object) -> int:
    return whole("task", value, least=-1)  # -1: no task yet


def number(field: str, value: object, *, least: float = 0, most: float = MOST_NUMBER) -> float:
    """Check and return a number in [least, most]."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{field} must be a number, got {shown(value)}")
    if not least <= value <= most:  # also false for NaN
        raise ConfigError(f"{field} must be in [{least}, {most}], got {shown(value)}")
    return value


def _truth(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{field} must be True or False, got {shown(value)}")
    return value


def _node(field: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MOST_NAME:
        raise ConfigError(f"{field} must be the id of a node, got {shown(value)}")


def _several(field: str, value: object, *, most: int = MOST_WANTED) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{field} must be a list, got {shown(value)}")
    if len(value) > most:
        raise ConfigError(f"{field} must hold at most {most} values, got {len(value)}")
    return list(value)
