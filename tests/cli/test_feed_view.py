"""`mbaas status` shows the state, progress and costs of a feed; tested without Ray."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from feed_statuses import consumer, feed_status
from rich.console import Console

from mbaas.cli import feed_view
from mbaas.cli.status import to_json
from mbaas.errors import FeedGoneError, FeedRestartingError
from mbaas.model.gains import WorkerChange
from mbaas.model.sharing import LoadingCosts
from mbaas.model.tiers import FetchSpeeds
from mbaas.model.waits import RankSteps, WaitCounts
from mbaas.status import ConsumerStatus, DiskStatus, FeedStatus, LendingStatus, NodeStatus, PipelineStatus
from mbaas.wire.consumers import ConsumerReport
from mbaas.wire.samples import Amount, FetchCounts

WAIT = "prep-3 is being started, it needs 1 CPU (for 3 min 05 s so far)"
WHY = "feed 'late' is still starting after 15 s: its 1 cache node did not answer"


@pytest.fixture
def serving() -> FeedStatus:
    return feed_status()


def shown(what: Any, width: int = 240) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_a_feed_in_which_nobody_works_waits_and_says_for_whom(serving: FeedStatus) -> None:
    waiting = replace(serving, workers_at_work=0, waits_for=(WAIT,))
    rates = feed_view.Flow.since_start(waiting)
    assert shown(feed_view.headline(waiting)).startswith("train waiting")
    for view in (feed_view.feed(waiting, rates), feed_view.compact(waiting, rates)):
        assert f"waits: {WAIT}" in shown(view)
    table = shown(feed_view.feeds({"train": (waiting, rates), "late": FeedRestartingError(WHY)}))
    assert [line.split()[:2] for line in table.splitlines() if line.split()[0] in ("train", "late")] == [
        ["train", "waiting"], ["late", "starting"], ["train", "waits:"], ["late", "waits:"]
    ]  # fmt: skip
    assert WAIT in table
    assert WHY in table
    assert feed_view.one_line(waiting, rates).endswith(f"waits: {WAIT}")
    assert to_json("train", waiting)["state"] == "waiting"
    assert to_json("late", FeedRestartingError(WHY))["waits_for"] == [WHY]
    ended = to_json("gone", FeedGoneError("feed 'gone' was stopped"))
    assert (ended["state"], ended["waits_for"]) == ("ended", ["feed 'gone' was stopped"])


def test_each_disk_has_a_line_with_the_reason_why_it_is_not_used(serving: FeedStatus) -> None:
    disks = (
        DiskStatus("/fast", 3 * 10**9, 10**10, 2e9, is_used=True, failure=""),
        DiskStatus("/slow", 0, 10**10, 1e7, is_used=False, failure=""),
        DiskStatus("/lost", 0, 10**10, None, is_used=False, failure="its folder was removed"),
        DiskStatus("/full", 5, 10**10, None, is_used=True, failure="no space left"),
    )
    node = NodeStatus("a5022fda00", 1, 0, 0, Amount(), Amount(), 0, 0.0, 8, 0, FetchSpeeds(), disks)
    with_disks = replace(serving, nodes=(node,))
    table = shown(feed_view.feed(with_disks, feed_view.Flow.since_start(with_disks)))
    lines = {words[0]: " ".join(words[1:]) for line in table.splitlines() if (words := line.split())}
    assert lines["/fast"] == "a5022fda 3 GB 10 GB 2 GB used"
    assert lines["/slow"] == "a5022fda 0 B 10 GB 10 MB not used: no faster than storage"
    assert lines["/lost"] == "a5022fda 0 B 10 GB - dropped: its folder was removed"
    assert lines["/full"] == "a5022fda 5 B 10 GB - stores no more: no space left"
    assert to_json("train", with_disks)["nodes"][0]["disks"][2]["failure"] == "its folder was removed"
    assert "disk " not in shown(feed_view.feed(serving, feed_view.Flow.since_start(serving)))


def test_a_feed_that_serves_says_so_while_it_waits_for_another_worker(serving: FeedStatus) -> None:
    assert shown(feed_view.headline(replace(serving, waits_for=(WAIT,)))).startswith("train serving")
    assert "waits" not in shown(feed_view.feed(serving, feed_view.Flow.since_start(serving)))
    failed = replace(serving, workers_at_work=0, failed="it was stopped")
    assert shown(feed_view.headline(failed)).startswith("train failed")


def test_changes_of_workers_are_shown_with_predicted_and_measured_gain(serving: FeedStatus) -> None:
    view = shown(feed_view.feed(serving, feed_view.Flow.since_start(serving)))
    assert "predicted" not in view
    change = WorkerChange(
        at_s=1.0,
        causes=("borrowed", "started"),
        before=1,
        after=3,
        predicted_per_s=180.0,
        gained_per_s=-12.0,
        basis="by the rate of one worker",
    )
    changed = replace(serving, uptime_s=61.0, worker_changes=(change, replace(change, gained_per_s=None)))
    view = shown(feed_view.feed(replace(changed, moves_s=(0.5, 0.3, 1.0)), feed_view.Flow.since_start(serving)))
    rows = [line.split() for line in view.splitlines() if "borrowed" in line]
    expected = "borrowed and started 1 to 3 1 min +180/s {} by the rate of one worker"
    assert rows == [expected.format("-12/s").split(), expected.format("-").split()]
    assert "500 ms median of 3 workers from other feeds, decision to first part" in " ".join(view.split())


def test_loans_are_shown_with_their_bounds(serving: FeedStatus) -> None:
    usual = LendingStatus(borrowed={}, lent={}, min_workers=1, max_borrowed=None, weight=1.0)
    flow = feed_view.Flow.since_start(serving)
    assert "loans" not in shown(feed_view.feed(replace(serving, lending=usual), flow))
    given = replace(usual, borrowed={"rich": 2}, lent={"poor": 1}, max_borrowed=3, weight=2.0)
    text = " ".join(shown(feed_view.feed(replace(serving, lending=given), flow)).split())
    assert "loans 3 2 from rich, 1 to poor; keeps at least 1, borrows at most 3, weight 2" in text


def test_the_time_to_the_first_minibatch_is_shown_of_those_that_have_one(serving: FeedStatus) -> None:
    assert "first batch" not in shown(feed_view.feed(serving, feed_view.Flow.since_start(serving)))
    times = {"a": 0.4, "b": 1.2, "c": 0.6, "d": 0.0}
    members = tuple(member(name, name, "busy", first_s) for name, first_s in times.items())
    text = " ".join(
        shown(feed_view.feed(replace(serving, consumers=members), feed_view.Flow.since_start(serving))).split()
    )
    assert "first batch 600 ms median of 3 trials, at most 1.2 s, from joining" in text


def test_the_first_epoch_shows_how_far_it_is_and_how_long_it_takes(serving: FeedStatus) -> None:
    """400 of 1,000 samples at 20 per second."""
    rates = feed_view.Flow(15.0, 300, 1200, FetchCounts(), is_recent=True)
    begun = replace(serving, samples=1000, prepared_samples=400, restarts=0)
    text = " ".join(shown(feed_view.compact(begun, rates)).split())
    assert "first epoch 40 % ━━━━━━━━━━ of 1,000 samples, about 30 s left" in text
    assert ", about" not in shown(feed_view.compact(begun, feed_view.Flow(15.0, 0, 0, FetchCounts(), is_recent=True)))
    for over in (replace(begun, prepared_samples=1000), replace(begun, restarts=1)):
        assert "first epoch" not in shown(feed_view.compact(over, rates))


def member(name: str, trial: str, state: str, first_s: float = 0.0) -> ConsumerStatus:
    return consumer(name, trial=trial, state=state, report=ConsumerReport(time_to_first_batch_s=first_s))


def test_the_ranks_of_a_trial_are_one_trial_and_places_that_are_held_are_none(serving: FeedStatus) -> None:
    ranks = [member(f"a[{rank}]", "a", "busy", first_s=1.0 + rank) for rank in range(4)]
    places = [member(f"c[{rank}]", f"c[{rank}]", "reserved") for rank in range(2)]
    status = replace(serving, consumers=(*ranks, member("b", "b", "waiting", first_s=2.0), *places))
    rates = feed_view.Flow.since_start(status)
    assert feed_view.one_line(status, rates).startswith("train: 2 trials, 2 reserved, prepared")
    (row,) = [line for line in shown(feed_view.feeds({"train": (status, rates)})).splitlines() if "serving" in line]
    assert row.split()[:5] == ["train", "serving", "2", "(+2", "reserved)"]
    text = " ".join(shown(feed_view.feed(status, rates)).split())
    assert "first batch 3 s median of 2 trials, at most 4 s" in text
    assert [each["trial"] for each in to_json("train", status)["consumers"]][3:5] == ["a", "b"]
    nobody = replace(serving, consumers=(member("b", "b", "busy"),))
    assert feed_view.one_line(nobody, rates).startswith("train: 1 trial, prepared")


def test_what_a_sample_costs_is_shown_beside_a_dataloader(serving: FeedStatus) -> None:
    assert "DataLoader" not in shown(feed_view.feed(serving, feed_view.Flow.since_start(serving)))
    costs = LoadingCosts(3600.0, 300.0, 300.0, 10**7, encoded_cpu_s=3600.0, encoded_samples=10**6)
    known = replace(serving, costs=costs, prepared_samples=10**6)
    text = " ".join(shown(feed_view.feed(known, feed_view.Flow.since_start(known))).split())
    ratio = "cost 12 % of the CPU time of a DataLoader in each trial: 420 µs instead of at least 3.6 ms for a delivered"
    assert f"{ratio} sample, 70 min in all; pays from 2 trials on" in text
    known = replace(known, costs=replace(costs, cpu_price_per_h=0.06))
    text = " ".join(shown(feed_view.feed(known, feed_view.Flow.since_start(known))).split())
    assert f"{ratio} sample, 70 min in all, 0.07 at 0.06 an hour; pays" in text


def test_pipelines_are_listed_if_there_are_several() -> None:
    own = PipelineStatus("1a2b3c4d", "Resize with size=(32, 32) instead of (64, 64)", ("a", "b"), 2_000, 4.0)
    status = feed_status(
        consumers=(consumer("a", pipeline="1a2b3c4d"), consumer("c")),
        pipelines=(PipelineStatus("", "", ("c",), 500, 0.5), own),
    )
    text = shown(feed_view.feed(status, feed_view.Flow.since_start(status)))
    lines = [line.split() for line in text.splitlines()]
    assert next(line for line in lines if line[:1] == ["1a2b3c4d"])[1:6] == ["2", "2,000", "4", "s", "2"]
    assert "Resize with size=(32, 32) instead" in text
    assert [line[-1] for line in lines if line[:2] == ["a", "busy"]] == ["1a2b3c4d"]
    alone = feed_status(consumers=(consumer("c"),), pipelines=(PipelineStatus("", "", ("c",), 500, 0.5),))
    assert "difference" not in shown(feed_view.feed(alone, feed_view.Flow.since_start(alone)))


def test_waits_are_shown_by_rank_and_the_steps_in_which_ranks_wait_unequally() -> None:
    """Rank 1 waited for 3 of 4 minibatches: 2, 20 and 200 ms. Of 300 compared steps, 60 were uneven."""
    at_once, late = (ConsumerReport(waits=WaitCounts(each)) for each in ((4, *[0] * 9), (1, 1, 0, 1, 0, 1, 0, 0, 0, 0)))
    status = feed_status(
        consumers=(
            consumer("t[0]", trial="t", report=at_once),
            consumer("t[1]", trial="t", report=late),
            consumer("new"),
        ),
        rank_steps=(RankSteps("t", 2, 300, 60),),
    )
    lines = [line.split() for line in shown(feed_view.feed(status, feed_view.Flow.since_start(status))).splitlines()]
    of = {line[0]: line[1:] for line in lines[-20:] if line}
    assert ["t[0]", "4", "100", "%", "-", "-", "-", "-", "-"] in lines
    assert ["t[1]", "4", "25", "%", "25", "%", "25", "%", "25", "%", "-", "-"] in lines
    assert of["t"] == ["2", "300", "20", "%"]
    told = to_json("train", status)
    assert told["consumers"][1]["report"]["waits"]["counts"] == (1, 1, 0, 1, 0, 1, 0, 0, 0, 0)
    assert told["rank_steps"] == ({"trial": "t", "ranks": 2, "steps": 300, "uneven": 60},)
    alone = feed_status(consumers=(consumer("new"),))
    assert "uneven" not in shown(feed_view.feed(alone, feed_view.Flow.since_start(alone)))


@pytest.mark.parametrize(("width", "has_details"), [(80, False), (100, True)])
def test_names_of_consumers_are_whole_and_details_are_left_out_instead(width: int, has_details: bool) -> None:
    names = [f"train_3b68a_0000{number}" for number in range(3)]
    status = feed_status(consumers=tuple(map(consumer, names)))
    printed = shown(feed_view.feed(status, feed_view.Flow.since_start(status)), width)
    assert all(re.search(rf"^{name} +busy ", printed, re.MULTILINE) for name in names)
    assert ("fetch/prep/peer" in printed) == has_details
