"""`mbaas top` computes rates from two snapshots of a feed, and selects the trials to show; tested without Ray."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from feed_statuses import consumer, feed_status
from rich.console import Console

import mbaas
from mbaas.cli import top
from mbaas.cli.console import statuses
from mbaas.cli.feed_view import RateWindow
from mbaas.errors import FeedGoneError, FeedRestartingError, WaitTimeoutError
from mbaas.status import FeedStatus, WorkerStatus
from mbaas.wire.consumers import ConsumerReport
from mbaas.wire.samples import Amount, FetchCounts


def shown(*feeds: Any, lines: int | None = None, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO())
    by_name = {name: seen if before is None else (seen, before) for name, seen, before in feeds}
    with console.capture() as capture:
        console.print(top.page(by_name, lines=lines))
    return capture.get()


def at(uptime_s: float, **given: Any) -> FeedStatus:
    return feed_status(uptime_s=uptime_s, blocks_per_epoch=8, staging_bytes=100, cache_bytes=100, **given)


def row_of(text: str, trial: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if line.split()[:1] == [trial]]
    return row.split()


def report(samples: int, wait_s: float, step_s: float, *, fetch_s: float = 0.0, peer_s: float = 0.0) -> ConsumerReport:
    return ConsumerReport(
        loader="1", samples=samples, wait_s=wait_s, step_s=step_s, fetch_stall_s=fetch_s, peer_stall_s=peer_s
    )


def test_rates_are_those_between_two_snapshots() -> None:
    """In 10 s: 500 prepared, 4,000 delivered; 100 of 400 fetched samples, 20 MB, came from storage."""
    before = at(100, prepared_samples=10_000, delivered_samples=20_000, fetched=FetchCounts(storage=Amount(9, 10**9)))
    fetched = FetchCounts(local=Amount(300, 6 * 10**7), storage=Amount(109, 10**9 + 2 * 10**7))
    now = at(110, prepared_samples=10_500, delivered_samples=24_000, fetched=fetched, staged_bytes=50)
    text = shown(("train", now, before))
    assert "50/s prepared, 400/s delivered, each 8 times  last 10 s" in text
    assert "storage 2 MB/s, cache hits 75 %" in text
    assert "staged ━━━━━━━━━━ 50 B of 100 B" in text
    assert "no consumer has joined" in text


def test_a_narrow_terminal_cuts_the_figures_and_not_their_names() -> None:
    now = at(20, prepared_samples=1_000, delivered_samples=3_000, staged_bytes=50)
    lines = shown(("train", now, now), width=40).splitlines()
    assert [line.split()[0] for line in lines[-4:-1]] == ["samples", "bytes", "memory"]
    assert max(map(len, lines)) <= 40


def test_a_page_for_browsers_is_updated_and_a_log_file_gets_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[tuple[object, str]] = []
    looks = iter(range(2))

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "write_html", lambda page, path, pictures: pages.append((page, pictures)))
    monkeypatch.setattr(top, "draw_new", lambda seen, pictures: pictures.setdefault("train", "<img/>"))
    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setattr(top.console, "join_cluster", lambda address: None)
    monkeypatch.setattr(top.console, "statuses", lambda name, within_s: {"train": at(3)})
    printed = io.StringIO()
    monkeypatch.setattr(top.console, "out", Console(file=printed, width=80))
    top.top(html=tmp_path / "top.html")
    assert [pictures for _, pictures in pages] == ["<img/>"] * 3
    assert printed.getvalue().count("train serving") == 1


def test_the_first_look_shows_the_means_since_the_start() -> None:
    now = at(20, prepared_samples=1_000, delivered_samples=3_000)
    assert "50/s prepared, 150/s delivered, each 3 times  since the start" in shown(("train", now, now))
    empty = at(0, prepared_samples=0, delivered_samples=0)
    assert "0/s prepared, 0/s delivered, each - times" in shown(("train", empty, empty))


def test_workers_are_counted_with_their_mean_speed() -> None:
    workers = tuple(WorkerStatus(f"prep-{number}", 1, 1, 1, 900.0 * number) for number in range(3))
    text = shown(("train", at(9, workers=workers, workers_at_work=2), at(5)))
    assert "2 of 3 workers at work, 1,350/s each while they prepare" in text


def test_a_trial_shows_its_pace_and_stalls_of_late() -> None:
    """In the last 5 s it waited 2 s: 1 s for bytes, 0.25 s for others and 0.75 s for prep. Before, it never waited."""
    before = at(100, consumers=(consumer("ann", report=report(10_000, 0.0, 100.0)),))
    after = report(10_600, 2.0, 103.0, fetch_s=1.0, peer_s=0.25)
    ann = consumer("ann", epoch=3, block=6, held_blocks=2, report=after)
    text = shown(("train", at(105, consumers=(ann,)), before))
    assert row_of(text, "ann") == [
        "ann",
        "busy",
        "3",
        "75",
        "%",
        "120",
        "40",
        "%",
        "15",
        "%",
        "20",
        "%",
        "5.0",
        "%",
        "2",
    ]


def test_trials_with_pipelines_of_their_own_show_them() -> None:
    ann, ben = consumer("ann", pipeline="1a2b3c4d"), consumer("ben")
    status = at(9, consumers=(ann, ben))
    text = shown(("train", status, status))
    assert row_of(text, "ann")[-1] == "1a2b3c4d"
    assert " ".join(row_of(text, "ben")).endswith("the feed's")
    plain = at(9, consumers=(ben,))
    assert "pipeline" not in shown(("train", plain, plain))


@pytest.mark.parametrize("width", [80, 130])
def test_a_long_reason_leaves_room_for_the_names(width: int) -> None:
    why = "the slowest consumer, trial-b, is at block 133, this one at 135; it is waited for until it comes back"
    waiting = consumer("a1b2c_00001", state="waiting", waits_for=why, report=report(9, 1.0, 1.0))
    status = at(9, consumers=(waiting,))
    text = shown(("train", status, status), width=width)
    assert row_of(text, "a1b2c_00001")[1] == "waiting"
    assert max(map(len, text.splitlines())) <= width
    assert ("the slowest" in text) == (width > 100)


@pytest.mark.parametrize(
    ("over_s", "known", "samples_per_s"),
    [(5.0, True, "90"), (7.0, True, "-"), (7.0, False, "90")],
    ids=["it may not have told yet", "it told nothing for too long", "it joined since"],
)
def test_without_news_a_trial_shows_its_whole_time_at_first(over_s: float, known: bool, samples_per_s: str) -> None:
    same = consumer("ann", report=report(900, 0.0, 10.0))
    other = replace(same, report=replace(same.report, loader="0"))  # an earlier loader of the same name
    text = shown(("train", at(100 + over_s, consumers=(same,)), at(100, consumers=(same if known else other,))))
    assert row_of(text, "ann")[5] == samples_per_s


def test_where_not_all_fit_those_that_wait_most_are_shown_in_their_order() -> None:
    """20 lines have room for 12 of 14 trials; the trials that wait 0 % and 1 % are left out."""
    trials = [consumer(f"t{number}", report=report(1, number * 5 % 14, 100.0)) for number in range(14)]
    status = at(9, consumers=tuple(trials))
    text = shown(("train", status, status), lines=20)
    names = [line.split()[0] for line in text.splitlines() if line[:1] == "t" and line[1:2].isdigit()]
    assert names == [each.name for each in trials if each.report.wait_s > 1]
    assert "and 2 more with less stall" in text
    assert len(text.splitlines()) <= 20
    assert "more with less stall" not in shown(("train", status, status))


def test_a_feed_without_a_status_says_why() -> None:
    for error, word in (
        (FeedRestartingError("it starts"), "starting"),
        (FeedGoneError("it was stopped"), "ended"),
        (WaitTimeoutError("it did not answer"), "silent"),
    ):
        assert shown(("train", error, None)).strip() == f"train {word} · {error}"
    assert shown().strip() == "no feed runs on this cluster"


def test_a_coordinator_that_does_not_answer_in_time_hides_no_other_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(mbaas.Feed):
        def status(self, *, timeout_s: float = 60.0) -> FeedStatus:
            if self.name == "other":
                return at(9, name="other")
            raise WaitTimeoutError(f"it did not answer within {timeout_s:g} s")

    monkeypatch.setattr(mbaas, "feeds", lambda: [mbaas.connect("train"), mbaas.connect("other")])
    monkeypatch.setattr(mbaas, "connect", lambda name: Silent(name, None))
    seen = statuses(None, within_s=7.0)
    assert str(seen["train"]) == "it did not answer within 7 s"
    assert isinstance(seen["other"], FeedStatus)
    assert str(statuses("train")["train"]) == "it did not answer within 60 s"


def test_the_window_gives_the_snapshot_of_fifteen_seconds_ago() -> None:
    window, seen = RateWindow(), [at(second) for second in range(40)]
    for number, status in enumerate(seen):
        window.add(status)
        assert window.first is seen[max(0, number - 15)]
    window.add(at(3))
    assert window.first.uptime_s == 3


def test_a_page_for_browsers_is_replaced_as_a_whole_and_text_in_it_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "top.html"
    for name in ("<b>one</b>", "<i>two</i>"):
        status = feed_status(name=name, consumers=(consumer("<script>"),))
        top.write_html(top.page({name: (status, status)}, lines=None), path, "<img src='{x}'/>")
    assert [each.name for each in tmp_path.iterdir()] == ["top.html"]
    html = path.read_text()
    assert '<meta http-equiv="refresh" content="1">' in html
    assert "&lt;i&gt;two&lt;/i&gt;" in html
    assert "</pre><img src='{x}'/></body>" in html
    assert "&lt;script&gt;" in html
    assert not re.search("<script|<i>|<b>|&gt;one", html)
