"""A running feed is analyzed and simulated from its own counters, and its prediction is checked."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stated_rates import about

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import StateError
from mbaas.memory.budgets import MemoryClaim
from mbaas.model.forms import SampleCosts
from mbaas.model.pace import Waits, predict
from mbaas.model.rates import Rates
from mbaas.model.sharing import LoadingCosts
from mbaas.status import ConsumerStatus, FeedStatus, WorkerStatus
from mbaas.tools.analysis.decoding import decoding
from mbaas.tools.analysis.whole import analyze_feed, rates_of, sample_bytes, seen_by_loaders, setup_of, simulate_feed
from mbaas.tools.simulator import POLICIES
from mbaas.wire.consumers import Claims, ConsumerReport, FeedInfo
from mbaas.wire.samples import Amount, FetchCounts
from support.waiting import wait_until

SAMPLES, BATCH_SIZE, STEP_S = 403, 13, 0.02
G = BATCH_SIZE / STEP_S
"""650 samples/s."""


def train(loader: mbaas.Loader) -> None:
    for _ in loader:
        time.sleep(STEP_S)


def test_a_running_feed_knows_where_its_time_goes(ray_clean: None, feed_name: str) -> None:
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    with mbaas.serve(feed_name, synthetic(SAMPLES), pipeline, batch_size=BATCH_SIZE, prep_workers=1) as feed:
        with pytest.raises(StateError, match="has prepared nothing yet"):
            analyze_feed(feed_name)
        with mbaas.join(feed_name, consumer="me", format="numpy") as loader:
            train(loader)
            loader.flush()
            found = analyze_feed(feed_name)
            assert found.rates.samples == SAMPLES
            assert 0.75 * G < found.rates.step.value <= 1.02 * G
            assert found.prediction.steady.limit == "step"
            assert "Loading is not the problem" in found.sentence

            system, outcomes = simulate_feed(feed_name)
            assert [each.policy for each in outcomes] == list(POLICIES)
            assert system.dataset.samples == SAMPLES
            assert feed.status().prediction_error is None
            train(loader)
            loader.flush()
            error = wait_until(lambda: feed.status().prediction_error, "an epoch answered")
            assert abs(error) < 0.3
            assert any("were predicted" in note for note in feed.status().notes)
            assert loader.ledger is not None
            assert SAMPLES / G * 0.95 < loader.ledger.seconds < 3 * SAMPLES / G


# ---- counters of a feed, without Ray ----


def did(samples: int, step_s: float, **more: float) -> ConsumerReport:
    return ConsumerReport("loader", samples=samples, step_s=step_s, **cast("dict[str, Any]", more))


def member(name: str, report: ConsumerReport, *, trial: str | None = None, state: str = "busy") -> ConsumerStatus:
    return ConsumerStatus(
        name, state, False, trial=trial or name, epoch=0, block=0, blocks_per_epoch=1, pipeline="", difference="",
        held_blocks=0, cohort=0, apart="", waits_for="", report=report, last_ledger=None,
    )  # fmt: skip


def status_of(*members: ConsumerStatus) -> FeedStatus:
    """Status of a feed with 10,000 samples of 100 kB and one worker that prepares 2,000/s."""
    lists = ("consumers", "pipelines", "workers", "waits_for", "skipped", "notes", "ledgers", "nodes")
    decoded = ("decoded", "decoded_on_disk")
    nothing = ("prediction_error", "failed", "decoded_costs", "engine_choice")
    others = ("name", "engine", "claims", *decoded, "fetched", "costs", *nothing, "samples")
    given: dict[str, Any] = {each.name: 1 for each in fields(FeedStatus) if each.name not in (*lists, *others)}
    given |= {
        **dict.fromkeys(lists, ()),
        **dict.fromkeys(decoded, Amount()),
        "consumers": members,
        "workers": (WorkerStatus("prep-0", 1, 0, 1000, 2000.0),),
        "fetched": FetchCounts(local=Amount(1000, 100_000_000)),
        "claims": Claims(memory=MemoryClaim(0, 1), cpus=1.0, gpus=0.0),
        "samples": 10_000,
        "costs": LoadingCosts(),
    }
    return FeedStatus(**given, **dict.fromkeys(nothing), name="train", engine="cpu")


def known_of(status: FeedStatus) -> Rates:
    info = cast("FeedInfo", SimpleNamespace(spec=SimpleNamespace(made=SimpleNamespace(nbytes=150_000))))
    return rates_of(status, info, about(1e9, unit="bytes/s"))


def test_the_ranks_of_a_trial_are_one_trial_whose_pace_is_theirs_together() -> None:
    """4 ranks take 2,500 of 10,000 samples each in 25 s: 400/s and an epoch of 25 s, like one consumer."""
    alone = status_of(member("t", did(10_000, 25.0)))
    ranks = status_of(*(member(f"t[{rank}]", did(2_500, 25.0), trial="t") for rank in range(4)))
    for status in (alone, ranks):
        assert setup_of(status).trials == 1
        assert known_of(status).step.value == 400.0
        assert predict(known_of(status), setup_of(status)).steady.epoch_s.value == 25.0


def test_the_rank_whose_data_came_last_says_how_long_steps_are() -> None:
    """Rank 0 steps for 20 s and waits for 5. The other rank waits inside its steps, which seem to take 25 s."""
    late, other = did(5_000, 20.0, wait_s=5.0), did(5_000, 25.0)
    status = status_of(member("t[0]", late, trial="t"), member("t[1]", other, trial="t"))
    assert known_of(status).step.value == 500.0
    assert seen_by_loaders(status)["loaders since they joined"].all == 0.2


def test_the_rates_of_both_forms_and_what_decoding_is_worth() -> None:
    """A worker prepares 2,000/s.

    Three quarters are decoded and take a fifth of the time: 800/s and 4,000/s separately. The check is
    0.25 / 800 + 0.75 / 4,000 = 1 / 2,000. An encoded sample has 100 kB; decoded ones do not count.
    """
    costs = SampleCosts(encoded_bytes=100_000, decoded_bytes=6e5, encoded_s=1e-3, decoded_s=2e-4, storage_s=1e-4)
    fetched = FetchCounts(local=Amount(1000, 475_000_000), decoded=Amount(750, 450_000_000))
    status = status_of(member("t", did(10_000, 1.0)))
    status = replace(status, decoded_costs=costs, fetched=fetched, cache_bytes=3_500_000_000)
    rates, setup = known_of(status), setup_of(status)
    assert rates.sample_bytes == sample_bytes(status) == 100_000
    assert rates.decoded_prep is not None
    assert (rates.prep.quantity(1).value, rates.decoded_prep.quantity(1).value) == pytest.approx((800, 4000))
    found = decoding(rates, setup)
    assert found is not None
    assert found.share.value == pytest.approx(0.8)
    assert (found.decoded, found.more_bytes) == (pytest.approx(0.5), 2_500_000_000)
    assert "2.5 GB more memory would keep all of them decoded" in found.sentence
    only_decoded = replace(status, fetched=FetchCounts(local=fetched.decoded, decoded=fetched.decoded))
    assert sample_bytes(only_decoded) == 100_000
    without = replace(status, decoded_costs=None, fetched=FetchCounts(local=Amount(1000, 100_000_000)))
    assert decoding(known_of(without), setup_of(without)) is None
    assert not setup_of(without).decoded


def test_a_place_that_is_held_for_a_trial_is_no_trial() -> None:
    held = [member(f"reservation {number}", did(0, 0.0), state="reserved") for number in range(3)]
    assert setup_of(status_of(member("t", did(10_000, 25.0)), *held)).trials == 1
    assert setup_of(status_of(*held)).trials == 1, "a feed between two trials is still worth a question"


def test_loaders_say_what_was_waited_for_after_the_first_minibatch() -> None:
    """10 of 50 s of waits precede the first minibatch: 40 s next to 60 s of steps, split into 20, 50 and 30 %."""
    report = did(1_000, 60.0, wait_s=50.0, fetch_stall_s=25.0, peer_stall_s=15.0, time_to_first_batch_s=10.0)
    (seen,) = seen_by_loaders(status_of(member("t", report))).values()
    assert (seen.prep, seen.fetch, seen.peers) == pytest.approx((0.08, 0.2, 0.12))


def test_a_trial_that_was_busy_before_its_first_minibatch_is_not_said_to_have_waited() -> None:
    report = did(1_000, 60.0, wait_s=1.0, time_to_first_batch_s=30.0)
    assert seen_by_loaders(status_of(member("t", report))) == {"loaders since they joined": Waits(prep=0.0, fetch=0.0)}
    assert seen_by_loaders(status_of(member("t", ConsumerReport()))) == {}
