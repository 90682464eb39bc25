"""Streams of several pipelines in one staging core: where consumers begin, room, turns, and the end of a stream."""

import pytest

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import UNUSED_S, StagingState
from mbaas.core.staging.streams import STREAM_BITS, Stream, block_name, block_number, in_core, local_block
from mbaas.core.staging.turns import LEAST_S, Progress, Turns
from mbaas.samples.order import OwnEpoch, Shuffle
from mbaas.settings import Timeouts
from mbaas.wire.consumers import Resumption

BLOCKS, SAMPLES = 4, 6
"""The feed's blocks in an epoch, and samples in a block."""

FINE = Stream(1, 8, 3, lambda _: 4)
"""A pipeline with twice as many blocks, of half the samples."""


class Feed:
    """A core with one worker, whose tasks end when a test says so."""

    def __init__(self, *, budget=200, ahead=3, credit=1, streams=(FINE,), **options):
        limits = StagingLimits(budget, ahead, Timeouts(patience_s=1e9, lease_s=1e9))
        self.core = StagingState(limits, BLOCKS, lambda _: 10, block_samples=SAMPLES, **options)
        self.now, self.session, self.tasks, self.given = 0.0, 0, [], {}
        self.send(ev.WorkerUp("w", credit))
        for stream in streams:
            self.send(ev.OpenStream(stream))

    def send(self, event):
        done = self.core.handle(event, self.now)
        self.core.validate()
        for instruction in done:
            if isinstance(instruction, ev.Prepare):
                self.tasks.append(instruction)
            elif isinstance(instruction, ev.Deliver):
                self.given.setdefault(instruction.consumer, []).extend(instruction.blocks)
        return done

    def join(self, name, stream=0, **options):
        """The local number of the block where a consumer begins."""
        self.session += 1
        event = ev.Join(name, self.session, stream=stream, **options)
        admitted = next(each for each in self.send(event) if isinstance(each, ev.Admitted))
        return local_block(admitted.cursor)

    def ask(self, name, want=1):
        consumer = self.core.consumers.by_name[name]
        at = consumer.cursor
        self.send(ev.Ask(name, consumer.session, at, at, at, want))

    def make(self, took_s=1.0):
        task = self.tasks.pop(0)
        self.now += took_s
        self.send(ev.TaskEnded(task.task))
        return task

    def read(self, name, blocks):
        for _ in range(blocks):
            self.ask(name)
            while self.tasks and self.core.consumers.by_name[name].waiting:
                self.make(0.1)


def test_names_of_blocks_tell_their_pipeline():
    for number, name in ((17, "block 17"), (FINE.first + 5, "block 5 of pipeline 1")):
        assert (block_name(number), block_number(name)) == (name, number)
    assert block_number("block 5 of trial 1") is None


def test_a_call_gets_the_numbers_of_its_stream():
    """The counts of calls and of wanted blocks stay."""
    call = ev.Ask("c", 7, 5, 3, 2, 4, 9, 0, (4, 5))
    by = FINE.first
    assert in_core(call, FINE) == ev.Ask("c", 7, 5 + by, 3 + by, 2 + by, 4, 9, by, (4 + by, 5 + by))
    resumed = Resumption(5, OwnEpoch(4, 12), 0, Shuffle(0))
    moved = in_core(ev.Join("c", 7, resumed=resumed, stream=1), FINE).resumed
    assert (moved.start, moved.own_epoch, moved.epoch) == (5 + by, OwnEpoch(4 + by, 12 + by), 0)


def test_consumers_with_one_pipeline_share_its_blocks_and_others_get_their_own():
    feed = Feed()
    feed.join("a", 1), feed.join("b", 1), feed.join("c")
    for name in "abc":
        feed.ask(name)
    while feed.tasks:
        feed.make()
    assert feed.given["a"] == feed.given["b"] == [FINE.first]
    assert feed.given["c"] == [0]
    assert feed.core.epochs.shuffle_of(FINE.first) is feed.core.epochs.shuffle_of(0)


@pytest.mark.parametrize(
    ("read", "begins"),
    [(1, 0), (2, 8)],
    ids=["in the first half of their epoch", "in the second"],
)
def test_the_first_consumer_of_a_pipeline_begins_at_the_epoch_nearest_to_the_others(read, begins):
    feed = Feed()
    feed.join("a")
    feed.read("a", read)
    assert feed.join("b", 1) == begins


