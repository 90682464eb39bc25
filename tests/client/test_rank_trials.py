"""Ranks of a trial on one node start together, stay in step, and together read exact epochs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T
from mbaas.core.ranks import KEPT_EPOCHS
from mbaas.dataset import synthetic
from mbaas.tools.chaos.participants import kill
from support.feeds import warm
from support.leaks import store_contents, store_use
from support.processes import coordinator_pid
from support.ranks import union_flaws
from support.trials import EpochRecord, Recorder, Trials, record_epoch, result
from support.waiting import wait_until

SAMPLES = 1003
BLOCK_BYTES = 192 * (32 * 32 * 3 + 16)

pytestmark = pytest.mark.usefixtures("ray_clean")


@pytest.fixture(scope="module")
def feed(ray_session: None) -> Iterator[mbaas.Feed]:
    """Blocks of 192 samples, minibatches of 64."""
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    data = synthetic(SAMPLES, height=32, width=32)
    options = {"batch_size": 64, "prep_workers": 2, "staging_bytes": 5 << 20}
    with mbaas.serve("ranks", data, pipeline, **options) as feed:
        yield warm(feed)


class Ranks:
    """All ranks of a trial, stepped together in this process."""

    def __init__(self, feed: mbaas.Feed, world_size: int, trial: str = "trial", **options: Any) -> None:
        self.loaders = [
            mbaas.join(feed.name, trial, format="numpy", rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for loader in self.loaders:
            loader.close()

    def load(self, states: list[str]) -> None:
        for loader, state in zip(self.loaders, states, strict=True):
            loader.load_state_dict(json.loads(state))

    def states(self) -> list[str]:
        return [json.dumps(loader.state_dict()) for loader in self.loaders]

    def step(self, recorders: list[Recorder], loops: list[Any], steps: int) -> None:
        for _ in range(steps):
            for recorder, loop in zip(recorders, loops, strict=True):
                recorder.add(next(loop))

    def epoch(self) -> list[EpochRecord]:
        recorders = [Recorder() for _ in self.loaders]
        for batches in zip(*self.loaders, strict=True):
            for recorder, batch in zip(recorders, batches, strict=True):
                recorder.add(batch)
            del batches, batch
        return [recorder.record(loader.ledger) for recorder, loader in zip(recorders, self.loaders, strict=True)]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 64), (3, 100)])
def test_ranks_are_together_an_exact_epoch(feed, world_size, batch_size):
    """No batch size divides the epoch, and 100 divides no block (192). More epochs run than plans are kept."""
    with Ranks(feed, world_size, batch_size=batch_size) as trial:
        for _ in range(KEPT_EPOCHS + 3):
            records = trial.epoch()
            assert union_flaws(records, range(SAMPLES), batch_size=batch_size) == []
            assert [len(loader) for loader in trial.loaders] == [len(record.sizes) for record in records]


def test_epochs_that_are_left_early_pin_no_memory(feed):
    """A rank that leaves an epoch has begun to fetch the next block. It releases that block and all later ones."""

    def uncounted_bytes():
        status = feed.status()
        return store_use().primary_bytes - status.staged_bytes - status.cached_bytes

    def all_is_counted():
        looks.append((feed.status().staged_bytes, uncounted_bytes()))
        return looks[-1][0] == 0 and abs(looks[-1][1]) < BLOCK_BYTES

    looks = []
    try:
        # Ray's figures lag behind the last staged and cached blocks, so a baseline taken now would be too low
        wait_until(all_is_counted, "all memory is accounted for")
    except AssertionError as error:
        raise AssertionError(f"{error}; (staged, uncounted) bytes are {looks[-1]}\n{store_contents()}") from None
    before = uncounted_bytes()
    with Ranks(feed, 2) as trial:
        for _ in range(8):
            trial.step([Recorder(), Recorder()], [iter(loader) for loader in trial.loaders], 2)
        assert union_flaws(trial.epoch(), range(SAMPLES), batch_size=64) == []
        wait_until(lambda: uncounted_bytes() - before < 2 * BLOCK_BYTES, "what was left early is gone")


def test_a_last_minibatch_with_fewer_samples_than_ranks_is_left_out(feed):
    """1,003 samples are two minibatches of 500, and 3 samples remain for 4 ranks."""
    with Ranks(feed, 4, batch_size=500) as trial:
        records = trial.epoch()
        seen = {i for record in records for i in record.sample_ids.tolist()}
        assert len(seen) == 1000
        assert union_flaws(records, seen, batch_size=500) == []
        assert [len(loader) for loader in trial.loaders] == [2] * 4


@pytest.mark.parametrize("which", ["own", "of rank 0"])
def test_ranks_go_on_from_a_state(feed, which):
    """The state follows 5 minibatches of 100 for 2 ranks. Each then has 5 steps of 50, and a last one of 2 or 1."""
    with Ranks(feed, 2, batch_size=100) as trial:
        recorders = [Recorder(), Recorder()]
        loops = [iter(loader) for loader in trial.loaders]
        trial.step(recorders, loops, 5)
        states = trial.states()
        del loops
    if which != "own":
        states = [states[0]] * 2
    with Ranks(feed, 2, batch_size=100) as trial:
        trial.load(states)
        tails = trial.epoch()
    heads = [recorder.record(None).sample_ids.tolist() for recorder in recorders]
    tail_ids = [record.sample_ids.tolist() for record in tails]
    assert sorted(i for ids in [*heads, *tail_ids] for i in ids) == list(range(SAMPLES))
    assert [record.sizes for record in tails] == [(50,) * 5 + (2,), (50,) * 5 + (1,)]
    assert all(record.ledger.exact for record in tails)
    if which == "own":
        assert [record.ledger.samples for record in tails] == [502, 501]


def test_a_single_consumer_goes_on_from_a_rank_s_state(feed):
    with Ranks(feed, 2) as trial:
        recorders = [Recorder(), Recorder()]
        trial.step(recorders, [iter(loader) for loader in trial.loaders], 4)
        state = trial.states()[1]
    with mbaas.join(feed.name, consumer="one", format="numpy") as loader:
        loader.load_state_dict(json.loads(state))
        record = record_epoch(loader)
    assert len(record.sample_ids) == SAMPLES - 4 * 64
    assert record.ledger.exact
    assert record.ledger.samples == SAMPLES


def test_ranks_that_come_late_begin_the_same_epoch(feed):
    """Rank 0 joins at the start of another consumer's epoch, rank 1 in its middle. Neither was announced."""
    with mbaas.join(feed.name, consumer="other", format="numpy") as other:
        loop = iter(other)
        next(loop)
        first = mbaas.join(feed.name, "late", format="numpy", rank=0, world_size=2, batch_size=64)
        for _ in range(8):
            next(loop)
        with first, mbaas.join(feed.name, "late", format="numpy", rank=1, world_size=2, batch_size=64) as second:
            other.close()
            records = [Recorder(), Recorder()]
            for batches in zip(first, second, strict=True):
                for record, batch in zip(records, batches, strict=True):
                    record.add(batch)
                del batches, batch
            seen = [record.record(loader.ledger) for record, loader in zip(records, (first, second), strict=True)]
            assert union_flaws(seen, range(SAMPLES), batch_size=64) == []
            assert seen[0].ledger.feed_epoch == seen[1].ledger.feed_epoch


