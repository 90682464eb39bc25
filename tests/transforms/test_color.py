"""ColorJitter's factors and their order."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.order import uniforms


def test_numbers_become_intervals_around_one():
    assert T.ColorJitter(0.4, 2, (0.5, 0.7)) == T.ColorJitter((0.6, 1.4), (0.0, 3.0), (0.5, 0.7))


def test_each_stage_blends_with_the_right_reference_in_all_six_orders():
    u = uniforms(0, 0, np.arange(6000), stream=3, draws=4)
    stages = T.ColorJitter((0.5, 0.6), (0.7, 0.8), (0.9, 0.99)).blends(u)
    assert stages.shape == (6000, 3, 3)
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
