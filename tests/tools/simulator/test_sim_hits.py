"""Hit rates of MinIO and of the page cache, epoch by epoch."""

from __future__ import annotations

import pytest

from mbaas.errors import ConfigError
from mbaas.model.page_cache import page_cache_hits
from mbaas.tools.simulator.chance import hit_fractions


@pytest.mark.parametrize("cached", [0.2, 0.5, 0.8])
def test_the_page_cache_comes_to_its_formula(cached: float) -> None:
    """The second epoch finds what strict LRU would find; the lists settle in the next ones."""
    hits = hit_fractions("page_cache", cached=cached, epochs=6, samples=10_000)
    assert hits[0] == 0
    assert hits[3:] == pytest.approx([page_cache_hits(cached)] * 3, abs=0.04)


def test_minio_hits_what_it_holds() -> None:
    """0.35 of 1,003 samples is 351.05, so 351 fit."""
    assert hit_fractions("minio", cached=0.35, epochs=4, samples=1003) == (0, *[351 / 1003] * 3)


@pytest.mark.parametrize("cached", [0.0, 1.0])
def test_the_ends_of_both(cached: float) -> None:
    for policy in ("minio", "page_cache"):
        assert hit_fractions(policy, cached=cached, epochs=3, samples=101)[1:] == (cached, cached)


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"cached must be a share from 0 to 1, got 1\.5"):
        hit_fractions("page_cache", cached=1.5, epochs=2)
