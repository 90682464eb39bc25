"""Peers are found or reported as missing, and samples that they lose are reported but fail nothing."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mbaas.errors import ConfigError
from mbaas.tools.bench import peers, runner
from mbaas.tools.bench.host import RowRun, run_row
from mbaas.tools.bench.peers import PEERS, InstalledPeer, Peer, find_peers
from mbaas.tools.bench.render import render
from mbaas.tools.bench.report import BenchReport, Machine, Round, summarize
from mbaas.tools.bench.rows import BenchSettings, RowSpec
from mbaas.tools.bench.rows.ray_data import Epochs
from mbaas.tools.bench.runner import row_spec
from mbaas.tools.bench.tasks.base import Data
from mbaas.tools.bench.tasks.images import make_photos
from support.waiting import wait_until

PYTHON = os.environ.get("MBAAS_PEERS_PYTHON")
"""Interpreter of an environment with mbaas[bench,peers], for the long tests."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """107 photographs: batches of 8 leave a remainder of 3."""
    return make_photos(tmp_path_factory.mktemp("peers"), 107, report=lambda _: None)


def run_of(row: str, **more: Any) -> RowRun:
    return RowRun(row, 8, 256, samples_per_s=1234.5, cores_by_kind=(("host", 1.0),), epochs=24, **more)


def test_what_is_installed_is_found_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "ray-data", Peer("NumPy Data", ("numpy", "numpy.linalg"), ("nompy", "numpy")))
    found, left_out = find_peers(["prep", "ray-data"], None)
    version = sys.modules["numpy"].__version__
    assert found == {"ray-data": InstalledPeer(sys.executable, f"NumPy Data (numpy {version})")}
    assert left_out == ()


def test_what_is_not_installed_is_left_out_and_a_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PEERS, "tf-data", Peer("No Data", ("numpy", "nowhere.at.all"), ("nowhere",)))
    found, (sentence,) = find_peers(["tf-data"], None)
    assert not found
    assert sentence.startswith(
        "No Data is left out, because this environment has no nowhere.at.all: install mbaas's extras"
    )
    _, (sentence,) = find_peers(["tf-data"], Path(sys.executable))
    assert f"because {sys.executable} has no nowhere.at.all" in sentence


def test_a_peer_of_another_environment_is_run_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "only_there").mkdir()
    (tmp_path / "only_there" / "only_there.py").touch()
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path}/only_there:{":".join(filter(None, sys.path))} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setitem(PEERS, "tf-data", Peer("Its Data", ("only_there",), ("only-there", "numpy")))
    found, left_out = find_peers(["tf-data"], python)
    assert (found["tf-data"].python, left_out) == (str(python), ())
    assert find_peers(["tf-data"], None)[0] == {}


@pytest.mark.slow
def test_an_environment_with_another_mbaas_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "__version__", "99.0")
    found, (sentence,) = find_peers(["ray-data"], None)
    assert not found
    assert "Ray Data is left out, because this environment has mbaas 0." in sentence
    assert "instead of 99.0" in sentence


@pytest.mark.parametrize("program", ["/bin/false", "/bin/echo"])
def test_what_is_no_python_is_refused(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "tf-data", Peer("No Data", ("nowhere",), ("nowhere",)))
    with pytest.raises(ConfigError, match=f"peers_python must be a Python interpreter, got {program}, which says"):
        find_peers(["tf-data"], Path(program))


def test_what_a_peer_loses_is_told_but_fails_nothing() -> None:
    runs = (run_of("tensorsocket", missing=123_456, repeated=12_345), run_of("mbaas"))
    settings = BenchSettings(rows=("tensorsocket", "mbaas"), trials=(8,), batch=(256,))
    report = BenchReport(
        settings, Machine(), 1500, summarize([Round(runs)], 8), ("TensorSocket (tensorsocket 0)",), ("No",)
    )
    assert report.is_sound
    assert not report.results[0].is_sound
    out = io.StringIO()
    Console(file=out, width=80).print(render(report))
    assert "…" not in out.getvalue().replace("samples/s", "")
    for shown in ("123,456", "12,345", "Peers: TensorSocket (tensorsocket 0). They", "\nNo\n"):
        assert shown in out.getvalue()
    worse = replace(report, results=summarize([Round((run_of("mbaas", missing=1),))], 8))
    assert not worse.is_sound


def test_a_peer_that_fails_is_not_run_again(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    ran: list[tuple[str, int, str]] = []

    def run(spec: RowSpec) -> RowRun:
        ran.append((spec.row, spec.trials, spec.python))
        return replace(run_of(spec.row), error="hung" if (spec.row, spec.trials) == ("tf-data", 2) else "")

    monkeypatch.setattr(runner, "run_row", run)
    monkeypatch.setattr(runner, "find_peers", lambda *_: ({"tf-data": InstalledPeer("/its/python", "1")}, ("No.",)))
    told: list[str] = []
    settings = BenchSettings(data=photos, rows=("dali", "tf-data", "ray-data"), trials=(1, 2), batch=(8,), rounds=2)
    report = runner.run(settings, told.append)
    own, theirs = sys.executable, "/its/python"
    first = [("dali", 1, own), ("tf-data", 1, theirs), ("dali", 2, own), ("tf-data", 2, theirs)]
    assert ran == [*first, *first[:-1]]
    assert report.is_sound
    assert [result.rounds for result in report.results] == [2, 2, 2, 0]
    assert (report.left_out, told[0]) == (("No.",), "No.")


class Counted(Epochs):
    """Epochs represented by their numbers."""

    def __init__(self, spec: RowSpec) -> None:
        super().__init__(spec)
        self.begun: list[int] = []

    def _make(self, number: int) -> Any:
        self.begun.append(number)
        return f"epoch {number}"

    @property
    def held(self) -> list[int]:
        return sorted(self._made)


@pytest.fixture
def epochs(photos: Path) -> Iterator[Counted]:
    spec = RowSpec(BenchSettings(cores=1), "ray-data", 2, Data(photos), 8)
    made = Counted(spec)
    yield made
    made.close()


def test_ray_data_makes_each_epoch_once_and_one_ahead(epochs: Counted) -> None:
    assert epochs.get(0, 0) == epochs.get(1, 0) == "epoch 0"
    wait_until(lambda: epochs.begun == [0, 1], "one is made ahead")
    assert epochs.get(0, 1) == "epoch 1"
    assert epochs.held == [0, 1, 2], "the other trial is still in epoch 0"
    assert epochs.get(1, 1) == "epoch 1"
    assert epochs.held == [1, 2]
    wait_until(lambda: epochs.begun == [0, 1, 2], "none is made twice")


# ---- real peers ----


def peer_spec(row: str, photos: Path) -> RowSpec:
    found, left_out = find_peers([row], None if PYTHON is None else Path(PYTHON))
    if left_out:
        pytest.skip(f"{left_out[0]}; for this test MBAAS_PEERS_PYTHON names it")
    settings = BenchSettings(epochs=2, cores=2, timeout_s=110.0)
    return replace(row_spec(settings, Data(photos), row, 2, 8), python=found[row].python)


@pytest.mark.long
@pytest.mark.parametrize("row", PEERS)
def test_a_peer_for_real(row: str, photos: Path) -> None:
    result = run_row(peer_spec(row, photos))
    assert result.error == ""
    assert (result.row, result.epochs, result.repeated, result.spilled_bytes) == (row, 8, 0, 0)
    assert result.samples_per_s > 0
    # TensorSocket 0.0.5 does not send the last two minibatches of an epoch, with eight and three samples
    assert result.missing == (8 * (8 + 3) if row == "tensorsocket" else 0)


@pytest.mark.long
@pytest.mark.parametrize("row", PEERS)
def test_a_peer_that_fails_says_why_at_once(row: str, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    for number in range(20):
        (tmp_path / "class" / f"{number}.jpg").write_text("not a photograph")
    began = time.monotonic()
    result = run_row(peer_spec(row, tmp_path))
    assert time.monotonic() - began < 100
    assert "BadSampleError" in result.error or "JPEG" in result.error
