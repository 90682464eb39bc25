"""How often prepared samples were delivered, and why not to all trials."""

from __future__ import annotations

import pytest

from mbaas.model.sharing import Repeats, Sharing, words


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
