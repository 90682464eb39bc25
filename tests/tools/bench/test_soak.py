"""The soak test finds the true slopes of synthetic looks."""

from __future__ import annotations

import pytest

from benchmarks.soak import Look, Use, slopes
from mbaas.errors import MbaasError


def looks(count: int) -> list[Look]:
    """A coordinator of 100 MB that warms up by 50 MB, then grows by 2 kB per session of 10 minibatches."""
    made = []
    for n in range(count):
        nbytes = 100_000_000 + 2_000 * n * 13 + (0 if n < count / 3 else 50_000_000)
        made.append(Look(5.0 * n, 13 * n, 130 * n, {"coordinator": Use(nbytes, 30, 8)}, 4))
    return made


def test_a_slope_is_given_by_sessions_and_by_minibatches_without_the_warm_up() -> None:
    found = {each.what: each for each in slopes(looks(90))}
    memory = found["coordinator: MB"]
    assert memory.per_1000_sessions == pytest.approx(2.0)
    assert memory.per_100k_minibatches == pytest.approx(20.0)
    assert (memory.first, memory.last) == (pytest.approx(150.78), pytest.approx(152.314))
    for what in ("coordinator: descriptors", "coordinator: threads", "/dev/shm: entries"):
        assert found[what].per_1000_sessions == pytest.approx(0.0, abs=1e-9)


def test_too_few_looks_have_no_slope() -> None:
    with pytest.raises(MbaasError, match=r"a slope needs at least 3 looks, one every 5 s after the warm-up, got 2"):
        slopes(looks(3))
