"""A feed's engine is measured only if both are possible, and is kept when the feed is served again."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray

from mbaas import transforms as T
from mbaas.coordinator import engine_decision
from mbaas.coordinator.engine_decision import are_shared, decide, run_probe
from mbaas.errors import ResourceError
from mbaas.model.engine_choice import EngineChoice, EngineRoom, WorkerRates
from mbaas.settings import FeedOptions
from mbaas.wire.samples import EngineProbe

PLAIN = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(8)])
MAPPED = T.Pipeline([T.DecodeImage(), T.Map(np.fliplr, deterministic=True)])
ROOM = EngineRoom(cpu_workers=4, dali_workers=2, gpus=1, is_shared=True)
FAST_GPU = EngineProbe(WorkerRates(100.0, 5_000.0))
SLOW_GPU = EngineProbe(WorkerRates(100.0, 50.0))


def unasked() -> Any:
    raise AssertionError("nothing must be measured here")


def decided(
    found: EngineProbe | None = None, *, gpus: int = 1, earlier: EngineChoice | None = None, **options: Any
) -> EngineChoice:
    """The decision with this result of the probe; without one, a probe is an error."""
    pipeline = options.pop("pipeline", PLAIN)
    asked = FeedOptions(batch_size=8, **options)
    probe, room = (unasked, unasked) if found is None else (lambda: found, lambda: ROOM)
    return decide("train", asked, pipeline, gpus=gpus, earlier=earlier, room=room, probe=probe)


@pytest.mark.parametrize(
    ("options", "engine", "reason"),
    [
        ({"gpus": 0}, "cpu", "the cluster has no GPU"),
        ({"gpus": 4, "gpus_per_worker": 0}, "cpu", "gpus_per_worker=0 leaves workers no GPU"),
        ({"pipeline": MAPPED}, "cpu", "DALI runs no Map of images or spectrograms, and the pipeline has Map("),
        ({"engine": "cpu"}, "cpu", "engine='cpu' is set"),
        ({"engine": "dali", "gpus": 0}, "dali", "engine='dali' is set"),
        ({"dali_share": 0.6}, "dali", "dali_share=0.6 divides the images between DALI and CPUs"),
    ],
)
def test_nothing_is_measured_where_only_one_engine_is_possible(
    options: dict[str, Any], engine: str, reason: str
) -> None:
    choice = decided(**options)
    assert choice.engine == engine
    assert choice.reason.startswith(reason)
    assert choice.cpu_per_s is choice.dali_per_s is None


def test_measured_rates_decide() -> None:
    fast, slow = decided(FAST_GPU, gpus=3), decided(SLOW_GPU)
    assert (fast.engine, fast.cpu_per_s, fast.gpus) == ("dali", 400.0, 3)
    assert (slow.engine, slow.cpu_per_s, slow.gpus) == ("cpu", 400.0, 1)


def test_if_dali_fails_the_feed_runs_on_cpus_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    choice = decided(EngineProbe(None, "RuntimeError: CUDA driver version is insufficient"))
    assert choice.engine == "cpu"
    assert "DALI failed on the feed's first samples: RuntimeError: CUDA driver version is insufficient" in caplog.text
    assert choice.reason in caplog.text


def test_without_rates_dali_is_taken_as_the_engine_that_was_so_before(caplog: pytest.LogCaptureFixture) -> None:
    asked = FeedOptions(batch_size=8)
    late = decide("train", asked, PLAIN, gpus=1, earlier=None, room=lambda: ROOM, probe=lambda: "it was late")
    assert (late.engine, late.cpu_per_s) == ("dali", None)
    assert late.reason.endswith("nothing was measured: it was late")
    bad = decided(EngineProbe(None))
    assert bad.engine == "dali"
    assert "no sample was prepared" in bad.reason
    assert caplog.text.count("nothing was measured") == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ray.exceptions.GetTimeoutError("late"), "the probe did not end within 20 s"),
        (ray.exceptions.RayError("The actor died: exit code 1"), "the probe failed: The actor died: exit code 1"),
    ],
)
def test_a_probe_that_dies_is_not_called_late(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    asked = FeedOptions(batch_size=8, gpus_per_worker=0.5)
    monkeypatch.setattr(engine_decision, "PrepWorkerActor", MagicMock())
    monkeypatch.setattr(engine_decision.ray, "kill", lambda _: None)
    monkeypatch.setattr(engine_decision.connection, "get", MagicMock(side_effect=error))
    assert run_probe("train", asked, MagicMock(), PLAIN) == reason


@pytest.mark.parametrize("engine", ["cpu", "dali"])
def test_a_feed_that_is_served_again_keeps_its_engine_without_a_probe(engine: Any) -> None:
    before = EngineChoice(engine, "it was faster", gpus=2, cpu_per_s=1.0, dali_per_s=2.0)
    assert decided(earlier=before) == before
    assert decided(earlier=EngineChoice("cpu", "no GPU", gpus=0)).engine == "cpu", "GPU nodes came since"


def test_a_feed_that_had_dali_on_gpus_is_refused_without_them() -> None:
    before = EngineChoice("dali", "it was faster", gpus=2)
    for options in ({"gpus": 0}, {"gpus": 1, "gpus_per_worker": 0}):
        with pytest.raises(ResourceError, match=r"'train' was served with engine='auto', which chose dali .* 0 GPUs"):
            decided(earlier=before, **options)
        assert decided(earlier=before, engine="cpu", **options).engine == "cpu", "an engine that is named is taken"


def test_dali_on_cpus_that_was_set_before_is_no_choice_of_auto() -> None:
    assert decided(gpus=0, earlier=EngineChoice("dali", "engine='dali' is set")).engine == "cpu"


@pytest.mark.parametrize(
    ("reserved", "roles", "shared"),
    [
        (None, {None}, True),
        (None, {"prep"}, False),
        (None, {"prep", "trial"}, True),
        (0.1, {None}, True),
        (1, {None}, False),
    ],
)
def test_trials_share_the_gpus_unless_these_are_for_prep(
    monkeypatch: pytest.MonkeyPatch, reserved: float | None, roles: set[str | None], shared: bool
) -> None:
    """A worker that reserves a tenth of a GPU leaves the rest to a trial."""
    monkeypatch.setattr(engine_decision.resources, "labels_of_gpu_nodes", lambda _: roles)
    assert are_shared(FeedOptions(batch_size=8, gpus_per_worker=reserved)) is shared
