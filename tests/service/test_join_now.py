"""Trials that join in the middle of others' epochs start at once, see each sample once, and share all prep."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_feeds import augmented

import mbaas
from mbaas.client.convert import Minibatch
from mbaas.coordinator.control import FeedControl
from mbaas.dataset import synthetic
from mbaas.errors import ConfigError, StateError
from mbaas.samples.order import Shuffle
from mbaas.tools.chaos.participants import kill
from support.processes import coordinator_pid
from support.trials import EpochRecord, Recorder, Trial, Trials, record_epoch, result

SAMPLES, BATCH = 1003, 32
STAGING_BYTES = 8 * BATCH * (32 * 32 * 3 + 16)
"""Eight minibatches of one block each. An epoch has 32, more than are prepared ahead."""


@pytest.fixture(scope="module")
def feed(ray_session: None) -> Iterator[mbaas.Feed]:
    data = synthetic(SAMPLES, height=32, width=32)
    options: dict[str, Any] = {"batch_size": BATCH, "staging_bytes": STAGING_BYTES, "prep_workers": 1}
    with mbaas.serve("joined-now", data, augmented(), **options) as feed:
        yield feed


def join(feed: mbaas.Feed, consumer: str, start: str = "now", **options: Any) -> mbaas.Loader:
    return mbaas.join(feed.name, consumer=consumer, format="numpy", start=start, **options)  # type: ignore[arg-type]


@pytest.fixture
def trials(feed: mbaas.Feed) -> Iterator[Trials]:
    """Trials in separate processes, because Ray may lose an object that two consumers of one process requested."""
    with Trials(feed.name) as trials:
        yield trials


def first_of(trials: Trials, minibatches: int = 12) -> Trial:
    """A trial that has read ``minibatches`` minibatches of an epoch."""
    first = trials.join("first")
    result(first.take(minibatches))
    return first


class Reader:
    """A loader in the middle of an epoch, with a record of its minibatches."""

    def __init__(self, loader: mbaas.Loader) -> None:
        self.loader = loader
        self._loop: Iterator[Minibatch] = iter(loader)
        self._recorder = Recorder()

    def take(self, minibatches: int) -> None:
        for _ in range(minibatches):
            self._recorder.add(next(self._loop))

    def rest(self) -> EpochRecord:
        for batch in self._loop:
            self._recorder.add(batch)
            del batch
        return self._recorder.record(self.loader.ledger)


def check_is_an_epoch_of(feed: mbaas.Feed, record: EpochRecord) -> None:
    """Check that each sample occurs once, in the order of a feed epoch shuffled as a whole."""
    assert record.flaws(range(SAMPLES)) == []
    assert record.ledger is not None
    epoch = Shuffle(record.ledger.feed_epoch)
    assert record.sample_ids.tolist() == FeedControl.of(feed.name).info().order.samples_at(epoch, 0, SAMPLES).tolist()


def test_a_late_trial_begins_at_once_and_nothing_is_made_twice(feed: mbaas.Feed, trials: Trials) -> None:
    first = first_of(trials)
    before = feed.status().prepared_samples
    began = time.monotonic()
    with join(feed, "late") as late:
        behind = Reader(late)
        behind.take(1)
        waited_s = time.monotonic() - began
        theirs = first.finish(3)
        own = [behind.rest(), record_epoch(late), record_epoch(late)]
    both = [result(theirs), own]
    made = feed.status().prepared_samples - before
    records = [record for one in both for record in one]
    assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * 6
    assert len({tuple(record.sample_ids.tolist()) for record in records}) == 6, "each epoch has its own order"
    ids = [one[0].sample_ids.tolist() for one in both]
    begin = ids[0].index(ids[1][0])
    # a call returns several minibatches, so the first trial is further than it has read
    assert 11 * BATCH <= begin <= 17 * BATCH
    assert ids[0][begin:] == ids[1][: SAMPLES - begin], "they share the rest of the epoch"
    assert waited_s < 2.0
    # the rest of three epochs, the late trial's rest of the fourth, and blocks prepared ahead
    assert made <= 3 * SAMPLES - 12 * BATCH + begin + 9 * BATCH
    assert feed.status().inexact_epochs == 0


def test_a_trainer_that_counted_an_epoch_that_began_in_the_middle_passes_its_end(
    feed: mbaas.Feed, trials: Trials, tmp_path: Path
) -> None:
    """The state is saved in the step on the epoch's last minibatch."""
    first = first_of(trials)
    with first.going_on(tmp_path / "stop", range(SAMPLES)):
        with join(feed, "late") as late:
            for batch in late:
                del batch
                state = late.state_dict()
            ended = late.ledger
        assert state["begin"] > 0
        with join(feed, "late", state=state) as late:
            late.set_epoch(1)
            assert late.epoch == 1
            assert late.ledger is not None
            assert ended is not None
            assert (late.ledger.samples, late.ledger.id_hash) == (SAMPLES, ended.id_hash)
            assert record_epoch(late).flaws(range(SAMPLES)) == []
            assert late.epoch == 2


