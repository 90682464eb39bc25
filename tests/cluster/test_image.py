"""The image recipe installs the tested versions, as the README describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from autoscaler_view import FOLDER, load

import mbaas

ROOT = FOLDER.parent
RECIPE = (FOLDER / "Dockerfile").read_text()

KNOWN = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments, without comments and with continued lines joined."""
    lines = "".join(line for line in RECIPE.splitlines(keepends=True) if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def arguments_of(instruction: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == instruction]


def test_every_instruction_is_one() -> None:
    assert {name for name, _ in instructions()} <= KNOWN
    assert [name for name, _ in instructions()][:2] == ["ARG", "FROM"]


def test_what_is_copied_exists() -> None:
    sources = [source for arguments in arguments_of("COPY") for source in arguments.split()[:-1]]
    assert {"constraints.txt", "pyproject.toml", "mbaas", "tune_integration", "cluster", "examples"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_python_is_one_that_is_tested() -> None:
    """The default and the versions in the comment match pyproject.toml."""
    tested = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    (default,) = re.findall(r"^ARG PYTHON=(.+)$", RECIPE, re.MULTILINE)
    (named,) = re.findall(r"PYTHON may be (.+)\.$", RECIPE, re.MULTILINE)
    assert default in tested
    assert set(re.findall(r"3\.\d+", named)) == tested
    assert arguments_of("FROM") == ["python:${PYTHON}-slim-bookworm"]


def test_it_installs_the_tested_set() -> None:
    """Dependencies are installed only with the constraints; the other command installs none."""
    installs = [command for run in arguments_of("RUN") for command in run.split(" && ") if "pip install" in command]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in command or "--no-deps" in command for command in installs)
    assert "==" not in RECIPE.replace("# ", "")


def test_nobody_runs_as_root() -> None:
    assert arguments_of("USER") == ["ray"]
    last_run = max(index for index, (name, _) in enumerate(instructions()) if name == "RUN")
    assert instructions().index(("USER", "ray")) > last_run


@pytest.mark.parametrize("name", ["aws.yaml", "raycluster.yaml", "rayjob.yaml"])
def test_files_use_the_image_of_this_version(name: str) -> None:
    images = set(re.findall(r"registry\.example\.com/mbaas:(\S+)", (FOLDER / name).read_text()))
    assert images == {mbaas.__version__}
    assert set(re.findall(r"registry\.example\.com/mbaas:(\S+)", RECIPE)) == images


def test_settings_are_where_nodes_look_for_them() -> None:
    assert "install -D --mode=644 cluster/node.env /etc/mbaas/node.env" in RECIPE
    commands = load("aws.yaml")["head_start_ray_commands"] + load("aws.yaml")["worker_start_ray_commands"]
    assert sum("/etc/mbaas/node.env" in command for command in commands) == 2


def test_the_wheel_has_the_packages_that_the_recipe_copies() -> None:
    packages = re.search(r"^packages = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert packages
    for package in re.findall(r'"(\w+)"', packages[1]):
        assert f"{package} {package}" in arguments_of("COPY")
        assert Path(ROOT / package).is_dir()
