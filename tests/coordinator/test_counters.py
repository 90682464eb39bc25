"""A feed counts bad samples, reports, epochs and costs exactly once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from mbaas.coordinator import counters
from mbaas.coordinator.counters import Counters, Reports, Sums
from mbaas.coordinator.status_report import metric_values
from mbaas.core.staging.streams import STREAM_BITS
from mbaas.model.sharing import PipelineCosts, Repeats
from mbaas.ray_cluster.metrics import METRICS
from mbaas.samples.order import ASIDE, SampleOrder
from mbaas.wire.blocks import BlockMeta
from mbaas.wire.consumers import ConsumerReport
from mbaas.wire.samples import Amount, BadSample, EpochLedger, FetchCounts

ORDER = SampleOrder(23, 0, 6)
"""Four blocks: 6, 6, 6 and 5 samples."""


def made(block: int, *bad: int, reason: str = "text") -> BlockMeta:
    """Metadata of a block whose samples are good except for ``bad``."""
    first, end = ORDER.span(block)
    return BlockMeta(
        block=block,
        epoch=ORDER.epoch_of(block),
        samples=end - first - len(bad),
        bad=tuple(BadSample(i, f"{i}.png", reason) for i in bad),
        nbytes=100,
        fetch_s=0.0,
        prep_s=0.1,
        fetched=FetchCounts(),
    )


def test_a_sample_is_listed_once_with_how_often_it_was_left_out() -> None:
    """Sample 7 is bad in epochs 0 and 1, and sample 9 in epoch 1. A block that is prepared twice counts once."""
    kept = Counters()
    for meta in (made(1, 7), made(1, 7), made(4, 9, 7, reason="empty")):
        kept.finished("prep-0", meta.block, meta, ORDER)
    listed = [(s.sample_id, s.uri, s.reason, s.times, s.feed_epoch) for s in kept.skipped.values()]
    assert listed == [(9, "9.png", "empty", 1, 1), (7, "7.png", "empty", 2, 1)]
    assert kept.skipped_total == 3
    assert not kept.notes


def test_repeated_samples_are_counted_by_cause() -> None:
    """Block 1 is lost, block 2 dropped for room. Block 3, of 5 samples, is dropped after all had it, and later lost."""
    kept = Counters()
    for block in (0, 1, 2, 3):
        kept.finished("prep-0", block, made(block), ORDER)
    assert kept.repeats == Repeats()
    kept.dropped(2, for_room=True)
    kept.dropped(3, for_room=False)
    for block in (1, 2, 3, 3):
        kept.finished("prep-0", block, made(block), ORDER)
    assert kept.repeats == Repeats(lost=11, dropped=6, passed=5)
    assert kept.remade == 4
    kept.forget(2)  # tried again because it lacked samples: not a repetition
    kept.finished("prep-0", 2, made(2), ORDER)
    assert kept.remade == 4


def test_a_block_that_was_dropped_and_made_again_is_lost_the_next_time() -> None:
    """Block 1 of two parts, 2 and 4 samples, is dropped and made again, and then loses its second part twice."""
    kept = Counters()
    parts = [structs.replace(made(1), samples=samples) for samples in (2, 4)]
    for meta in parts:
        kept.finished("prep-0", 1, meta, ORDER)
    kept.dropped(1, for_room=True)
    for meta in parts:
        kept.finished("prep-0", 1, meta, ORDER)
    assert kept.repeats == Repeats(dropped=6)
    for _ in range(2):
        kept.finished("prep-0", 1, parts[1], ORDER)
    assert kept.repeats == Repeats(dropped=6, lost=8)
    kept.dropped(1, for_room=False)
    kept.finished("prep-0", 1, parts[0], ORDER)
    assert kept.repeats == Repeats(dropped=6, lost=8, passed=2)


def test_what_was_left_out_of_a_block_that_is_made_anew_is_tried_again_and_counted_again() -> None:
    """As in a feed that keeps all blocks: one of two bad samples can be read in the next epoch."""
    kept = Counters()
    kept.finished("prep-0", 1, made(1, 7, 9), ORDER)
    assert [bad.sample_id for bad in kept.left_out(1)] == [7, 9]
    kept.forget(1)
    assert kept.left_out(1) == ()
    kept.finished("prep-0", 1, made(1, 9), ORDER)
    assert [bad.sample_id for bad in kept.left_out(1)] == [9]
    assert [(s.sample_id, s.times) for s in kept.skipped.values()] == [(7, 1), (9, 2)]
    assert kept.remade == 0


def test_however_often_a_block_is_made_anew_what_it_lacks_is_left_out_of_an_epoch_once() -> None:
    kept = Counters()
    for _ in range(5):
        kept.forget(1)
        kept.finished("prep-0", 1, made(1, 7), ORDER)
    assert not kept.notes, "1 of 23 is less than a tenth"


def test_what_is_made_again_for_one_consumer_is_of_no_later_epoch() -> None:
    kept = Counters()
    aside = structs.replace(made(4 * ASIDE + 1, 9), epoch=1)
    for meta in (made(5, 7), aside, made(8, 3)):
        kept.finished("prep-0", meta.block, meta, ORDER)
    assert [(s.sample_id, s.feed_epoch) for s in kept.skipped.values()] == [(7, 1), (9, 1), (3, 2)]


def test_only_the_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(counters, "KEPT_SKIPPED", 2)
    kept = Counters()
    for block, bad in ((0, (1, 2)), (1, (3,)), (4, (2,)), (5, (4,))):
        kept.finished("prep-0", block, made(block, *bad), ORDER)
    assert [(s.sample_id, s.times) for s in kept.skipped.values()] == [(2, 2), (4, 1)]
    assert kept.skipped_total == 5


def test_that_much_is_left_out_is_said_once() -> None:
    """2 of 23 samples in epoch 0 are less than a tenth. The third one in epoch 1 exceeds it."""
    kept = Counters()
    for block, bad in ((0, (1, 2)), (4, (1, 2)), (5, (3,)), (6, (4, 5))):
        kept.finished("prep-0", block, made(block, *bad), ORDER)
    (note,) = kept.notes
    assert note.endswith("3 of 23 samples are left out as bad, so far in epoch 1; the last is 3.png: text")


def test_samples_left_out_of_an_epoch_are_counted_for_each_pipeline() -> None:
    """With each of three pipelines 1 of 23 samples is bad, less than a tenth. With the last one it is 3 later."""
    kept = Counters()
    for stream in range(3):
        kept.finished("prep-0", (stream << STREAM_BITS) + 1, made(1, 7), ORDER)
    assert not kept.notes
    kept.finished("prep-0", (2 << STREAM_BITS) + 2, made(2, 13, 14), ORDER)
    (note,) = kept.notes
    assert "3 of 23 samples" in note


def test_a_pipeline_inherits_nothing_from_the_one_that_had_its_number_before() -> None:
    """The former could not prepare sample 7. For the next one it is not left out, and its block is no repetition."""
    kept = Counters()
    block, other = (1 << STREAM_BITS) + 1, (2 << STREAM_BITS) + 1
    for each in (block, other):
        kept.finished("prep-0", each, made(1, 7), ORDER)
        kept.dropped(each, for_room=True)
    kept.forget_stream(1)
    assert [len(kept.left_out(each)) for each in (block, other)] == [0, 1]
    assert list(kept.by_stream) == [2]
    kept.finished("prep-0", block, made(1), ORDER)
    assert kept.repeats == Repeats()
    kept.finished("prep-0", other, made(1, 7), ORDER)
    assert kept.repeats == Repeats(dropped=5)


@pytest.mark.parametrize(
    ("seconds", "predicted", "said"),
    [
        (1280.0, 1408.0, "an epoch took 21.3 min; 23.5 min were predicted (+10 %)"),
        (41.5, 40.0, "an epoch took 41.5 s; 40 s were predicted (-3.6 %)"),
    ],
)
def test_how_long_an_epoch_took_is_said_as_people_say_it(monkeypatch, seconds, predicted, said) -> None:
    clock = iter([0.0, 1.0, seconds + 2.0])  # the feed begins, the epoch is predicted, the epoch ends
    monkeypatch.setattr(counters.time, "monotonic", lambda: next(clock))
    kept = Counters()
    kept.expect(predicted)
    ledger = EpochLedger(
        epoch=0, feed_epoch=0, samples=23, expected_samples=23, id_hash=1, expected_id_hash=1, seconds=seconds
    )
    kept.report("ann", ConsumerReport(ledgers=(ledger,)))
    (note,) = kept.notes
    assert note.endswith(f" {said}")


def test_ledgers_of_a_report_are_entered_by_their_numbers_and_not_kept_with_it() -> None:
    """A report may hold thousands of short epochs, and each status includes every consumer's last report."""
    kept, ledger = Counters(), EpochLedger(0, 0, 5, 1, 5, 1)
    told = ConsumerReport("loader", samples=10, ledgers=(ledger, replace(ledger, epoch=1)))
    for report in (told, told, replace(told, ledgers=(replace(ledger, epoch=2),), first_ledger=2)):
        kept.report("ann", report)
    assert [entry.ledger.epoch for entry in kept.ledgers.newest(9)] == [0, 1, 2]
    assert kept.reports.latest["ann"].ledgers == ()
    assert kept.reports.latest["ann"].samples == 10