def test_a_state_of_an_epoch_that_began_in_the_middle_goes_on_exactly_there(
    feed: mbaas.Feed, trials: Trials, tmp_path: Path
) -> None:
    """States are taken before the end of the feed's epoch, at the end, and after it."""
    first = first_of(trials)
    with join(feed, "late") as late, first.going_on(tmp_path / "stop", range(SAMPLES)):
        behind, states = Reader(late), []
        for _ in range(len(late) - 1):
            behind.take(1)
            states.append((late.report().samples, json.loads(json.dumps(late.state_dict()))))
        whole = behind.rest()
        late.close()
    assert whole.flaws(range(SAMPLES)) == []
    begin = states[0][1]["begin"]
    assert begin > 0
    at_the_end = next(i for i, (samples, _) in enumerate(states) if begin + samples >= SAMPLES - BATCH)
    chosen = [states[i] for i in (0, at_the_end, at_the_end + 1, at_the_end + 2, len(states) - 1)]
    assert len({len(state["shuffle"]) for _, state in chosen}) == 2, "one epoch is shuffled as a whole, one is not"
    with first.going_on(tmp_path / "stop", range(SAMPLES)):
        for samples, state in chosen:
            with join(feed, "restored") as loader:
                loader.load_state_dict(state)
                rest = record_epoch(loader)
                assert rest.sample_ids.tolist() == whole.sample_ids[samples:].tolist()
                assert loader.ledger is not None
                assert loader.ledger.exact
                assert record_epoch(loader).flaws(range(SAMPLES)) == [], "and then it continues with the others"


def test_who_joins_with_a_state_joins_once_and_there(feed: mbaas.Feed) -> None:
    """If it joined elsewhere first, unused minibatches would be prepared there."""
    with join(feed, "me") as loader:
        reader = Reader(loader)
        reader.take(20)
        state = loader.state_dict()
        whole = reader.rest()
    before = feed.status().prepared_samples
    with join(feed, "me", state=state) as loader:
        assert loader.state_dict() == state
        rest = record_epoch(loader)
    assert rest.sample_ids.tolist() == whole.sample_ids[20 * BATCH :].tolist()
    assert rest.ledger is not None
    assert rest.ledger.exact
    made = feed.status().prepared_samples - before
    assert made <= SAMPLES - 20 * BATCH + STAGING_BYTES // 3088, "the rest of the epoch, and blocks made ahead"
    with pytest.raises(StateError, match=r"state\.position must be at most 1003"):
        join(feed, "me", state={**state, "position": 2000})


