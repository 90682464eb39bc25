"""Validation of client calls that decoding cannot do: rules for several values, and for the state of a feed.

A client may be of another version, or have a bug. The core's tables serve all consumers, and a single cursor of 2.5
would end the whole feed. So types and bounds of each call are checked when it is decoded (`mbaas.calls.encoding`), and
the rest here, before anything changes. An invalid value raises an error in that call only.
"""

from __future__ import annotations

from mbaas.core.staging import events as ev
from mbaas.core.staging.streams import FEED_STREAM
from mbaas.errors import ConfigError, shown
from mbaas.samples.order import ASIDE, MOST_LEVELS, MOST_NUMBER, SampleOrder, Shuffle
from mbaas.wire.consumers import MOST_NAME, MOST_WANTED, ConsumerName, JoinRequest, Resumption, checked_name

DEEPEST = 4 * MOST_LEVELS
"""Deepest nesting of shuffles in a call. From `MOST_LEVELS` on, no newcomer starts in the middle of an epoch, but a
restored consumer may.
"""


def join(
    request: JoinRequest, session: int, *, order: SampleOrder, out_of_reach: range = range(0), stream: int = FEED_STREAM
) -> ev.Join:
    """Check a call that opens a session, and return its event.

    Args:
        request: as received from the consumer.
        session: number of the new session, assigned by the service.
        order: order of the samples, in the blocks of the consumer's pipeline.
        out_of_reach: see `within_reach`.
        stream: number of its pipeline's stream; the event has the block numbers of the call, not yet those of the core
            (`mbaas.core.staging.streams.in_core`).

    Raises:
        ConfigError: a value is invalid. The message contains its name, the value and the allowed values. All functions
            of this module raise this error.
    """
    who, begin = request.name, request.start
    consumer_name(who)
    if begin.block is not None:
        within_reach("start", begin.block, out_of_reach)
    if begin.resumed is not None:
        resumption(begin.resumed, order)
        within_reach("resumed.start", begin.resumed.start, out_of_reach)
    return ev.Join(
        str(who),
        session,
        begin.block,
        begin.flexible,
        begin.now,
        begin.resumed,
        trial=who.trial,
        world_size=who.world_size,
        node=request.node,
        born=request.born,
        stream=stream,
    )


def within_reach(field: str, block: int, out_of_reach: range) -> None:
    """Check a block where a consumer starts or is; for ``out_of_reach``, see `StagingState.out_of_reach`.

    Newcomers start at the first epoch that was never started. A single consumer far beyond all others would move all
    newcomers there, and could exhaust the block numbers.
    """
    if block in out_of_reach:
        raise ConfigError(
            f"{field} must be a block below {out_of_reach.start}, far beyond which the feed has not come, got {block}"
        )


def resumption(value: Resumption, order: SampleOrder) -> None:
    """Check the position where a consumer resumes inside its epoch."""
    own, blocks = value.own_epoch, order.blocks_per_epoch
    whole("resumed.own_epoch.begin", own.begin, most=order.num_samples - 1)
    whole("resumed.epoch", value.epoch, most=MOST_NUMBER // blocks)
    shuffle(value.shuffle, order.num_samples)
    in_mid_block = own.begin % order.block_samples > 0
    # The core relies on these numbers being consistent.
    whole("resumed.own_epoch.first", own.first)
    if own.first % blocks != own.begin // order.block_samples:
        raise ConfigError(f"resumed.own_epoch must begin in the block of position {own.begin}, got block {own.first}")
    if own.end != own.first + blocks + in_mid_block:
        raise ConfigError(f"resumed.own_epoch must have {blocks + in_mid_block} blocks, got {shown(own)}")
    whole("resumed.start", value.start, least=own.first, most=own.end - 1)
    if value.epoch < ASIDE and value.shuffle.epoch != value.epoch:
        raise ConfigError(f"resumed.shuffle must be of epoch {value.epoch}, got one of epoch {value.shuffle.epoch}")
    if value.epoch not in ((value.start - 1) // blocks, value.start // blocks):
        raise ConfigError(f"resumed.epoch must be that of block {value.start} or of the one before, got {value.epoch}")


def shuffle(value: Shuffle, num_samples: int) -> None:
    """Check the shuffle of an epoch. Its own class ensures that cuts ascend."""
    levels, level = 0, value
    while True:
        several("shuffle.cuts", level.cuts)
        for cut in level.cuts[-1:]:
            whole("shuffle.cuts", cut, least=1, most=num_samples - 1)
        levels += 1
        if levels > DEEPEST:
            raise ConfigError(f"a shuffle must have at most {DEEPEST} levels, got {levels}")
        if level.base is None:
            return
        level = level.base


def announce(consumers: object, others: object) -> list[ev.Announce]:
    """Check the names of trials that will join soon; return an event for each. ``others`` more will follow soon."""
    more, names = whole("others", others, most=MOST_WANTED), list(map(name, several("consumers", consumers)))
    if more and not names:
        raise ConfigError(f"others must be 0 where no consumer is named, got {more}")
    # Only with the last one: the named trials first take over existing reservations.
    return [ev.Announce(each, more if number == len(names) else 0) for number, each in enumerate(names, 1)]


def thing(value: object) -> str:
    """Check and return the name of an object whose story is requested."""
    if not isinstance(value, str):
        raise ConfigError(f'a thing is named by text, such as "trial-3" or "block 17", got {shown(value)}')
    if len(value) > MOST_NAME:  # the search for similar names is slow for long ones
        raise ConfigError(f"a thing's name has at most {MOST_NAME} characters, got {len(value):,}")
    return value


def consumer_name(value: ConsumerName) -> None:
    """Check the name of a consumer: its trial and rank."""
    whole("rank", value.rank, most=value.world_size - 1)
    checked_name(str(value))  # includes the trial and the rank


# ---- single values ----


def name(value: object) -> str:
    """Check and return a consumer's name."""
    if not isinstance(value, str):
        raise ConfigError(f"a consumer's name must be text, got {shown(value)}")
    return checked_name(value)


def whole(field: str, value: object, *, least: int = 0, most: int = MOST_NUMBER) -> int:
    """Check and return an integer in [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool):  # bool is a subclass of int
        raise ConfigError(f"{field} must be a whole number, got {shown(value)}")
    if not least <= value <= most:
        raise ConfigError(f"{field} must be in [{least}, {most}], got {shown(value)}")
    return value


def number(field: str, value: object) -> float:
    """Check and return a number in [0, MOST_NUMBER]."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{field} must be a number, got {shown(value)}")
    if not 0 <= value <= MOST_NUMBER:  # also false for NaN
        raise ConfigError(f"{field} must be in [0, {MOST_NUMBER}], got {shown(value)}")
    return value


def several(field: str, value: object) -> list[object]:
    """Check and return a list of at most `MOST_WANTED` values."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{field} must be a list, got {shown(value)}")
    if len(value) > MOST_WANTED:
        raise ConfigError(f"{field} must hold at most {MOST_WANTED} values, got {len(value)}")
    return list(value)