def test_a_report_that_another_one_overtook_takes_nothing_back() -> None:
    """A loader's thread reports an epoch's end while the trial works on its last minibatch, and flushes afterwards."""
    kept = Counters()
    early, late = (ConsumerReport("one", samples=403, wait_s=1.0, step_s=step_s) for step_s in (0.60, 0.62))
    kept.report("ann", late)
    kept.report("ann", replace(early, ledgers=(EpochLedger(0, 0, 5, 1, 5, 1),)))
    assert kept.reports.latest == {"ann": late}
    assert len(kept.ledgers.newest(9)) == 1, "the ledger found only in this report is recorded"
    again = ConsumerReport("two", samples=13, step_s=0.02)
    kept.report("ann", again)
    assert kept.reports.latest == {"ann": again}, "another loader with that name starts from zero"
    assert kept.reports.total.samples == 403 + 13


@pytest.mark.parametrize("seed", range(50))
def test_reports_count_once_in_whatever_order_they_come(seed: int) -> None:
    """If a trial is cloned or moves, its earlier loader may still report after the later one."""
    chances, kept = Random(seed), Reports()
    done = dict.fromkeys([("ann", "one"), ("ann", "two"), ("bob", "three")], 0)
    newest: dict[str, str] = {}  # consumer -> the last of its loaders to send a first report
    told = {key: ConsumerReport() for key in done}
    waiting: list[tuple[str, ConsumerReport]] = []
    for _ in range(60):
        name, loader = key = chances.choice([*done])
        done[key] += chances.randrange(1, 5)
        waiting.append((name, ConsumerReport(loader, samples=done[key])))
        while waiting and chances.random() < 0.6:
            name, report = waiting.pop(chances.randrange(len(waiting)))
            kept.enter(name, report)
            before = told[key := (name, report.loader)]
            if not before.loader:
                newest[name] = report.loader
            told[key] = max(before, report, key=lambda each: each.samples)
            assert kept.total.samples == sum(each.samples for each in told.values())
            assert kept.latest == {name: told[name, loader] for name, loader in newest.items()}
    assert "" not in {each.loader for each in told.values()}


