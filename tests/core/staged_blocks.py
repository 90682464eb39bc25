"""Consumers and staged blocks without workers. Epochs have 4 blocks of 10 bytes."""

from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.epochs import EpochTable
from mbaas.core.staging.keeping import Keeping
from mbaas.core.staging.streams import Stream
from mbaas.core.staging.transitions import ConsumerState
from mbaas.core.staging.window import Window
from mbaas.core.story import Stories
from mbaas.samples.placement import WHOLE
from tests.core.staging_feeds import one_stream


class Table:
    """Consumers and a window without workers; prep may be three blocks ahead."""

    def __init__(self, *, budget_blocks=100, keeps_all=False):
        stories = Stories()
        streams = one_stream(4, keeps_all=keeps_all)
        self.window = Window(10 * budget_blocks, stories, streams)
        self.consumers = ConsumerTable(EpochTable(streams), 3, stories)
        self.beginnings = Beginnings(self.consumers, self.window)
        self.keeping = Keeping(self.consumers, self.window, self.beginnings)

    def join(self, name, cursor, *, released=None, cohort=None):
        """A consumer at ``cursor`` that holds the blocks from ``released`` on."""
        consumers = self.consumers
        consumer = consumers.enter(name, 1, cohort or consumers.new_cohort(cursor), cursor, 30.0, ConsumerState.BUSY)
        consumer.asked, consumer.released = True, cursor if released is None else released
        return consumer

    def add_stream(self, *, block_bytes=10):
        """Add and return the stream of a pipeline that a consumer brought."""
        self.consumers.streams[1] = stream = Stream(1, 4, 1, lambda _: block_bytes)
        return stream

    def stage(self, *numbers):
        """Stage ready blocks."""
        for number in numbers:
            block = self.window.grant(number, 10, [WHOLE])
            block.begin(0, number, "w")
            block.finish(0, "n")

    def reasons(self):
        return {number: self.keeping.reason(block) for number, block in self.window.blocks.items()}

    def unwanted(self):
        return [block.number for block in self.keeping.unwanted()]
