"""Wheel and source distribution: complete, with valid metadata, and usable in a fresh virtual environment."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import mbaas

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
HEAVY = "torch", "nvidia.dali", "cv2", "matplotlib"
"""Modules that `import mbaas` leaves to the functions that use them."""


def run(*command: object, cwd: Path) -> str:
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "RAY_AUTH_MODE": "disabled", "HOME": str(Path.home())}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(kind: str, source: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", folder, cwd=source)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution, as pip builds it."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the installed wheel; the dependencies are those of this environment.

    A .pth file adds them, because tests have no network and the dependencies take gigabytes. Finders of editable
    installs, such as that of this checkout, are left out.
    """
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    run(
        *(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-index", "--no-deps"),
        wheel,
        cwd=folder,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    dependencies = sysconfig.get_paths()["purelib"]
    # after the installed wheel; a path in a .pth file is not searched for further .pth files
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin"


def test_the_wheel_from_the_source_distribution_is_that_of_the_checkout(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = built("wheel", ROOT, tmp_path_factory.mktemp("checkout"))
    names, others = ({*zipfile.ZipFile(each).namelist()} for each in (wheel, other))
    assert names == others
    assert {"mbaas/py.typed", "mbaas/cluster_files/Dockerfile", "tune_integration/__init__.py"} <= names


def test_metadata_is_valid_and_complete(wheel: Path) -> None:
    """The checks of an index: known fields, valid values, and a description that it can show."""
    folder = f"mbaas-{mbaas.__version__}.dist-info"
    archive = zipfile.ZipFile(wheel)
    said = Metadata.from_email(archive.read(f"{folder}/METADATA"), validate=True)  # raises for invalid fields
    assert (said.name, str(said.version)) == ("mbaas", mbaas.__version__)
    assert said.description_content_type == "text/markdown"
    assert said.description is not None
    assert said.description.startswith("# mbaas")
    assert said.license_expression == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert not [each for each in said.requires_dist or [] if each.url], "an index refuses direct references"


def test_the_changelog_has_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", mbaas.__version__]


def test_the_installed_wheel_works(fresh: Path, tmp_path: Path) -> None:
    where = run(fresh / "python", "-c", "import mbaas, tune_integration; print(mbaas.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert "serve" in run(fresh / "mbaas", "--help", cwd=tmp_path)
    assert run(fresh / "mbaas", "--version", cwd=tmp_path) == f"mbaas {mbaas.__version__}\n"


def test_import_loads_no_large_library(fresh: Path, tmp_path: Path) -> None:
    """They take seconds; so does Ray, until a feed is used."""
    code = f"import sys, mbaas; print([name for name in {(*HEAVY, 'ray', 'pyarrow', 'numpy')} if name in sys.modules])"
    assert run(fresh / "python", "-c", code, cwd=tmp_path) == "[]\n"


@pytest.mark.parametrize("name", ["join", "serve", "read_images"])
def test_public_names_load_no_library_of_training_or_pictures(name: str, fresh: Path, tmp_path: Path) -> None:
    code = f"import sys; from mbaas import {name}; print([each for each in {HEAVY} if each in sys.modules])"
    assert run(fresh / "python", "-c", code, cwd=tmp_path) == "[]\n"
