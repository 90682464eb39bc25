"""ColorJitter draws its factors and their order."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.samples.order import uniforms


def test_numbers_become_intervals_around_one():
    assert T.ColorJitter(0.4, 2, (0.5, 0.7)) == T.ColorJitter((0.6, 1.4), (0.0, 3.0), (0.5, 0.7))


def test_hue_becomes_an_interval_around_zero():
    assert T.ColorJitter(hue=0.1) == T.ColorJitter(hue=(-0.1, 0.1))
    assert T.ColorJitter(hue=(0.2, 0.3)).hue == (0.2, 0.3)
    assert repr(T.ColorJitter()) == repr(T.ColorJitter(hue=(0, 0)))


def test_each_stage_blends_with_the_right_reference_in_all_six_orders():
    u = uniforms(0, 0, np.arange(6000), substream=3, draws=T.ColorJitter.draws)
    stages = T.ColorJitter((0.5, 0.6), (0.7, 0.8), (0.9, 0.99)).changes(u)
    assert stages.shape == (6000, 3, 4)
    assert not stages[:, :, 3].any()
    kinds = np.where(stages[:, :, 1] != 0, "s", np.where(stages[:, :, 2] != 0, "c", "b"))
    orders, counts = np.unique(["".join(row) for row in kinds], return_counts=True)
    assert sorted(orders) == sorted(["bcs", "bsc", "cbs", "csb", "sbc", "scb"])
    assert counts.min() > 850
    own = {kind: stages[:, :, 0][kinds == kind] for kind in "bcs"}
    for kind, (low, high) in {"b": (0.5, 0.6), "c": (0.7, 0.8), "s": (0.9, 0.99)}.items():
        assert low <= own[kind].min() < own[kind].max() < high
        assert own[kind].mean() == pytest.approx((low + high) / 2, abs=0.005)
    assert stages[:, :, 1][kinds == "s"] == pytest.approx(1 - own["s"])
    assert stages[:, :, 2][kinds == "c"] == pytest.approx(1 - own["c"])


def test_hue_joins_the_three_blends_in_all_24_orders_and_leaves_their_factors():
    u = uniforms(0, 0, np.arange(24000), substream=3, draws=T.ColorJitter.draws)
    factors = ((0.5, 0.6), (0.7, 0.8), (0.9, 0.99))
    stages = T.ColorJitter(*factors, hue=(0.1, 0.3)).changes(u)
    assert stages.shape == (24000, 4, 4)
    turn = stages[:, :, 3]
    names = np.select([turn != 0, stages[:, :, 1] != 0, stages[:, :, 2] != 0], ["h", "s", "c"], "b")
    orders, counts = np.unique(["".join(row) for row in names], return_counts=True)
    assert len(orders) == 24
    assert {"".join(sorted(order)) for order in orders} == {"bchs"}
    assert counts.min() > 850
    drawn = turn[names == "h"]
    assert 0.1 <= drawn.min() < drawn.max() < 0.3
    assert drawn.mean() == pytest.approx(0.2, abs=0.005)
    assert (stages[names == "h"][:, :3] == [1, 0, 0]).all()
    without = T.ColorJitter(*factors).changes(u)
    np.testing.assert_array_equal(np.sort(stages[:, :, 0])[:, :3], np.sort(without[:, :, 0]))