def test_loaders_of_one_name_are_forgotten_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later loader goes first if the earlier one reported after it."""
    monkeypatch.setattr(counters, "KEPT_NAMES", 2)
    kept = Reports()
    for name, loader, samples in (("ann", "one", 5), ("ann", "two", 3), ("ann", "one", 6), ("bob", "three", 1)):
        kept.enter(name, ConsumerReport(loader, samples=samples))
    assert [*kept.latest] == ["bob"], "the latest of ann was forgotten"
    kept.enter("eve", ConsumerReport("four", samples=2))
    assert [*kept.latest] == ["bob", "eve"]
    assert kept.total.samples == 6 + 3 + 1 + 2


def test_every_metric_has_a_value() -> None:
    """The prediction error has a value once there was a prediction."""
    kept = Counters()
    names = {metric.name for metric in METRICS if metric.kind != "histogram"}
    assert metric_values(kept, staged_bytes=0, workers=0).keys() == names - {"mbaas_prediction_error"}
    kept.prediction_error = 0.0
    assert metric_values(kept, staged_bytes=0, workers=0).keys() == names


def test_sums_of_processes_that_end_and_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "KEPT_NAMES", 2)
    sums = Sums()
    for process, so_far in [("a", 2.0), ("b", 1.0), ("a", 3.0), ("a", 2.5), ("c", 4.0), ("d", 1.0)]:
        sums.enter(process, so_far)
    assert sums.total == 3.0 + 1.0 + 4.0 + 1.0
    assert sums.enter("d", 1.5) == 0.5
    assert sums.enter("b", 1.0) is None, "it was forgotten"


def test_a_dataloader_is_compared_with_blocks_that_were_decoded() -> None:
    """A worker's start does not count, nor do blocks with samples from the decoded tier."""
    counted = Counters()
    decoded = FetchCounts(local=Amount(6, 60), decoded=Amount(2, 50))
    for block, cpu_s, fetched in ((0, 5.0, FetchCounts()), (1, 6.5, FetchCounts()), (2, 7.0, decoded)):
        counted.finished("prep-0", block, structs.replace(made(block), cpu_s=cpu_s, fetched=fetched), ORDER)
    costs = counted.costs(None)
    assert (costs.prep_cpu_s, costs.encoded_cpu_s, costs.encoded_samples) == (7.0, 1.5, 6)
    assert costs.alone_sample_cpu_s == 0.25


def test_what_streams_take_and_give_is_counted_for_each() -> None:
    """A consumer that changes its pipeline has samples of both."""
    counted, other = Counters(), 1 << STREAM_BITS
    for block, prep_s in ((0, 1.0), (other, 3.0)):
        counted.finished("prep-0", block, structs.replace(made(0), prep_s=prep_s), ORDER)
    for samples, stream in ((10, 0), (25, 0), (30, 1)):
        counted.report("a", ConsumerReport(loader="x", samples=samples), stream)
    costs = counted.costs(None, {0: "", 1: "own", 2: "without samples"})
    assert costs.pipelines == {"": PipelineCosts(0.25, 25), "own": PipelineCosts(0.75, 5)}
    assert counted.costs(None).pipelines == {}