def test_ranks_that_look_at_one_minibatch_still_get_every_sample(feed):
    with Ranks(feed, 2) as trial:
        first, second = trial.loaders
        peeked = first.peek()["sample_id"].tolist()
        assert next(iter(first))["sample_id"].tolist() == peeked
        next(iter(second))
        records = [Recorder(), Recorder()]
        trial.step(records, [iter(first), iter(second)], len(first))
        seen = [record.record(loader.ledger) for record, loader in zip(records, (first, second), strict=True)]
        assert union_flaws(seen, range(SAMPLES), batch_size=64) == []
        assert seen[0].ledger.feed_epoch == seen[1].ledger.feed_epoch


def test_a_rank_that_waits_for_others_says_for_whom(feed):
    with mbaas.join(feed.name, "alone", rank=1, world_size=3, wait_timeout_s=1.0, format="numpy") as loader:
        with pytest.raises(mbaas.WaitTimeoutError, match=r"rank 1 of trial 'alone' waited 1 s .* rank 0, 2 did not"):
            next(iter(loader))


def test_ranks_with_minibatches_of_different_sizes_are_told_so(feed):
    with (
        mbaas.join(feed.name, "odd", rank=0, world_size=2, batch_size=64, wait_timeout_s=1.0, format="numpy") as loader,
        mbaas.join(feed.name, "odd", rank=1, world_size=2, batch_size=32, format="numpy"),
    ):
        with pytest.raises(mbaas.ConfigError, match=r"same batch_size.*rank 0 has .*64 and rank 1 has .*32"):
            next(iter(loader))