def test_with_now_it_begins_at_the_position_of_the_others():
    """Block 3 of the feed's begins at sample 18, and so does block 6 of the finer stream."""
    feed = Feed()
    feed.join("a")
    feed.read("a", 3)
    assert feed.join("b", 1, now=True) == 6
    own = feed.core.consumers.by_name["b"].own_epoch
    assert own.begin == 18
    assert own.end - own.first == 8


def test_an_epoch_is_cut_for_consumers_of_all_pipelines():
    """The one that began at sample 15 needs the samples before it from the next epoch, whoever makes that."""
    feed = Feed()
    feed.join("a", 1)
    feed.read("a", 5)
    feed.join("b", 1, now=True)
    feed.join("c")
    feed.read("c", 8)
    (cut,) = feed.core.epochs.shuffle_of(BLOCKS).cuts
    assert cut == feed.core.consumers.by_name["b"].own_epoch.begin > 0


def test_a_reservation_is_of_no_use_to_a_trial_with_another_pipeline():
    feed = Feed()
    feed.send(ev.Announce("t"))
    assert feed.join("t", 1) == 0
    assert len(feed.core.consumers.by_name) == 1


def test_a_join_whose_pipeline_has_ended_is_refused():
    feed = Feed()
    (refused,) = feed.send(ev.Join("c", 5, stream=3))
    assert isinstance(refused, ev.Refuse)


def test_a_stream_ends_when_nobody_has_used_it_for_a_while():
    feed = Feed()
    feed.join("a", 1)
    feed.send(ev.Leave("a"))
    feed.send(ev.Tick())
    feed.now += UNUSED_S - 1
    assert not any(isinstance(each, ev.CloseStream) for each in feed.send(ev.Tick()))
    feed.now += 2
    assert ev.CloseStream(1) in feed.send(ev.Tick())
    assert 1 not in feed.core.streams


# ---- room ----


def test_cohorts_share_the_budget():
    """Of 200 bytes, 3 blocks of 10 and 3 of 4 are set apart. Half of the other 158 are 7 blocks and 19 more."""
    feed = Feed(ahead=100)
    feed.join("a"), feed.join("b", 1)
    feed.ask("a"), feed.ask("b")
    rooms = [(cohort.room_blocks, cohort.ahead_blocks) for cohort in feed.core.consumers.cohorts.values()]
    assert rooms == [(10, 9), (22, 21)]
    feed.send(ev.Leave("b"))
    assert [cohort.ahead_blocks for cohort in feed.core.consumers.cohorts.values()] == [100]


@pytest.mark.parametrize(("budget", "ahead"), [(42, 2), (41, 1), (28, 1), (27, 0)])
def test_with_little_room_prep_runs_less_ahead(budget, ahead):
    """Three blocks of each take 42 bytes, two 28."""
    feed = Feed(budget=budget)
    feed.join("a"), feed.join("b", 1)
    feed.ask("a"), feed.ask("b")
    assert {cohort.ahead_blocks for cohort in feed.core.consumers.cohorts.values()} == {ahead}


def test_sixty_four_pipelines_run_in_the_budget_of_one_block_and_none_is_made_twice():
    streams = [Stream(number, 8, 3, lambda _: 10) for number in range(1, 65)]
    feed = Feed(budget=10, streams=streams)
    for stream in streams:
        feed.join(f"c{stream.number}", stream.number)
    made = []
    for _ in range(2):
        for stream in streams:
            feed.ask(f"c{stream.number}")
        while feed.tasks:
            block = feed.make(0.1).block
            consumer = feed.core.consumers.by_name[f"c{block >> STREAM_BITS}"]
            feed.send(ev.Heartbeat(consumer.name, consumer.session, consumer.cursor, consumer.cursor))
            made.append(block)
    assert len(made) == len(set(made)) == 2 * 64
    assert {len(given) for given in feed.given.values()} == {2}


def test_a_large_block_is_not_starved_by_small_ones_that_take_each_free_byte():
    feed = Feed(budget=10)
    feed.join("large"), feed.join("small", 1)
    feed.ask("small")
    feed.make()
    feed.ask("large")
    for _ in range(20):
        feed.ask("small")
        while feed.tasks:
            feed.make(0.1)
    assert feed.given["large"] == [0]


# ---- turns ----


def test_a_pipeline_that_takes_ten_times_as_long_gets_no_more_time():
    """Each part of stream 2 takes ten seconds, so it gets one for ten of stream 1."""
    turns = Turns(lambda _: 1)
    made = []
    for _ in range(110):
        times = turns.of([1, 2])
        stream = min(times, key=lambda stream: (times[stream], stream))
        charged = turns.assigned(stream)
        turns.ended(stream, charged, 10.0 if stream == 2 else 1.0)
        made.append(stream)
    assert made.count(2) == pytest.approx(10, abs=1)


