"""How often prepared samples were delivered, why not to all trials, and what a delivered sample costs."""

from __future__ import annotations

import pytest

from mbaas.model.sharing import LoadingCosts, PipelineCosts, Repeats, Sharing, words


def sharing(received: dict[str, int], prepared: int, **given: int) -> Sharing:
    repeats = Repeats(**{name: given.pop(name) for name in ("lost", "dropped", "passed") if name in given})
    delivered, ahead = given.pop("delivered", sum(received.values())), given.pop("ahead", 0)
    return Sharing(received, prepared, delivered, ahead, repeats, given.pop("pipelines", 1))


def test_trials_in_step_share_everything() -> None:
    """Blocks prepared ahead of the end cost 1 %."""
    found = sharing({"a": 1000, "b": 1000}, 1010, ahead=10)
    assert found.is_full
    assert words(found) == "each sample 1.98 times, for 2 trials"


def test_a_single_trial_has_nobody_to_share_with() -> None:
    assert words(sharing({"a": 1000}, 1600)) == "each sample 0.625 times"
    assert words(sharing({}, 0)) == "each sample 0 times"


def test_nothing_prepared_needs_no_reason() -> None:
    assert sharing({"a": 0, "b": 0}, 0).reasons() == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"passed": 250}, "20 % were prepared again for trials that are behind the others"),
        ({"dropped": 125}, "10 % were prepared again because staging memory was short"),
        ({"lost": 13}, "1.0 % were prepared again after a loss of memory, such as a node's death"),
        ({"ahead": 250}, "20 % were prepared ahead, for no trial yet"),
        ({"pipelines": 2}, "2 pipelines are in use, and minibatches are shared by trials with equal ones"),
    ],
)
def test_each_cause_has_its_share_of_the_prepared_samples(given: dict[str, int], reason: str) -> None:
    """2,000 deliveries of 1,250 samples are 1.6 for each."""
    found = sharing({"a": 1000, "b": 1000}, 1250, **given)
    assert found.times == 1.6
    assert found.reasons() == [reason]
    assert words(found) == f"each sample 1.6 times, for 2 trials: {reason}"


def test_a_trial_with_fewer_samples_is_named() -> None:
    assert sharing({"a": 1000, "b": 600, "c": 995}, 1000).reasons() == [
        "b joined later or is slower: it received 600 of 1,000 samples"
    ]
    (reason,) = sharing({"a": 1000, "b": 600, "c": 500}, 1000).reasons()
    assert reason.endswith("c joined later or is slower: it received 500 of 1,000 samples, and 1 other fewer than all")


def test_small_causes_are_left_out() -> None:
    assert sharing({"a": 1000, "b": 1000}, 1250, lost=12).reasons() == []


def test_each_delivered_sample_costs_the_same() -> None:
    """360 CPU-s for 1,000 delivered samples is 0.36 s each. Alone, a trial pays 240 CPU-s for 200, 1.2 s each."""
    costs = LoadingCosts(300.0, 50.0, 10.0, 1000, 240.0, 200, cpu_price_per_h=0.5)
    trials = (100, 300, 600)
    assert sum(map(costs.cpu_s_of, trials)) == pytest.approx(costs.cpu_s)
    assert costs.cpu_s_of(300) == pytest.approx(108)
    assert costs.alone_cpu_s_of(300) == pytest.approx(360)
    assert costs.price(costs.cpu_s_of(300)) == pytest.approx(0.015)


def test_the_ratio_and_the_number_of_trials_from_which_a_feed_pays() -> None:
    """500 prepared samples took 0.72 s each, more than half of what a DataLoader takes, so one trial pays already."""
    costs = LoadingCosts(300.0, 50.0, 10.0, 1000, 240.0, 200)
    assert costs.ratio == pytest.approx(1.2 / 0.36)
    assert costs.pays_from(500) == 1
    assert [costs.pays_from(samples) for samples in (301, 299, 100)] == [1, 2, 4]  # 1.2 s is 300 samples of 360 s
    assert (LoadingCosts().ratio, LoadingCosts().pays_from(10), costs.pays_from(0)) == (0.0, None, None)


def test_before_the_first_sample_nothing_costs_anything() -> None:
    costs = LoadingCosts(prep_cpu_s=1.0, encoded_samples=0)
    assert (costs.cpu_s_of(10), costs.alone_cpu_s_of(10), costs.price(1.0)) == (0.0, 0.0, None)


def test_each_pipeline_pays_for_its_own_preparation() -> None:
    """The second one takes three quarters of the workers' time for a third of the samples."""
    pipelines = {"": PipelineCosts(0.25, 800), "own": PipelineCosts(0.75, 400)}
    costs = LoadingCosts(240.0, 30.0, 6.0, 1200, pipelines=pipelines)
    assert costs.cpu_s_of(800) == pytest.approx(240 * 0.25 + 36 * 800 / 1200)
    assert costs.cpu_s_of(400, "own") == pytest.approx(240 * 0.75 + 36 * 400 / 1200)
    assert costs.cpu_s_of(800) + costs.cpu_s_of(400, "own") == pytest.approx(costs.cpu_s)
    assert costs.cpu_s_of(9, "unknown") == pytest.approx(9 * costs.sample_cpu_s)
