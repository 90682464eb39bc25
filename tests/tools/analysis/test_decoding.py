"""Share of decoding, memory needed and speedup of decoded samples match hand calculations."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from reported import bare_analysis, check_of
from rich.console import Console
from stated_rates import about, any_rates, any_setup, decodable_rates, line, round_rates

from mbaas.cli import analysis_view
from mbaas.model.pace import predict
from mbaas.model.quantity import stated
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import recommend
from mbaas.tools.analysis.decoding import AS_GOOD, Decoding, decoding
from mbaas.tools.analysis.measuring.verify import MOST_POINTS, Verification, points


def asked(rates: Rates, setup: Setup) -> Decoding:
    found = decoding(rates, setup)
    assert found is not None
    return found


def test_how_much_memory_ends_decoding_and_what_that_brings() -> None:
    """Prep takes 5 ms, including 4.5 ms of decoding; 500 MB hold all 1,000 samples decoded.

    300 MB hold all samples, and half are decoded: 0.6875 ms, 5.5 times the 0.125 ms with all decoded.
    """
    found = asked(decodable_rates(), Setup(cache_bytes=300e6))
    assert (found.share.value, found.decoded) == pytest.approx((0.9, 0.5))
    assert (found.whole_bytes, found.more_bytes, found.enough_bytes) == (500_000_000, 200_000_000, 500_000_000)
    assert (found.prep_speedup.value, found.epoch_speedup.value) == pytest.approx((5.5, 5.5))
    assert found.sentence == (
        "decoding is 90 % of prep, and 50 % of the samples are kept decoded; 200 MB more memory would keep all of them "
        "decoded and make prep 5.5 times as fast, and epochs 5.5 times"
    )
    assert json.loads(json.dumps(found.to_json()))["prep_speedup"]["value"] == pytest.approx(5.5)


def test_nothing_is_saved_of_what_costs_nothing() -> None:
    """Rates may be stated, and 0 CPU seconds with them."""
    found = asked(decodable_rates(prep_cpu_s=stated(0.0, unit="CPU-s")), Setup())
    assert (found.share.value, found.is_worthwhile) == (0, False)


def test_intervals_are_those_of_both_measurements() -> None:
    """1,600 to 2,400 samples/s decoded and 180 to 220 encoded: 7.3 to 13.3 times."""
    spread = {"prep": line((1, 200), spread=0.1), "decoded_prep": line((1, 2000), spread=0.2)}
    found = asked(decodable_rates(cores=1, **spread), Setup())
    times = found.prep_speedup
    assert (times.low, times.value, times.high) == pytest.approx((1600 / 220, 10, 2400 / 180))
    share = found.share
    assert (share.low, share.value, share.high) == pytest.approx((1 - 220 / 1600, 0.9, 1 - 180 / 2400))
    assert "decoding is 90 % (86 % to 92 %) of prep; " in found.sentence
    assert "make prep 10 (7.27 to 13.3) times as fast" in found.sentence


def test_memory_is_that_of_each_node_and_of_every_copy() -> None:
    two = asked(decodable_rates(), Setup(nodes=2, cache_bytes=50e6))
    assert two.more_bytes == 200_000_000
    assert "200 MB more memory on each node would keep" in two.sentence
    assert asked(decodable_rates(), Setup(trials=3, sharing=False)).whole_bytes == 1_500_000_000


def test_training_that_sets_the_pace_needs_less_memory() -> None:
    """The step takes 1 ms: 1.25 - 1.125 x = 1.01 at x = 0.2133.

    Together with the encoded samples that takes 185.3 MB: 48 of 128 steps of 500 MB. With all decoded, prep is ten
    times as fast, and epochs 1.25 times.

    A step of 1.1 ms needs x = 0.1244. 62.2 MB would be enough while storage delivers the others, but from 100 MB on all
    samples are cached, so it takes 149.8 MB: 39 steps.
    """
    found = asked(decodable_rates(step=about(1000)), Setup())
    assert found.enough_bytes == 48 / 128 * 500_000_000
    assert asked(decodable_rates(step=about(1000 / 1.1)), Setup()).enough_bytes == math.ceil(39 / 128 * 500_000_000)
    assert (found.prep_speedup.value, found.epoch_speedup.value) == pytest.approx((10, 1.25))
    slow = asked(decodable_rates(step=about(100)), Setup())
    assert slow.enough_bytes == 0
    assert slow.sentence.endswith("times as fast, but epochs no shorter, because the training step sets their pace")


def test_a_terminal_shows_it_and_every_figure_of_a_check_stands_below_its_heading() -> None:
    rates, setup = decodable_rates(), Setup(cache_bytes=300e6)
    checked = Verification((check_of(rates, setup, "cache_bytes", 50e6, 0.02),))
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(analysis_view.page(bare_analysis(rates, setup, verification=checked)))
    shown = console.export_text()
    text = " ".join(shown.split())
    assert "· decoding is 90 % of prep, and 50 % of the samples are kept decoded; 200 MB more memory" in text
    assert "8,000/s 0.0 % the same workers prepare samples that are decoded" in text
    assert "cache_bytes = 50 MB 879/s 862/s +2.0 % 865/s +0.4 % prep" in text
    heading = next(line for line in shown.splitlines() if "predicted" in line)
    assert heading.split("verified predictions")[1].split() == [
        *("predicted", "found", "error", "simulated", "error", "limit")
    ]


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (Setup(cache_bytes=500e6), "decoding is 90 % of prep, and all samples are kept decoded"),
        (Setup(cache_bytes=500e6, decoded=False), "the memory that there is could keep all of them decoded"),
        (Setup(cache_bytes=100e6, decoded=False), "400 MB more memory could keep all of them decoded"),
    ],
)
def test_what_there_is_already(setup: Setup, said: str) -> None:
    assert said in asked(decodable_rates(), setup).sentence


def test_decoding_that_takes_hardly_any_time_is_left_alone() -> None:
    rates = decodable_rates(decoded_prep=line((1, 204), (4, 816)))
    found = asked(rates, Setup(cache_bytes=500e6))
    assert found.sentence == "decoding is only 2.0 % of prep, so no samples are kept decoded"
    slower = decodable_rates(decoded_prep=line((1, 150), (4, 600)))
    told = asked(slower, Setup(cache_bytes=500e6)).sentence
    assert told == "samples that are decoded are prepared no faster, so none are kept decoded"
    assert not any("decoded" in change.advice for change in recommend(rates, Setup()))
    assert decoding(round_rates(), Setup()) is None


def test_what_to_change() -> None:
    """With 180 MB a fifth is decoded: 1.025 ms. With all decoded: 0.125 ms."""
    rates = decodable_rates()
    (bigger,) = [change for change in recommend(rates, Setup(cache_bytes=180e6)) if "cache" in change.advice]
    assert bigger.advice == "give the cache 500 MB instead of 180 MB, so that all samples are kept decoded"
    encoded = [change.advice for change in recommend(rates, Setup(cache_bytes=180e6, decoded=False))]
    assert any("500 MB instead of 180 MB with cache_decoded: true, so" in advice for advice in encoded), encoded
    assert bigger.kind == "purchase"
    assert bigger.speedup.value == pytest.approx(8.2)
    kinds = {
        memory: next(c.kind for c in recommend(rates, Setup(), memory_bytes=memory) if "decoded" in c.advice)
        for memory in (4e8, 6e8)
    }
    assert kinds == {4e8: "purchase", 6e8: "setting"}
    off = recommend(rates, Setup(cache_bytes=180e6, decoded=False))
    assert [c.speedup.value for c in off if c.advice == "keep samples decoded (cache_decoded: true)"] == [
        pytest.approx(1.25 / 1.025)
    ]
    part = recommend(decodable_rates(step=about(1000)), Setup())
    assert "give the cache 188 MB, so that 22 % of samples are kept decoded" in [change.advice for change in part]


def test_eight_budgets_from_nothing_to_everything_are_checked() -> None:
    """Three budgets are checked if nothing is decoded, and a budget that equals the setup is not run twice."""
    found = [point.cache_bytes for name, point in points(decodable_rates(), Setup()) if name == "cache_bytes"]
    assert found == pytest.approx([number / 7 * 500e6 for number in range(8)])
    for rates, setup in ((round_rates(), Setup()), (decodable_rates(), Setup(decoded=False))):
        found = [point.cache_bytes for name, point in points(rates, setup) if name == "cache_bytes"]
        assert found == [0, 50e6, 100e6]
    assert len(points(decodable_rates(), Setup())) <= MOST_POINTS


@settings(max_examples=25, deadline=None)
@given(any_rates(), any_setup(nodes=2))
def test_enough_is_about_as_good_as_all(rates: Rates, setup: Setup) -> None:
    rates = replace(rates, overlap=1.0, read_cpu_s=stated(0, unit="CPU-s"))
    found = decoding(rates, replace(setup, dram_bytes=0))
    if found is None:
        return
    # the model reads disks and storage in turns here, so a plan that uses both may be slower than it estimates
    keeping = replace(setup, dram_bytes=0, decoded=True, disk_bytes=0)
    found = asked(rates, keeping)
    shortest = predict(rates, replace(keeping, cache_bytes=max(setup.cache_bytes, found.whole_bytes))).steady.epoch_s
    enough = predict(rates, replace(keeping, cache_bytes=found.enough_bytes)).steady.epoch_s
    assert enough.value <= shortest.value * AS_GOOD * (1 + 1e-9)