def test_workers_go_to_the_pipeline_that_had_least_of_their_time():
    """Both trials always wait. A part takes 1 s with one pipeline and 10 s with the other, which gets one for ten."""
    feed = Feed(budget=48)
    feed.join("quick", 1), feed.join("slow")
    seconds = [0.0, 0.0]
    for _ in range(220):
        for name in ("slow", "quick"):
            feed.ask(name)
        stream = feed.tasks[0].block >> STREAM_BITS
        work_s = (10.0, 1.0)[stream]
        feed.send(ev.TaskEnded(feed.tasks.pop(0).task, work_s=work_s))
        seconds[stream] += work_s
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


def test_a_stream_has_the_weight_of_its_trials():
    """Seven trials share stream 1."""
    turns = Turns({1: 7, 2: 1}.__getitem__)
    spent = {1: 0.0, 2: 0.0}
    for _ in range(800):
        times = turns.of([1, 2])
        stream = min(times, key=lambda stream: (times[stream], stream))
        turns.ended(stream, turns.assigned(stream), 1.0)
        spent[stream] += 1.0
    assert spent[1] / spent[2] == pytest.approx(7, rel=0.05)


def test_a_stream_that_needed_nothing_saves_up_no_turns():
    turns = Turns(lambda _: 1)
    for _ in range(100):
        turns.of([1])
        turns.ended(1, turns.assigned(1), 1.0)
    times = turns.of([1, 2])
    assert times[1] - times[2] <= 1.0


def test_a_part_that_was_not_prepared_costs_nothing_and_one_without_time_the_least():
    turns = Turns(lambda _: 1)
    turns.of([1])
    turns.ended(1, turns.assigned(1), None)
    assert turns.of([1]) == {1: 0.0}
    turns.ended(1, turns.assigned(1), 0.0)
    assert turns.of([1]) == {1: pytest.approx(LEAST_S)}


class Race:
    """Streams that always need parts of 1/100 of an epoch, on one worker.

    Args:
        part_s: seconds of a part of each stream.
        ahead: positions at the start, in epochs.
    """

    def __init__(self, part_s, ahead, weights=(1, 1)):
        self.turns, self.part_s, self.at = Turns(lambda stream: weights[stream]), part_s, [*ahead]
        self.spent = [0.0 for _ in part_s]

    def step(self):
        times = self.turns.of(range(len(self.at)))
        stream = min(times, key=lambda stream: (times[stream], stream))
        charge = self.turns.assigned(stream, Progress(self.at[stream], 0.01, 0.01))
        self.turns.ended(stream, charge, self.part_s[stream])
        self.spent[stream] += self.part_s[stream]
        self.at[stream] += 0.01

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return max(self.at) - min(self.at)


@pytest.mark.parametrize("ahead", [(0.3, 0.0), (0.3, 0.2, 0.0, 0.1)])
def test_streams_catch_up_with_those_ahead_and_then_stay_with_them(ahead):
    race = Race([1.0] * len(ahead), ahead, weights=[1] * len(ahead))
    race.run(600)
    assert max(race.run(1) for _ in range(300)) <= 0.03
    assert max(race.spent) / min(race.spent) < 1.3


def test_a_stream_that_catches_up_gets_twice_its_part_of_the_workers():
    race = Race([1.0, 1.0], (0.4, 0.0))
    race.run(60)
    assert race.spent[1] / race.spent[0] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("part_s", "weights", "ahead"),
    [
        pytest.param([1.0, 10.0], (1, 1), (0.3, 0.0), id="too slow to stay with it"),
        pytest.param([1.0, 1.0], (4, 1), (0.3, 0.0), id="the other one has more trials"),
        pytest.param([1.0, 1.0], (1, 1), (0.7, 0.0), id="too far behind"),
    ],
)
def test_a_stream_that_cannot_stay_with_others_pays_in_full(part_s, weights, ahead):
    race = Race(part_s, ahead, weights)
    race.run(40)
    assert race.spent[0] / race.spent[1] == pytest.approx(weights[0] / weights[1], rel=0.35)


def test_a_side_epoch_is_no_place_to_catch_up_with():
    """It is prepared for one consumer alone, and its number is far beyond all others."""
    turns = Turns(lambda _: 1)
    turns.of([1, 2])
    for _ in range(2):
        turns.ended(1, turns.assigned(1), 1.0)
    charge = turns.assigned(2, Progress(0.0, 0.01, 0.01))
    assert charge.price == 1.0
