"""States of parts, blocks, consumers and workers, and the allowed transitions.

The sets of states are closed. Each object changes its state only in its ``transition`` method, by its table here. A
transition that is not in the table is a bug, and raises an error with the object's story (`mbaas.core.story`). Objects
that are in no table of the core have no state, and can be created again at any time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """Base of the state enumerations; a member's value describes the state."""

    # Members are singletons. Enum's hash is a Python function, and would cost more than the rest of a transition.
    __hash__ = object.__hash__


class PartState(State):
    """State of a part of a block."""

    OPEN = "unassigned: it was just cut, or its result can no longer be read"
    MAKING = "assigned to a worker"
    READY = "it is in the memory of a node"
    PUT_OFF = "storage does not give a sample, or its worker met an error or died; it is OPEN again in a moment"


PART_CHANGES: Mapping[PartState, frozenset[PartState]] = {
    # Assigned to a worker.
    PartState.OPEN: frozenset({PartState.MAKING}),
    # Prepared; or the worker is gone or found a bad sample; or a temporary failure of storage or of the worker.
    PartState.MAKING: frozenset({PartState.READY, PartState.OPEN, PartState.PUT_OFF}),
    # The pause is over. No worker waits for storage during the pause, so other parts proceed.
    PartState.PUT_OFF: frozenset({PartState.OPEN}),
    # Its bytes can no longer be read. A part is a pure function of its block's number, so it can be prepared again.
    PartState.READY: frozenset({PartState.OPEN}),
}


class BlockState(State):
    """State of a block."""

    GRANTED = "its bytes are granted, and not all of its parts are READY"
    READY = "all of its parts are READY: it can be handed out"
    FAILED = "a sample in it is bad, or too many workers died, or failed, over it: consumers get the error instead"
    DROPPED = "its bytes are given back; a later block of this number is another one"


BLOCK_CHANGES: Mapping[BlockState, frozenset[BlockState]] = {
    # The last part is prepared; or preparation failed; or no consumer needs the block any more.
    BlockState.GRANTED: frozenset({BlockState.READY, BlockState.FAILED, BlockState.DROPPED}),
    # A part can no longer be read; or all consumers have received the block, or its bytes are needed more urgently.
    BlockState.READY: frozenset({BlockState.GRANTED, BlockState.DROPPED}),
    # Never back to GRANTED: with bad data it would fail again. If a consumer requests it again, it is dropped first and
    # then granted as a new block.
    BlockState.FAILED: frozenset({BlockState.DROPPED}),
    BlockState.DROPPED: frozenset(),
}


class ConsumerState(State):
    """State of a consumer or a reservation."""

    RESERVED = "held for a consumer that was announced, or for the successor of one that ended; ends at its deadline"
    BUSY = "joined; it works on its blocks"
    WAITING = "joined; its call waits for the block at its cursor"
    RESTING = "joined; between two epochs, for longer than it works on a block: the others do not wait for it"
    GONE = "removed; a consumer that joins again is a new entry"


CONSUMER_CHANGES: Mapping[ConsumerState, frozenset[ConsumerState]] = {
    # The trial joined and is BUSY instead; or it did not join in time.
    ConsumerState.RESERVED: frozenset({ConsumerState.GONE}),
    # A request; a long pause; it leaves, loses its lease, or joins again.
    ConsumerState.BUSY: frozenset({ConsumerState.WAITING, ConsumerState.RESTING, ConsumerState.GONE}),
    # A delivery, or a cancelled call.
    ConsumerState.WAITING: frozenset({ConsumerState.BUSY, ConsumerState.GONE}),
    # A new request, or the end of the session as above.
    ConsumerState.RESTING: frozenset({ConsumerState.WAITING, ConsumerState.GONE}),
    # Late calls of its session are refused; they never revive it.
    ConsumerState.GONE: frozenset(),
}


class WorkerState(State):
    """State of a worker in the staging core; the supervisor distinguishes more phases."""

    UP = "it gets tasks"
    LEAVING = "it finishes the tasks that it has and gets no more"
    FAILED = "it is overdue or keeps failing, gets no more tasks, and is about to be replaced"
    GONE = "it died, was given up, or left; one that returns is a new entry"


WORKER_CHANGES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.UP: frozenset({WorkerState.LEAVING, WorkerState.FAILED, WorkerState.GONE}),
    # Final: a feed that needs the worker back registers it as a new one after it has ended here.
    WorkerState.LEAVING: frozenset({WorkerState.FAILED, WorkerState.GONE}),
    WorkerState.FAILED: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}
