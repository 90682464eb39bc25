"""The states of a part, a block, a consumer and a worker, and which may follow which.

These sets are closed. Each thing changes its state in its own ``transition`` method only, by its table here; a change
that the table does not have is a bug and raises with the story of that thing (`mbaas.core.story`). Where a thing is
nowhere in the tables of the core, it is as if it never was: it can begin again at any time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """One of a closed set; its value says what it means."""

    # Members are singletons. Enum's own hash is a Python function, and would cost more than the rest of a change.
    __hash__ = object.__hash__


class PartState(State):
    """How far a part of a block is."""

    OPEN = "no worker has it: it was just cut, or what was made of it cannot be read any more"
    MAKING = "it is on a worker's list"
    READY = "it lies in the object store of a node"
    PUT_OFF = "storage does not give a sample, or its worker met an error or died; it is OPEN again in a moment"


PART_CHANGES: Mapping[PartState, frozenset[PartState]] = {
    # A worker got it.
    PartState.OPEN: frozenset({PartState.MAKING}),
    # It is made; or its worker is gone, or met a bad sample; or storage did not give one that it may give later, or a
    # bug showed that may not show next time.
    PartState.MAKING: frozenset({PartState.READY, PartState.OPEN, PartState.PUT_OFF}),
    # The pause is over. During it no worker waits for storage, so that other parts can be made.
    PartState.PUT_OFF: frozenset({PartState.OPEN}),
    # Its bytes can no longer be read. A part is a pure function of its block's number, so it can be made again.
    PartState.READY: frozenset({PartState.OPEN}),
}


class BlockState(State):
    """How far a block is."""

    GRANTED = "its bytes are granted, and not all of its parts are READY"
    READY = "all of its parts are READY: it can be handed out"
    FAILED = "a sample in it is bad, or too many workers died, or failed, over it: consumers get the error instead"
    DROPPED = "its bytes are given back; a later block of this number is another one"


BLOCK_CHANGES: Mapping[BlockState, frozenset[BlockState]] = {
    # Its last part is made; it cannot be made; nobody needs it any more before it was ever whole.
    BlockState.GRANTED: frozenset({BlockState.READY, BlockState.FAILED, BlockState.DROPPED}),
    # A part of it cannot be read any more; or everybody has had it, or somebody needs its bytes more.
    BlockState.READY: frozenset({BlockState.GRANTED, BlockState.DROPPED}),
    # Never back to GRANTED: made again it would fail again, for the data is bad. A consumer that asks again has it
    # dropped first, and granted as a new block.
    BlockState.FAILED: frozenset({BlockState.DROPPED}),
    BlockState.DROPPED: frozenset(),
}


class ConsumerState(State):
    """What a consumer is, or a reservation that is held for one."""

    RESERVED = "held for a consumer that was announced, or for the successor of one that ended; ends at its deadline"
    BUSY = "joined; it works on what it was given"
    WAITING = "joined; its call waits for the block at its cursor"
    RESTING = "joined; between two epochs of its own, and for longer than it works on a block: it holds up nobody"
    GONE = "given up; a consumer that joins, also one for which it was held, begins anew"


CONSUMER_CHANGES: Mapping[ConsumerState, frozenset[ConsumerState]] = {
    # Its consumer came, and is BUSY instead; or nobody came in time.
    ConsumerState.RESERVED: frozenset({ConsumerState.GONE}),
    # It asks; it does not for a while; it leaves, is silent for too long, or joins again.
    ConsumerState.BUSY: frozenset({ConsumerState.WAITING, ConsumerState.RESTING, ConsumerState.GONE}),
    # It is given blocks, or gives up its call.
    ConsumerState.WAITING: frozenset({ConsumerState.BUSY, ConsumerState.GONE}),
    # It asks again, for whatever reason; or as above.
    ConsumerState.RESTING: frozenset({ConsumerState.WAITING, ConsumerState.GONE}),
    # Words of its session that come late are refused; they never bring it back.
    ConsumerState.GONE: frozenset(),
}


class WorkerState(State):
    """What a worker is to the staging core; the supervisor, which starts and ends it, tells more states apart."""

    UP = "it gets tasks"
    LEAVING = "it finishes the tasks that it has and gets no more"
    GONE = "it died, was given up, or left with nothing in hand; one that comes back is a new one"


WORKER_CHANGES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.UP: frozenset({WorkerState.LEAVING, WorkerState.GONE}),
    # It never changes its mind: a feed that wants it back takes it in as a new one, when it has ended here.
    WorkerState.LEAVING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}
