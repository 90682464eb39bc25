"""Which engine runs a pipeline."""

from __future__ import annotations

import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engines import make_engine, resolve_engine


def same(image, rng):
    return image


PLAIN = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(8)])
MAPPED = T.Pipeline([T.DecodeImage(), T.Map(same)])
JITTERED = T.Pipeline([T.DecodeImage(), T.ColorJitter(0.4, 0.4, 0.4)])
HUED = T.Pipeline([T.DecodeImage(), T.ColorJitter(hue=(0.0, 0.1))])


@pytest.mark.parametrize(
    ("kind", "pipeline", "gpus", "chosen"),
    [
        ("auto", PLAIN, 0, "cpu"),
        ("auto", PLAIN, 1, "dali"),
        ("auto", MAPPED, 1, "cpu"),
        ("auto", JITTERED, 1, "dali"),
        ("auto", HUED, 1, "cpu"),
        ("cpu", PLAIN, 1, "cpu"),
        ("cpu", MAPPED, 0, "cpu"),
        ("cpu", HUED, 1, "cpu"),
        ("dali", PLAIN, 0, "dali"),
        ("dali", PLAIN, 2, "dali"),
    ],
)
def test_auto_takes_dali_only_with_a_gpu_and_a_pipeline_that_it_can_run(kind, pipeline, gpus, chosen):
    assert resolve_engine(kind, pipeline, gpus=gpus) == chosen


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="engine must be 'auto', 'cpu' or 'dali', got 'gpu'"):
        resolve_engine("gpu", PLAIN, gpus=1)
    for gpus in (0, 1):
        for pipeline, name in ((MAPPED, "Map"), (HUED, "ColorJitter")):
            says = rf"'dali' runs neither a Map nor .* hue; use 'cpu' or 'auto' for a pipeline with {name}\("
            with pytest.raises(ConfigError, match=says):
                resolve_engine("dali", pipeline, gpus=gpus)
    with pytest.raises(ConfigError, match="'dali' runs neither"):
        make_engine("dali", MAPPED, seed=0)
    with pytest.raises(ConfigError, match="threads must be at least 1, got 0"):
        make_engine("cpu", PLAIN, seed=0, threads=0)
    with pytest.raises(ConfigError, match="max_pixels must be at least 1, got 0"):
        make_engine("cpu", PLAIN, seed=0, max_pixels=0)
    with pytest.raises(ConfigError, match="max_bytes must be at least 1, got 0"):
        make_engine("cpu", PLAIN, seed=0, max_bytes=0)
