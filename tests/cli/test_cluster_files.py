"""`mbaas cluster` writes the cluster files, from a checkout and from an installed wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = {
    "Dockerfile", "aws.yaml", "grafana/feed.json", "grafana/search.json", "node.env", "onprem.yaml", "raycluster.yaml",
    "rayjob.yaml",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel of this checkout, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    run = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder / "dist")]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True)
    (built,) = (folder / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, str(built)], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(params=["checkout", "wheel"])
def packages(request: pytest.FixtureRequest) -> Path:
    """A folder with the package mbaas, for Python's path."""
    return ROOT if request.param == "checkout" else request.getfixturevalue("wheel")


def cluster(packages: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "mbaas", "cluster", *map(str, arguments)]
    environment = {"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", "COLUMNS": "80"}
    return subprocess.run(run, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_installs_two_packages(wheel: Path) -> None:
    """Neither is called `cluster`, a name that other packages may use."""
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} - {"bin"} == {
        "mbaas",
        "tune_integration",
    }
    folder = wheel / "mbaas" / "cluster_files"
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == NAMES


def test_files_are_listed(packages: Path, tmp_path: Path) -> None:
    done = cluster(packages, "list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == NAMES
    assert all(line.endswith((".", "?")) for line in lines)


def test_a_file_is_written_and_never_overwritten_by_accident(packages: Path, tmp_path: Path) -> None:
    written = tmp_path / "aws.yaml"
    assert cluster(packages, "write", "aws.yaml", cwd=tmp_path).stdout == "aws.yaml\n"
    assert written.read_text() == (ROOT / "cluster" / "aws.yaml").read_text()
    written.write_text("mine")
    refused = cluster(packages, "write", "aws.yaml", cwd=tmp_path)
    assert (refused.returncode, written.read_text()) == (2, "mine")
    assert "aws.yaml exists already; overwrite it with --force" in refused.stderr
    assert cluster(packages, "write", "aws.yaml", "--to", "other.yaml", cwd=tmp_path).returncode == 0
    assert cluster(packages, "write", "aws.yaml", "--force", cwd=tmp_path).returncode == 0
    assert written.read_text() == (tmp_path / "other.yaml").read_text() != "mine"


def test_a_dashboard_is_written_into_the_current_folder(packages: Path, tmp_path: Path) -> None:
    assert cluster(packages, "write", "grafana/feed.json", cwd=tmp_path).stdout == "feed.json\n"
    assert (tmp_path / "feed.json").read_text() == (ROOT / "cluster" / "grafana" / "feed.json").read_text()


def test_a_folder_may_be_named_and_an_unknown_file_may_not(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert cluster(packages, "write", "node.env", "--to", "there", cwd=tmp_path).returncode == 0
    assert (tmp_path / "there" / "node.env").exists()
    unknown = cluster(packages, "write", "gcp.yaml", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "unknown file 'gcp.yaml'; known are Dockerfile, aws.yaml, grafana/feed" in unknown.stderr
    nowhere = cluster(packages, "write", "node.env", "--to", "none/node.env", cwd=tmp_path)
    assert nowhere.returncode == 2
    assert "cannot write none/node.env: No such file or directory" in nowhere.stderr