def test_ranks_share_out_what_bad_samples_leave(ray_session, feed_name, tmp_path):
    """Every 13th of 203 files is not an image. The other 187 make minibatches of 32 for 3 ranks."""
    (tmp_path / "class").mkdir()
    for number in range(203):
        path = tmp_path / "class" / f"{number:03d}.png"
        if number % 13:
            cv2.imwrite(str(path), np.full((8, 8, 3), number, np.uint8))
        else:
            path.write_bytes(b"no image")
    data, pipeline = mbaas.read_images(tmp_path), T.Pipeline([T.DecodeImage()])
    with mbaas.serve(feed_name, data, pipeline, batch_size=32, prep_workers=1, on_bad_sample="skip") as feed:
        with Ranks(feed, 3) as trial:
            records = trial.epoch()
            good = {i for record in records for i in record.sample_ids.tolist()}
            assert len(good) == 187
            assert union_flaws(records, good, batch_size=32) == []
            assert feed.status().inexact_epochs == 0


@pytest.mark.chaos
def test_a_rank_that_died_comes_back_with_the_state_of_another(feed):
    """Rank 1 of 2 dies after 5 of 16 minibatches of 64, having read 32 samples of each. Rank 0 continues."""
    with Trials(feed.name) as trials:
        first, second = (trials.join("mortal", rank=rank, world_size=2) for rank in range(2))
        result([rank.take(5) for rank in (first, second)])
        state = result(first.state())
        kill(second.pid)
        second = trials.join("mortal", rank=1, world_size=2)
        result(second.load(state))
        whole, rest = result([rank.rest() for rank in (first, second)])
        assert rest.sizes == (*whole.sizes[5:-1], SAMPLES % 64 // 2)
        seen = np.concatenate([whole.sample_ids, rest.sample_ids])
        assert len(np.unique(seen)) == len(seen) == SAMPLES - 5 * 32
        assert whole.ledger.exact
        assert rest.ledger.exact
        for records in zip(*result([rank.epochs(1) for rank in (first, second)]), strict=True):
            assert union_flaws(records, range(SAMPLES), batch_size=64) == []
        result([rank.close() for rank in (first, second)])


@pytest.mark.chaos
def test_ranks_that_all_died_go_on_where_their_state_says_and_not_behind_their_own_past(feed):
    """They have read more than an epoch since the state, and rejoin before their leases end."""
    with Trials(feed.name) as trials:
        ranks = [trials.join("restored", rank=rank, world_size=2) for rank in range(2)]
        result([rank.epochs(1) for rank in ranks])
        states = result([rank.state() for rank in ranks])
        lost = result([rank.epochs(1) for rank in ranks])
        result([rank.take(5) for rank in ranks])
        for rank in ranks:
            kill(rank.pid)
        ranks = [trials.join("restored", rank=n, world_size=2, state=state) for n, state in enumerate(states)]
        records = [record for (record,) in result([rank.epochs(1) for rank in ranks])]
        assert [record.ledger.feed_epoch for record in records] == [states[0]["feed_epoch"]] * 2
        assert [record.row_digest for record in records] == [record.row_digest for (record,) in lost]
        assert union_flaws(records, range(SAMPLES), batch_size=64) == []
        result([rank.close() for rank in ranks])


@pytest.mark.chaos
def test_a_trial_whose_ranks_died_goes_on_with_another_number_of_them(feed):
    """Each run is removed when the next one starts. Otherwise its leases would hold up the trial."""
    with Trials(feed.name) as trials:
        state, seen = None, 0
        for world_size in (3, 2, 4):
            ranks = [trials.join("elastic", rank=n, world_size=world_size, state=state) for n in range(world_size)]
            result([rank.take(3) for rank in ranks])
            state, seen = result(ranks[-1].state()), seen + 3 * 64
            for rank in ranks:
                kill(rank.pid)
        alone = trials.join("elastic", state=state)
        rest = result(alone.rest())
        assert len(np.unique(rest.sample_ids)) == len(rest.sample_ids) == SAMPLES - seen
        assert rest.ledger.exact
        notes = " ".join(feed.status().notes)
        assert all(f"trial 'elastic' goes on with {ranks}" in notes for ranks in ("2 ranks", "4 ranks", "one process"))
        result(alone.close())


@pytest.mark.long
@pytest.mark.chaos
def test_ranks_go_on_by_the_same_plan_when_a_coordinator_dies(feed):
    """It dies twice while the ranks are at different minibatches."""
    with Trials(feed.name) as trials:
        ranks = [trials.join("trial", rank=rank, world_size=2) for rank in range(2)]
        for _ in range(2):
            result([rank.take(steps) for rank, steps in zip(ranks, (4, 7), strict=True)])
            kill(coordinator_pid(feed.name))
            records = result([rank.rest() for rank in ranks])
            assert union_flaws(records, range(SAMPLES), batch_size=64) == []
            assert records[0].ledger.feed_epoch == records[1].ledger.feed_epoch
        result([rank.close() for rank in ranks])
    assert feed.status().inexact_epochs == 0


@pytest.mark.slow
def test_steps_in_which_a_rank_waits_longer_than_the_other_are_counted(ray_session, feed_name):
    """The quick rank of an unequal pair waits for the slow one, because staging holds only half an epoch.

    The slow rank works 30 ms on each of 16 minibatches of an epoch. Ranks that both work 30 ms find their minibatches
    ready.
    """
    pipeline, data = T.Pipeline([T.DecodeImage()]), synthetic(SAMPLES, height=32, width=32)
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": 3 * BLOCK_BYTES}
    found, waits = {}, {}
    with mbaas.serve(feed_name, data, pipeline, **options) as feed, Trials(feed_name) as trials:
        for trial, steps_s in (("equal", (0.03, 0.03)), ("unequal", (0.0, 0.03))):
            ranks = [trials.join(trial, rank=rank, world_size=2) for rank in range(2)]
            result([rank.epochs(3, step_s) for rank, step_s in zip(ranks, steps_s, strict=True)])
            result([rank.actor.flush.remote() for rank in ranks])
            status = feed.status()
            (found[trial],) = (each for each in status.rank_steps if each.trial == trial)
            waits |= {each.name: each.report.waits for each in status.consumers if each.trial == trial}
            assert [waits[f"{trial}[{rank}]"].total for rank in range(2)] == [48, 48]
            result([rank.close() for rank in ranks])
    assert all(each.ranks == 2 and each.steps == 48 for each in found.values())
    assert found["unequal"].uneven > max(24, 2 * found["equal"].uneven), found
    assert waits["unequal[0]"].within_s(0.9) > waits["unequal[1]"].within_s(0.5)
