"""The checker finds and names each bug planted in the trials' deliveries, without false alarms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.tools.chaos.checker import Delivery, Flaw, Row, agreed, check, orders_of, with_pipelines

Epochs = dict[int, list[Row]]


@st.composite
def epochs(draw: st.DrawFn) -> Epochs:
    """One to four epochs over the same samples, each in its own order and with its own bytes."""
    samples = draw(st.integers(4, 30))
    first = draw(st.integers(0, 5))
    return {
        epoch: [(sample, f"{epoch}-{sample}") for sample in draw(st.permutations(range(samples)))]
        for epoch in range(first, first + draw(st.integers(1, 4)))
    }


def delivered(reference: Epochs, batch: int) -> list[Delivery]:
    """Deliveries of a trial that misses nothing."""
    return [
        Delivery(epoch, tuple(rows[at : at + batch]))
        for epoch, rows in reference.items()
        for at in range(0, len(rows), batch)
    ]


def flaws_of(history: list[Delivery], reference: Epochs, *, was_cut_off: bool) -> list[Flaw]:
    return check("t", [history], reference, orders={}, was_cut_off=was_cut_off)


def planted(history: list[Delivery], number: int, rows: list[Row]) -> list[Delivery]:
    """The same history with other rows in one minibatch, or without the minibatch if ``rows`` is empty."""
    instead = [Delivery(history[number].epoch, tuple(rows))] if rows else []
    return [*history[:number], *instead, *history[number + 1 :]]


batches = st.integers(1, 9)


@given(reference=epochs(), batch=batches)
def test_what_is_exact_has_no_flaw(reference: Epochs, batch: int) -> None:
    assert flaws_of(delivered(reference, batch), reference, was_cut_off=False) == []


@given(reference=epochs(), batch=batches, data=st.data())
def test_a_trial_that_was_cut_off_may_lack_its_last_epoch_s_end_alone(reference: Epochs, batch: int, data: Any) -> None:
    history = delivered(reference, batch)
    cut = history[: data.draw(st.integers(1, len(history)))]
    assert flaws_of(cut, reference, was_cut_off=True) == []
    lacks = sum(len(d.rows) for d in history if d.epoch == cut[-1].epoch) - sum(
        len(d.rows) for d in cut if d.epoch == cut[-1].epoch
    )
    flaws = flaws_of(cut, reference, was_cut_off=False)
    assert [(flaw.kind, len(flaw.samples)) for flaw in flaws] == ([("missing", lacks)] if lacks else [])


@given(reference=epochs(), batch=batches, was_cut_off=st.booleans(), data=st.data())
def test_one_planted_bug_is_found_and_named(reference: Epochs, batch: int, was_cut_off: bool, data: Any) -> None:
    """A sample dropped, repeated, changed in a bit or swapped with another, or the wrong epoch number."""
    history = delivered(reference, batch)
    number = data.draw(st.integers(0, len(history) - 1))
    rows, epoch = list(history[number].rows), history[number].epoch
    at = data.draw(st.integers(0, len(rows) - 1))
    sample, digest = rows[at]
    bug = data.draw(st.sampled_from(["dropped", "doubled", "changed", "swapped", "foreign"]))
    if bug == "dropped":
        del rows[at]
        is_end = number == len(history) - 1 and at == len(rows)
        if was_cut_off and is_end:  # it is only cut off a little earlier
            return
        kinds = {"missing", "misplaced"} if was_cut_off else {"missing"}
    elif bug == "doubled":
        rows.insert(at, rows[at])
        kinds = {"repeated"}
    elif bug == "changed":
        rows[at] = sample, digest + "!"
        kinds = {"different"}
    elif bug == "foreign":
        rows.insert(at, (10**6, "x"))
        kinds = {"unknown"}
    else:
        other = data.draw(st.integers(0, len(reference[epoch]) - 1))
        whole = list(reference[epoch])
        index = whole.index((sample, digest))
        if other == index:
            return
        whole[index], whole[other] = whole[other], whole[index]
        flaws = flaws_of(delivered({**reference, epoch: whole}, batch), reference, was_cut_off=was_cut_off)
        assert flaws == [Flaw("misplaced", "t", epoch, tuple(sorted({whole[index][0], whole[other][0]})))]
        return
    flaws = flaws_of(planted(history, number, rows), reference, was_cut_off=was_cut_off)
    assert flaws
    assert {flaw.kind for flaw in flaws} <= kinds
    assert {flaw.epoch for flaw in flaws} == {epoch}
    if not (bug == "dropped" and was_cut_off):
        assert flaws[0].samples == ((10**6,) if bug == "foreign" else (sample,))


@given(reference=epochs(), batch=batches)
def test_a_minibatch_that_comes_twice_is_repeated(reference: Epochs, batch: int) -> None:
    history = delivered(reference, batch)
    (flaw,) = flaws_of([*history, history[0]], reference, was_cut_off=False)
    assert (flaw.kind, len(flaw.samples)) == ("repeated", len(history[0].rows))


@given(reference=epochs(), batch=batches, was_cut_off=st.booleans(), data=st.data())
def test_an_epoch_without_one_minibatch_lacks_all_samples(
    reference: Epochs, batch: int, was_cut_off: bool, data: Any
) -> None:
    """A trial also records an epoch without any delivery."""
    history = delivered(reference, batch)
    lost = data.draw(st.sampled_from(sorted(reference)))
    at = next(number for number, delivery in enumerate(history) if delivery.epoch == lost)
    rest = [delivery for delivery in history if delivery.epoch != lost]
    (flaw,) = flaws_of([*rest[:at], Delivery(lost, ()), *rest[at:]], reference, was_cut_off=was_cut_off)
    assert flaw == Flaw("missing", "t", lost, tuple(sorted(sample for sample, _ in reference[lost])))


def test_an_epoch_that_the_reference_lacks_is_unknown() -> None:
    (flaw,) = flaws_of([Delivery(7, ((1, "a"),))], {6: [(1, "a")]}, was_cut_off=False)
    assert str(flaw) == "t, epoch 7: 1 samples unknown: 1"


@given(reference=epochs(), batch=batches)
def test_without_a_reference_trials_are_compared_with_each_other(reference: Epochs, batch: int) -> None:
    exact, samples = delivered(reference, batch), len(next(iter(reference.values())))
    rows = [(sample, digest + "!") for sample, digest in exact[0].rows]
    histories = {"a": exact, "b": planted(exact, 0, rows)}
    against = agreed(histories.values(), samples)
    assert against == reference
    assert flaws_of(exact, against, was_cut_off=False) == []
    assert [flaw.kind for flaw in flaws_of(histories["b"], against, was_cut_off=False)] == ["different"]


def shares(reference: Epochs, world_size: int, batch: int, order: str = "") -> list[list[Delivery]]:
    """Deliveries to the ranks of a trial that divide minibatches by sample id modulo the world size."""
    return [
        [
            Delivery(each.epoch, tuple(row for row in each.rows if row[0] % world_size == rank), order)
            for each in delivered(reference, batch)
        ]
        for rank in range(world_size)
    ]


@given(reference=epochs(), world_size=st.integers(2, 3))
def test_ranks_are_checked_together(reference: Epochs, world_size: int) -> None:
    ranks = shares(reference, world_size, batch=4 * world_size)
    ranks = [[each for each in rank if each.rows] for rank in ranks]
    whole = check("t", [delivered(reference, 4 * world_size)], reference, orders={}, was_cut_off=False)
    assert whole == []
    epoch = next(iter(reference))
    lost = ranks[0].pop(0)
    (flaw,) = [each for each in check("t", ranks, reference, orders={}, was_cut_off=False) if each.kind == "missing"]
    assert (flaw.epoch, flaw.samples) == (epoch, tuple(sorted(sample for sample, _ in lost.rows)))


TEN = {epoch: [(sample, f"{epoch}-{sample}") for sample in range(10)] for epoch in (3, 4)}
CUT = {3: [TEN[3][at] for at in (4, 2, 0, 1, 3, 9, 8, 5, 6, 7)]}
ORDER = "[[2, []], [3, [5]]]"


def test_ranks_that_have_one_order_are_exact_also_where_it_has_cuts() -> None:
    orders = orders_of([[Delivery(3, tuple(CUT[3]), ORDER)]], samples=10)
    assert orders == {ORDER: [sample for sample, _ in CUT[3]]}
    assert check("t", shares(CUT, 2, 5, ORDER), TEN, orders=orders, was_cut_off=False) == []
    flaws = check("t", shares({3: TEN[3]}, 2, 5, ORDER), TEN, orders=orders, was_cut_off=False)
    assert {flaw.kind for flaw in flaws} == {"misplaced"}, "the plain order where the cut one is due"


def test_ranks_that_part_have_samples_twice_and_not_at_all() -> None:
    """Rank 0 has its half of the cut order, rank 1 the other half of the plain order."""
    cut, plain = [each[3] for each in (CUT, TEN)]
    ranks = [[Delivery(3, tuple(cut[:5]), ORDER)], [Delivery(3, tuple(plain[:5]))]]
    flaws = check("t", ranks, TEN, orders={}, was_cut_off=False)
    assert {(flaw.kind, flaw.samples) for flaw in flaws} == {
        ("missing", (5, 6, 7, 8, 9)),
        ("repeated", (0, 1, 2, 3, 4)),
        ("misplaced", (0, 1, 2, 3, 4)),
    }


def test_an_epoch_counts_for_ranks_that_were_cut_off_only_if_all_finished_it() -> None:
    ranks = [[Delivery(epoch, tuple(TEN[epoch][:5])) for epoch in (3, 4)], [Delivery(3, tuple(TEN[3][5:]))]]
    assert check("t", ranks, TEN, orders={}, was_cut_off=True) == []
    (flaw,) = check("t", ranks, TEN, orders={}, was_cut_off=False)
    assert (flaw.kind, flaw.epoch, flaw.samples) == ("missing", 4, (5, 6, 7, 8, 9))


@pytest.mark.parametrize(
    ("rows", "flaw"),
    [
        ([*TEN[3][4:], *TEN[4][:4]], None),
        ([*TEN[3][4:], *TEN[4][:3]], ("missing", (3,))),
        ([*TEN[3][4:], *TEN[4][:4], TEN[4][4]], ("repeated", (4,))),
        ([*TEN[3][4:], *TEN[4][:3], (3, "7-3")], ("different", (3,))),
    ],
)
def test_an_epoch_that_began_in_the_middle_has_each_sample_once_from_either_epoch(rows, flaw) -> None:
    flaws = check("t", [[Delivery(3, tuple(rows), begin=4)]], TEN, orders={}, was_cut_off=False)
    assert [(each.kind, each.samples) for each in flaws] == ([flaw] if flaw else [])


@pytest.mark.parametrize("lost", [1, 12])
def test_a_flaw_names_the_first_samples(lost: int) -> None:
    flaw = Flaw("missing", "trial-1", 4, tuple(range(lost)))
    assert str(flaw).startswith(f"trial-1, epoch 4: {lost} samples missing: 0")
    assert str(flaw).endswith(", ...") == (lost > 8)


# ---- pipelines of trials ----

PIPELINES: dict[int, Epochs] = {
    number: {epoch: [(sample, f"{number}-{epoch}-{sample}") for sample in (2, 0, 1)] for epoch in range(3)}
    for number in range(2)
}


def with_pipeline(number: int, epoch: int, rows: list[Row] | None = None) -> Delivery:
    """An epoch, prepared with a pipeline."""
    return Delivery(epoch, tuple(PIPELINES[number][epoch] if rows is None else rows), pipeline=number)


def flaws_with_pipelines(history: list[Delivery]) -> list[Flaw]:
    return flaws_of(
        history, {e: [*rows] for e, rows in with_pipelines([history], PIPELINES).items()}, was_cut_off=False
    )


def test_a_trial_may_change_its_pipeline_with_each_epoch() -> None:
    assert flaws_with_pipelines([with_pipeline(0, 0), with_pipeline(1, 1), with_pipeline(0, 2)]) == []


def test_samples_of_another_pipeline_than_the_trial_has_are_different() -> None:
    wrong = with_pipeline(1, 1, PIPELINES[0][1])
    assert flaws_with_pipelines([with_pipeline(0, 0), wrong]) == [Flaw("different", "t", 1, (0, 1, 2))]


def test_an_epoch_of_two_pipelines_has_different_samples() -> None:
    begin, end = PIPELINES[0][0][:1], PIPELINES[1][0][1:]
    flaws = flaws_with_pipelines([with_pipeline(0, 0, begin), with_pipeline(1, 0, end)])
    assert flaws == [Flaw("different", "t", 0, (2,))]
