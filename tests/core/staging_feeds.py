"""A staging core driven by tests, and helpers to read its instructions."""

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.streams import FEED_STREAM, Stream, StreamTable
from mbaas.samples.placement import WHOLE
from mbaas.settings import Timeouts


class Feed:
    """Staging core with a clock that tests set, and its open tasks by block."""

    def __init__(
        self, *, budget_blocks=8, ahead=3, blocks_per_epoch=4, workers=1, credit=1, max_deaths=3,
        block_bytes=lambda block: 10, cut=lambda block, shuffle: (WHOLE,), keeps_all=False, slack=0,
        **timeouts,
    ):  # fmt: skip
        limits = StagingLimits(
            budget_bytes=10 * budget_blocks,
            ahead_blocks=ahead,
            timeouts=Timeouts(**timeouts),
            max_deaths=max_deaths,
            slack_blocks=slack,
        )
        self.core = StagingState(limits, blocks_per_epoch, block_bytes, cut, keeps_all=keeps_all)
        self.now = 0.0
        self.session = 0
        self.tasks = {}
        for worker in range(workers):
            self.send(ev.WorkerUp(f"w{worker}", credit))

    def send(self, event):
        done = self.core.handle(event, self.now)
        self.core.validate()
        for instruction in done:
            if isinstance(instruction, ev.Prepare):
                self.tasks[instruction.block] = instruction
        for order in [each for each in done if isinstance(each, ev.ReplaceWorker)]:  # as the supervisor does
            done = [*done, *self.send(ev.WorkerDown(order.worker, order.reason, blame=order.blame))]
        return done

    def join(self, name, start=None, flexible=False, *, asks=True):
        self.session += 1
        done = self.send(ev.Join(name, self.session, start, flexible))
        cursor = next(i for i in done if isinstance(i, ev.Admitted)).cursor
        if asks:
            self.ask(name, cursor)
        return cursor

    def ask(self, name, cursor, want=1, began=None):
        """Ask as a consumer that holds nothing and has used all blocks before ``cursor``."""
        session = self.core.consumers.by_name[name].session
        return self.send(ev.Ask(name, session, cursor, cursor, cursor, want, began=began))

    def finish(self, block):
        return self.send(ev.TaskEnded(self.tasks.pop(block).task))

    def make(self, *blocks):
        for block in blocks:
            self.finish(block)

    def wait(self, seconds):
        self.now += seconds
        return self.send(ev.Tick())


def give(feed, name, block, *, holds=None):
    """Ask for a block until it is delivered; return the delivered blocks. The consumer holds all from ``holds`` on."""
    released = block if holds is None else holds
    session = feed.core.consumers.by_name[name].session
    given = delivered(feed.send(ev.Ask(name, session, block, released, released)))
    while name not in given and feed.tasks:
        given = delivered(feed.finish(min(feed.tasks)))
    return given.get(name, ())


def delivered(done):
    return {i.consumer: i.blocks for i in done if isinstance(i, ev.Deliver)}


def prepared(done):
    return [i.block for i in done if isinstance(i, ev.Prepare)]


def kinds(done, kind):
    return [i for i in done if isinstance(i, kind)]


def one_stream(blocks_per_epoch: int, block_samples: int = 1, *, keeps_all: bool = False) -> StreamTable:
    """Return the streams of a feed whose consumers all use its pipeline; a block has 10 bytes."""
    return StreamTable(Stream(FEED_STREAM, blocks_per_epoch, block_samples, lambda _: 10, keeps_all=keeps_all))
