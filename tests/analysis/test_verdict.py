"""The sentence that people read."""

from __future__ import annotations

import re

from hypothesis import given, settings
from stated_rates import about, any_rates, any_setup, line, round_rates

from mbaas.analysis.changes import verdict
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup


def test_loading_is_the_problem() -> None:
    """5 s of which 3.75 s fetch and 0.25 s prep; 5 - 4.9 x = 1.25 ms a sample with 3.75 / 4.9 = 76.5 % cached."""
    assert verdict(round_rates(storage=line((1, 200))), Setup()) == (
        "Loading is the problem: the trial waits for data 80 % of the time (75 % for samples to be read and 5.0 % for "
        "samples to be prepared), and storage sets the pace at 5 s an epoch; give the cache 76.5 MB, and an epoch "
        "takes 1.25 s, 4 times as fast."
    )


def test_loading_is_not_the_problem() -> None:
    """A step of 1 ms +- 10 % is all there is: 1,000 of them take 909 ms to 1.11 s."""
    rates = round_rates(step=about(1000, 0.1), storage=line((1, 1e6)), prep=line((1, 1e4)))
    assert verdict(rates, Setup(trials=3)) == (
        "Loading is not the problem: each of 3 trials waits for data only 0 % of the time, and the training step sets "
        "the pace at 1 s an epoch (909 ms to 1.11 s); use accelerators that are twice as fast, and an epoch takes "
        "500 ms (455 ms to 556 ms), 2 times as fast."
    )


def test_nothing_helps() -> None:
    assert verdict(round_rates(), Setup(), changes=[]).endswith(
        "storage sets the pace at 4 s an epoch; nothing that was looked at would make it 2 % faster."
    )


def test_views_that_agree_change_nothing() -> None:
    rates = round_rates(storage=line((1, 200)))
    assert verdict(rates, Setup(), seen={"loaders": 0.85}) == verdict(rates, Setup())


def test_where_views_of_an_epoch_differ_nothing_is_claimed() -> None:
    seen = {"three runs compared": 0.85, "loaders": 0.26}
    said = verdict(round_rates(storage=line((1, 200))), Setup(cores=8, prep_workers=4), seen=seen, changes=[])
    assert said == (
        "How much trials wait for data is not known: the prediction says 80 % of the time, three runs compared 85 %, "
        "loaders 26 %. By the prediction storage sets the pace at 5 s an epoch; nothing that was looked at would make "
        "it 2 % faster."
    )


def test_contention_for_cores_is_named_as_that() -> None:
    rates = round_rates(storage=line((1, 200)))
    said = verdict(rates, Setup(cores=2, prep_workers=2, trials=4), seen={"loaders": 0.26}, changes=[])
    assert "; 4 trials and 2 prep workers contend for 2 cores. By the prediction" in said


@settings(max_examples=10, deadline=None)
@given(any_rates(), any_setup(nodes=2))
def test_it_is_one_sentence_without_jargon(rates: Rates, setup: Setup) -> None:
    said = verdict(rates, setup)
    assert re.fullmatch(r"Loading is (not )?the problem: .*[^.]\.", said)
    assert not re.search(r"\b(nan|inf|None|MinIO|epoch_s|_)\b", said)
    assert ". " not in said
