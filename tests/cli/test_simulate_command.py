"""``mbaas simulate`` writes tables, JSON and plots, and one sentence for invalid input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mbaas.cli.simulate import app

PRESET = ("policies", "mnist", "--set", "samples=3001")


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "120"})


def told(*arguments: object) -> dict[str, Any]:
    """The command's output with --json."""
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", ["policies", "sweep", "cache", "frequency", "imbalance", "presets"])
def test_each_command_shows_examples(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert f"mbaas simulate {command}" in done.output.partition("Examples")[2]
    assert max(map(len, done.output.splitlines())) <= 80


def test_policies_by_location() -> None:
    found = told(*PRESET, "--epochs", 2, "--policies", "perfect,naive,mbaas")
    assert (found["system"], found["epochs"], found["samples"]) == ("mnist", 2, 3001)
    assert list(found["policies"]) == ["perfect", "naive", "mbaas"]
    naive = found["policies"]["naive"]
    assert sum(naive["seconds"].values()) == pytest.approx(naive["total_s"])
    assert sum(naive["samples"].values()) == 2 * 3001
    assert found["policies"]["perfect"]["total_s"] == pytest.approx(2 * 3001 * 760 / 4 / 64e6)


def test_policies_as_a_table_and_a_plot(tmp_path: Path) -> None:
    done = call(*PRESET, "--set", "trials=8", "--plot", tmp_path / "bars.svg")
    assert done.exit_code == 0
    assert "mnist: 5 epochs, 4 workers, minibatches of 32, 8 trials" in done.output
    rows = [line.split()[1] for line in done.output.splitlines() if line.startswith("│")]
    assert rows[0] == "perfect"
    assert "partitioned_minio" in rows
    assert "partitioned_minio" in (tmp_path / "bars.svg").read_text()


def test_equal_policies_are_explained() -> None:
    """A reader gets 385 MB/s and prepares at 200 MB/s: 8 threads fill the PFS, 2,870 / 4 = 717 MB/s for each worker."""
    asked = ("policies", "imagenet-1k", "--set", "samples=20011", "--policies", "perfect,naive,staging_buffer,mbaas")
    told = " ".join(call(*asked).output.split())
    assert "2 policies are as fast as training alone: at 64 MB/s of compute per worker, training is the limit" in told
    found = re.search(r"Loading begins to limit mbaas above (\d+) MB/s and staging_buffer above (\d+) MB/s", told)
    assert found is not None
    assert [float(rate) for rate in found.groups()] == pytest.approx([717, 717], rel=0.03)
    assert "as fast as training alone" not in call(*asked, "--set", "compute_bytes_per_s=2GB/s").output


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """A preset as printed is a valid file."""
    file = tmp_path / "own.yaml"
    file.write_text(call("presets", "mnist").stdout.replace("50_000", "777"))
    assert told("policies", file, "--policies", "minio")["samples"] == 777


def test_files_are_checked_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("name: own\nmachine: reference\ndataset:\n  samples: 10\n  sample: 1 Kx\n")
    done = call("policies", file)
    assert done.exit_code == 2
    assert "own.yaml:5: dataset.sample must be a size such as '2 GiB'" in done.stderr


def test_sweep() -> None:
    found = told(
        *("sweep", "mnist", "--set", "samples=3001", "--set", "compute_bytes_per_s=5 GB/s"),
        *("--x", "cache_bytes=0,1 MB,3 MB", "--y", "trials=1,4", "--versus", "minio"),
    )
    assert found["x"] == {"name": "cache_bytes", "values": [0, 1e6, 3e6]}
    assert [len(row) for row in found["total_s"]] == [3, 3]
    assert found["speedup"][1][0] > 2


def test_sweep_as_a_table_and_a_plot(tmp_path: Path) -> None:
    axes = ("--x", "cache_bytes=0,1MB", "--y", "trials=1,4")
    done = call("sweep", "mnist", "--set", "samples=301", *axes, "--plot", tmp_path / "s.png")
    assert done.exit_code == 0
    assert "1 MB" in done.output
    assert (tmp_path / "s.png").stat().st_size > 5000


def test_cache() -> None:
    assert told("cache", "--policy", "minio", "--cached", 0.5, "--epochs", 3)["hit_fraction"] == [0, 0.5, 0.5]
    asked = ("cache", "--policy", "page_cache", "--cached", 0.5, "--epochs", 3, "--samples", 20_000)
    assert told(*asked)["hit_fraction"][1:] == pytest.approx([0.153, 0.205], abs=0.015)
    assert told("cache", "--policy", "belady", "--cached", 0.5, "--samples", 2_000)["hit_fraction"][1:] == [0.5] * 4
    assert "epoch 1: 50 %" in call("cache", "--policy", "minio", "--cached", 0.5).output


def test_frequency(tmp_path: Path) -> None:
    asked = ("frequency", "--workers", 4, "--epochs", 20, "--samples", 20_011, "--delta", 0.6)
    found = told(*asked, "--monte-carlo", "--plot", tmp_path / "f.svg")
    assert found["simulated"] == pytest.approx(found["expected"], rel=0.15)
    assert told(*asked)["simulated"] is None
    assert (tmp_path / "f.svg").exists()
    assert "at least 9 times" in call(*asked).output


def test_imbalance(tmp_path: Path) -> None:
    asked = ("imbalance", "--nodes", 16, "--local-batch", 64, "--steps", 300)
    found = told(*asked, "--plot", tmp_path / "i.svg")
    assert 0 < found["p25"] < found["median"] < found["p75"] < 0.1
    assert "of a global minibatch is transferred" in call(*asked).output


def test_presets_and_policies_are_listed() -> None:
    shown = call("presets").output
    assert all(name in shown for name in ("imagenet-22k", "cosmoflow-512", "lobster", "CoorDL"))
    assert "network: 24 GB/s" in call("presets", "reference").output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["policies", "imagenet"], "there is no preset 'imagenet'; known are cosmoflow"),
        (["policies", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["policies", "mnist", "--policies", "best"], "got 'best'"),
        (["policies", "mnist", "--set", "workers"], "workers must be a whole number, got ''"),
        (["policies", "mnist", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["policies", "mnist", "--plot", "x.pdf"], "must end with .png or .svg, got 'x.pdf'"),
        (["sweep", "mnist", "--x", "trials", "--y", "workers=1"], "--x must be a parameter and its values"),
        (["cache", "--policy", "fifo", "--cached", "1"], "must be one of minio, page_cache, belady, got 'fifo'"),
        (["imbalance", "--nodes", "0", "--local-batch", "1"], "nodes must be at least 1, got 0"),
    ],
)
def test_wrong_command_lines(arguments: list[str], sentence: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
