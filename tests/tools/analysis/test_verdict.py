"""The verdict is one plain sentence, and claims nothing if the views of an epoch disagree."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from reported import split_of_2_s
from stated_rates import about, any_rates, any_setup, line, round_rates

from mbaas.model.pace import Waits
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import verdict
from mbaas.tools.analysis.whole import conclude

SAID: dict[str, Any] = {"data": "d", "pipeline": "p", "step": "s", "notes": ()}


def test_loading_is_the_problem() -> None:
    """5 s, with 3.75 s of fetch and 0.25 s of prep; 5 - 4.9 x = 1.25 ms at x = 3.75 / 4.9 = 76.5 % cached."""
    assert verdict(round_rates(storage=line((1, 200))), Setup()) == (
        "Loading is the problem: the trial waits for data 80 % of the time (75 % for samples to be read and 5.0 % for "
        "samples to be prepared), and storage sets the pace at 5 s an epoch; give the cache 76.5 MB, and an epoch "
        "takes 1.25 s, 4 times as fast."
    )


def test_loading_is_not_the_problem() -> None:
    """Only the step of 1 ms +- 10 % counts: 1,000 steps take 909 ms to 1.11 s."""
    rates = round_rates(step=about(1000, 0.1), storage=line((1, 1e6)), prep=line((1, 1e4)))
    assert verdict(rates, Setup(trials=3)) == (
        "Loading is not the problem: each of 3 trials waits for data less than 1 % of the time, and the training step "
        "sets the pace at 1 s an epoch (909 ms to 1.11 s); use accelerators that are twice as fast, and an epoch takes "
        "500 ms (455 ms to 556 ms), 2 times as fast."
    )


@pytest.mark.parametrize(
    ("spread", "start"),
    [
        (0.01, "Loading is not the problem: the trial waits for data less than 1 % of the time"),
        (0.2, "The measurements are too noisy for a verdict: the trial waits for data 0 % to 30 % of the time"),
    ],
)
def test_noisy_measurements_give_no_verdict(spread: float, start: str) -> None:
    """A step of 1 ms, prep of 0.95 ms. With 20 % more and less, a step of 0.83 ms waits for prep of 1.19 ms: 30 %."""
    rates = round_rates(step=about(1000, spread), prep=line((1, 1053), spread=spread), storage=line((1, 1e6)))
    found = conclude(rates, Setup(prep_workers=1), **SAID)
    assert found.sentence.startswith(start)
    if spread == 0.2:
        assert found.changes == ()
        assert "the least certain rate belongs to" in found.sentence
        assert "(±20 %); measure again" in found.sentence


def test_noise_that_changes_no_verdict_does_not_count() -> None:
    """Storage takes 4 ms +- 30 %, the step 1 ms: waiting is a problem in any case."""
    rates = round_rates(storage=line((1, 250), spread=0.3))
    assert verdict(rates, Setup()).startswith("Loading is the problem: the trial waits for data 75 % of the time")


def test_another_limit_within_the_intervals_is_named() -> None:
    rates = round_rates(storage=line((1, 790), spread=0.1))
    assert "storage (or, within the measured interval, prep (decoding and transforming)) sets the pace" in verdict(
        rates, Setup(), changes=[]
    )


def test_nothing_helps() -> None:
    assert verdict(round_rates(), Setup(), changes=[]).endswith(
        "storage sets the pace at 4 s an epoch; nothing that was looked at would make it 2 % faster."
    )


def test_an_epoch_that_is_over_in_a_moment_is_not_judged() -> None:
    """1,000 samples at 5,000/s take 0.2 s, the step 0.01 s. At 1,000/s they take 1 s: faster storage is worth it."""
    short, long = (round_rates(storage=line((1, rate)), prep=line((1, 1e5)), step=about(1e5)) for rate in (5e3, 1e3))
    found = conclude(short, Setup(), **SAID)
    assert found.sentence.startswith(
        "No verdict: an epoch takes only 200 ms, too short for a recommendation; the trial waits for data 95 % of it."
    )
    assert found.changes == ()
    assert conclude(long, Setup(), **SAID).changes


def test_views_that_agree_change_nothing() -> None:
    rates = round_rates(storage=line((1, 200)))
    assert verdict(rates, Setup(), seen={"loaders": Waits(prep=0.04, fetch=0.8)}) == verdict(rates, Setup())


def test_where_views_of_an_epoch_differ_nothing_is_claimed() -> None:
    seen = {"three runs compared": Waits(prep=0.05, fetch=0.8), "loaders": Waits(prep=0.01, fetch=0.1, peers=0.15)}
    said = verdict(round_rates(storage=line((1, 200))), Setup(cores=8, prep_workers=4), seen=seen, changes=[])
    assert said == (
        "The share of time that trials wait for data is not known: the prediction says 80 %, three runs compared 85 %, "
        "loaders 26 % (15 % for other trials). By the prediction storage sets the pace at 5 s an epoch; nothing is "
        "recommended, because that may be wrong."
    )


def test_where_views_agree_that_trials_wait_but_not_for_what_nothing_is_claimed() -> None:
    """All views give 80 %; storage's share is 75 % by prediction, 0 % by three runs, 78 % by loaders."""
    seen = {"three runs compared": Waits(prep=0.8, fetch=0.0), "loaders": Waits(prep=0.02, fetch=0.78)}
    said = verdict(round_rates(storage=line((1, 200))), Setup(cores=8, prep_workers=4), seen=seen, changes=[])
    assert said == (
        "The cause of the trials' waits is not known: the prediction says 75 % for samples to be read and "
        "5.0 % for samples to be prepared, three runs compared 80 % for samples to be prepared, loaders 78 % for "
        "samples to be read and 2.0 % for samples to be prepared. By the prediction storage sets the pace at 5 s an "
        "epoch; nothing is recommended, because that may be wrong."
    )


