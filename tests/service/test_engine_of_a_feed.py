"""A feed keeps the engine that it chose, and states name it. Ray has no GPU here: DALI runs on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import ray

import mbaas
from mbaas import serving
from mbaas import transforms as T
from mbaas.coordinator.recovery import keep_engine, recall_engine
from mbaas.dataset import synthetic
from mbaas.model.engine_choice import EngineChoice
from mbaas.ray_cluster import resources
from mbaas.tools.chaos.participants import kill
from mbaas.wire.consumers import fingerprint_of
from support.processes import coordinator_pid
from support.trials import record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

DATA = synthetic(96, height=16, width=16)
PIPELINE = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
OPTIONS: dict[str, Any] = {"batch_size": 16, "prep_workers": 1, "staging_bytes": 1 << 20, "cache_bytes": 1 << 20}
DALI = EngineChoice("dali", "dali is at least 1.25 times as fast", 1, 100.0, 900.0)
IDENTITY = fingerprint_of(DATA.fingerprint, PIPELINE.fingerprint, seed=0, shuffle=True)


def serve(name: str, **options: Any) -> mbaas.Feed:
    return mbaas.serve(name, DATA, PIPELINE, **{**OPTIONS, **options})


@pytest.fixture
def chooses_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeds decide for DALI, as on a fast GPU; with gpus_per_worker=0 it runs on CPUs."""
    monkeypatch.setattr(serving, "decide", lambda *_given, **_options: DALI)


def test_without_a_usable_gpu_the_probe_finds_out_and_the_feed_runs_on_cpus(
    feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray counts a GPU that no process can use."""
    monkeypatch.setattr(resources, "gpus", lambda: 1)
    with serve(feed_name) as feed:
        status = feed.status()
        assert status.engine == "cpu"
        assert status.engine_choice is not None
        assert status.engine_choice.reason.startswith("DALI failed on the feed's first samples: ResourceError: node")
        assert any(status.engine_choice.sentence in note for note in status.notes)
        with mbaas.join(feed.name, format="numpy") as loader:
            assert record_epoch(loader).flaws(range(len(DATA))) == []


@pytest.mark.usefixtures("chooses_dali")
def test_a_restarted_coordinator_has_the_engine_that_was_chosen(feed_name: str) -> None:
    with serve(feed_name, gpus_per_worker=0) as feed, mbaas.join(feed.name, format="numpy") as loader:
        before = feed.status()
        assert (before.engine, before.engine_choice) == ("dali", DALI)
        assert recall_engine(feed.name, lambda: IDENTITY) == DALI
        assert recall_engine(feed.name, lambda: f"{IDENTITY}-in-order") is None, "another feed of the same name"
        first = record_epoch(loader)
        kill(coordinator_pid(feed.name))
        again = record_epoch(loader)
        wait_until(lambda: feed.status().restarts == 1, "the coordinator has restarted")
        assert feed.status().engine_choice == DALI
        assert first.flaws(range(len(DATA))) == again.flaws(range(len(DATA))) == []
    assert recall_engine(feed_name, lambda: IDENTITY) is None, "a feed that was stopped may choose again"


def test_a_feed_that_was_not_stopped_keeps_its_engine_when_it_is_served_again(
    feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program was killed. GPU nodes have come since, and the feed must not measure them."""
    monkeypatch.setattr(resources, "gpus", lambda: 1)
    monkeypatch.setattr(serving, "run_probe", lambda *_: pytest.fail("nothing must be measured"))
    kept = EngineChoice("cpu", "the cluster has no GPU")
    keep_engine(feed_name, IDENTITY, kept)
    with serve(feed_name) as feed:
        assert feed.status().engine_choice == kept


def test_a_feed_that_had_dali_is_refused_when_no_gpu_is_left(feed_name: str) -> None:
    keep_engine(feed_name, IDENTITY, DALI)
    with pytest.raises(mbaas.ResourceError, match="which chose dali on GPUs, and its epochs continue"):
        serve(feed_name)
    with serve(feed_name, engine="cpu") as feed:
        assert feed.status().engine == "cpu"


def test_a_state_of_another_engine_is_refused_unless_the_engine_is_named(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(serving, "decide", lambda *_given, **_options: DALI)
        with serve(feed_name, gpus_per_worker=0) as feed, mbaas.join(feed.name, format="numpy") as loader:
            next(iter(loader))
            state = loader.state_dict()
    assert state["engine"] == "dali"
    with serve(feed_name) as feed, mbaas.join(feed.name, format="numpy") as loader:
        with pytest.raises(mbaas.StateError, match=r"'dali', and feed .* has 'cpu', .*\(the cluster has no GPU\)"):
            loader.load_state_dict(state)
        with pytest.raises(mbaas.StateError, match="serve it with engine='dali' to continue with the same bytes"):
            mbaas.join(feed.name, state=state)
    with serve(feed_name, engine="cpu") as feed, mbaas.join(feed.name, state=state, format="numpy") as loader:
        assert len(record_epoch(loader).sizes) == len(DATA) // 16 - 1
    assert "their bytes differ slightly" in caplog.text
    assert ray.is_initialized()