def test_a_state_goes_on_in_another_feed_with_other_blocks_whose_epochs_are_shuffled_in_another_way(
    feed: mbaas.Feed, trials: Trials, tmp_path: Path
) -> None:
    """The rest of its epoch is prepared for it alone. Afterwards it continues with the others."""
    first, stop = first_of(trials), tmp_path / "stop"
    with join(feed, "late") as late, first.going_on(stop, range(SAMPLES)):
        behind = Reader(late)
        behind.take(25)
        state = json.loads(json.dumps(late.state_dict()))
        whole = behind.rest()
        late.close()
    assert state["begin"] > 0
    assert len(state["shuffle"]) == 2
    data, options = synthetic(SAMPLES, height=32, width=32), {"batch_size": BATCH, "prep_workers": 1}
    with mbaas.serve("joined-elsewhere", data, augmented(), staging_bytes=3 * STAGING_BYTES, **options) as other:
        assert other.status().block_samples != feed.status().block_samples
        with Trials(other.name) as trials_there:
            there = trials_there.join("there")
            result(there.epochs(state["shuffle"][-1][0] + 1))
            with there.going_on(stop, range(SAMPLES)), join(other, "restored") as loader:
                loader.load_state_dict(state)
                reader = Reader(loader)
                reader.take(1)
                (member,) = [each for each in other.status().consumers if each.name == "restored"]
                assert member.epoch == state["shuffle"][-1][0], "a large block number, but in that epoch"
                assert reader.rest().sample_ids.tolist() == whole.sample_ids[25 * BATCH :].tolist()
                assert loader.ledger is not None
                assert loader.ledger.exact
                assert record_epoch(loader).flaws(range(SAMPLES)) == []
        assert other.status().inexact_epochs == 0


def test_a_coordinator_that_is_restarted_learns_how_epochs_are_shuffled(feed: mbaas.Feed, trials: Trials) -> None:
    first = first_of(trials)
    with join(feed, "later") as later:
        behind = Reader(later)
        behind.take(4)
        result(first.take(2))
        kill(coordinator_pid(feed.name))
        theirs = first.finish(2)
        records = [behind.rest(), record_epoch(later)]
    assert [record.flaws(range(SAMPLES)) for record in (*records, *result(theirs))] == [[]] * 4


def test_who_begins_in_an_empty_feed_begins_with_its_epoch(feed: mbaas.Feed) -> None:
    with join(feed, "one") as now:
        record = record_epoch(now)
    check_is_an_epoch_of(feed, record)


def test_a_loop_that_is_left_gives_up_the_rest_of_its_own_epoch(feed: mbaas.Feed, trials: Trials) -> None:
    first = first_of(trials)
    with join(feed, "late") as late:
        Reader(late).take(3)
        theirs = first.finish(1)
        record = record_epoch(late)
        assert late.epoch == 2
    assert [each.flaws(range(SAMPLES)) for each in (record, *result(theirs))] == [[], []]


def in_the_middle(loader: mbaas.Loader) -> dict[str, Any]:
    """A state whose epoch began with the second minibatch of the feed's epoch."""
    Reader(loader).take(1)
    return {**loader.state_dict(), "begin": BATCH}


def test_ranks_refuse_a_state_of_an_epoch_that_began_in_the_middle(feed: mbaas.Feed) -> None:
    with join(feed, "alone") as loader:
        state = in_the_middle(loader)
    with mbaas.join(feed.name, consumer="trial", rank=0, world_size=2) as rank:
        sentence = (
            f"began in the middle of the feed's, at sample {BATCH}: .* single consumer, but this trial has 2 ranks"
        )
        with pytest.raises(StateError, match=sentence):
            rank.load_state_dict(state)


def test_another_start_is_refused(ray_session: None) -> None:
    with pytest.raises(ConfigError, match='start must be "epoch" or "now", got \'later\''):
        mbaas.join("anything", start="later")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='start must be "epoch" for ranks'):
        mbaas.join("anything", consumer="trial", start="now", rank=0, world_size=2)