def test_waiting_for_other_trials_is_no_disagreement_with_who_takes_it_for_prep() -> None:
    rates = round_rates(prep=line((1, 200), (2, 400), (4, 500)), storage=line((1, 1e6)))
    seen = {"three runs compared": Waits(prep=0.5, fetch=0.0), "loaders": Waits(prep=0.2, fetch=0.0, peers=0.3)}
    assert verdict(rates, Setup(), seen=seen) == verdict(rates, Setup())
    for apart in (Waits(prep=0.0, fetch=0.2, peers=0.3), Waits(prep=0.15, fetch=0.11, peers=0.3)):
        assert "The cause" in verdict(rates, Setup(), seen={**seen, "loaders": apart})


def test_contention_for_cores_is_named_as_that_where_cores_are_known() -> None:
    rates = round_rates(storage=line((1, 200)))
    setup, seen = Setup(cores=2, prep_workers=2, trials=4), {"loaders": Waits(prep=0.06, fetch=0.2)}
    assert "; 4 trials and 2 prep workers contend for 2 cores. By the prediction" in verdict(rates, setup, seen=seen)
    assert "contend" not in verdict(rates, setup, seen=seen, knows_cores=False)


def test_an_analysis_whose_split_disagrees_has_no_headline() -> None:
    """In 2 s, three runs find 1.5 s of prep, and loaders 1.5 s of fetch: equal sums, but the parts differ by 75 %."""
    zero, most = about(0.0, unit="s"), about(1.5, unit="s")
    split = replace(
        split_of_2_s(),
        prep_stall_s=most,
        fetch_stall_s=zero,
        live_prep_stall_s=zero,
        live_fetch_stall_s=most,
        live_peer_stall_s=zero,
    )
    assert split.disagreement == 0.75
    found = conclude(round_rates(storage=line((1, 250))), Setup(), **SAID, split=split)
    assert found.prediction.steady.waits.all == pytest.approx(0.75)
    assert found.sentence.startswith("The cause of the trials' waits is not known: the prediction says")
    assert "differ by 75 % of the epoch" in found.notes[-1]
    assert found.changes == ()
    assert conclude(round_rates(storage=line((1, 250))), Setup(), **SAID).changes


def test_loaders_of_a_running_feed_do_not_contradict_a_prediction_without_a_word() -> None:
    seen = {"loaders since they joined": Waits(prep=0.05, fetch=0.0)}
    found = conclude(round_rates(storage=line((1, 1e6))), Setup(), **SAID, seen=seen, knows_cores=False)
    assert found.sentence.startswith(
        "The share of time that trials wait for data is not known: the prediction says 20 %, loaders since they joined "
        "5.0 %. By the prediction"
    )


@settings(max_examples=10, deadline=None)
@given(any_rates(), any_setup(nodes=2))
def test_it_is_one_sentence_without_jargon(rates: Rates, setup: Setup) -> None:
    said = verdict(rates, setup)
    assert re.fullmatch(
        r"(Loading is (not )?the problem|The measurements are too noisy for a verdict|No verdict): .*[^.]\.", said
    )
    assert not re.search(r"\b(nan|inf|None|MinIO|epoch_s|_)\b", said)
    assert ". " not in said
