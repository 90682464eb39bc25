"""Which engine runs a pipeline."""

from __future__ import annotations

import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engine import make_engine, resolve_engine


def same(image, rng):
    return image


PLAIN = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(8)])
MAPPED = T.Pipeline([T.DecodeImage(), T.Map(same)])


@pytest.mark.parametrize(
    ("kind", "pipeline", "gpus", "chosen"),
    [
        ("auto", PLAIN, 0, "cpu"),
        ("auto", PLAIN, 1, "dali"),
        ("auto", MAPPED, 1, "cpu"),
        ("cpu", PLAIN, 1, "cpu"),
        ("cpu", MAPPED, 0, "cpu"),
        ("dali", PLAIN, 0, "dali"),
        ("dali", PLAIN, 2, "dali"),
    ],
)
def test_auto_takes_dali_only_with_a_gpu_and_without_a_map(kind, pipeline, gpus, chosen):
    assert resolve_engine(kind, pipeline, gpus=gpus) == chosen


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="engine must be 'auto', 'cpu' or 'dali', got 'gpu'"):
        resolve_engine("gpu", PLAIN, gpus=1)
    for gpus in (0, 1):
        with pytest.raises(ConfigError, match="engine 'dali' cannot run a Map; use 'cpu' or 'auto' for Pipeline"):
            resolve_engine("dali", MAPPED, gpus=gpus)
    with pytest.raises(ConfigError, match="cannot run a Map"):
        make_engine("dali", MAPPED, seed=0)
    with pytest.raises(ConfigError, match="threads must be at least 1, got 0"):
        make_engine("cpu", PLAIN, seed=0, threads=0)
    with pytest.raises(ConfigError, match="max_pixels must be at least 1, got 0"):
        make_engine("cpu", PLAIN, seed=0, max_pixels=0)
