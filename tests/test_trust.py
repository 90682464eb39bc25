"""As SECURITY.md promises, data never becomes code, and no cluster is open without a token."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]

MODULES = frozenset(["pickle", "cloudpickle", "_pickle", "dill", "marshal", "shelve", "joblib", "runpy", "code"])
"""Modules that turn bytes into values or code."""

BUILTINS = frozenset(["eval", "exec", "compile", "__import__"])
CALLS = frozenset(["import_module", "unsafe_load", "full_load", "system", "popen", "allow_pickle", "shell"])

JUSTIFIED = {
    ("mbaas/tools/bench/rows/__init__.py", "import_module"): "the rows of the benchmark, from a fixed table",
    ("mbaas/coordinator/recovery.py", "pickle"): "what the feed itself left in the cluster's key-value store",
    ("mbaas/coordinator/recovery.py", "cloudpickle"): "likewise: only written",
    ("mbaas/coordinator/own_pipelines.py", "pickle"): "likewise",
    (
        "mbaas/prep/worker.py",
        "pickle",
    ): "a consumer's own pipeline: code that a user of the cluster brings, run in a prep worker only",
    (
        "mbaas/transforms/function.py",
        "cloudpickle",
    ): "the user's own Map is only written, to learn whether Ray can send it",
    (
        "mbaas/base/imports.py",
        "import_module",
    ): "public names, from fixed tables; what the user's command or file names: as trusted as the program",
    ("mbaas/base/imports.py", "cloudpickle"): "likewise: registered with Ray's transport",
    ("mbaas/cli/__init__.py", "import_module"): "the modules of mbaas's own commands, by names in its source",
    ("mbaas/tools/check/pool.py", "pickle"): "the command's own worker processes, through memory that they inherit",
    ("mbaas/tools/recognize/look.py", "allow_pickle"): "False: arrays of objects are refused",
    ("mbaas/tools/bench/host.py", "pickle"): "the benchmark's own child, over a pipe that nobody else has",
}
"""(file, call) -> why it is allowed: no dataset, state or name reaches any listed call."""


def risks(source: str) -> Iterator[str]:
    """Modules and calls in a source that could turn bytes into code or values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} | {(node.module or "").partition(".")[0]}
            yield from names & (MODULES | {"import_module"})
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            if called in BUILTINS or called == "torch.load" or name in CALLS:
                yield name
            if called == "yaml.load" and "SafeLoader" not in ast.unparse(node):
                yield "yaml.load"
            yield from (keyword.arg for keyword in node.keywords if keyword.arg in CALLS)


def test_no_data_becomes_code() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), risk)
        for package in ("mbaas", "tune_integration")
        for path in sorted((ROOT / package).rglob("*.py"))
        for risk in risks(path.read_text())
    }
    assert found == set(JUSTIFIED), "each needs a reason in JUSTIFIED, and each reason a use"


@pytest.mark.parametrize(
    ("source", "risk"),
    [
        ("import pickle\npickle.loads(b'')", "pickle"),
        ("from ray import cloudpickle", "cloudpickle"),
        ("from pickle import loads", "pickle"),
        ("def f(x):\n    return eval(x)", "eval"),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("import yaml\nyaml.unsafe_load(text)", "unsafe_load"),
        ("np.load(file, allow_pickle=True)", "allow_pickle"),
        ("import torch\ntorch.load(file)", "load"),
        ("subprocess.run(command, shell=True)", "shell"),
        ("importlib.import_module(name)", "import_module"),
    ],
)
def test_what_could_is_found(source: str, risk: str) -> None:
    assert risk in set(risks(source))


def test_what_is_safe_is_not_taken_for_a_risk() -> None:
    assert not list(risks("import re, yaml\nre.compile('x')\nyaml.safe_load(t)\nyaml.load(t, Loader=yaml.SafeLoader)"))


# ---- tokens ----

FILES = sorted(path.name for path in (ROOT / "cluster").iterdir() if path.is_file())  # dashboards configure nothing


def has_tokens(name: str) -> bool:
    """Return whether a cluster of this file requires its token to join."""
    text = (ROOT / "cluster" / name).read_text()
    if (
        name == "Dockerfile"
    ):  # the image has the settings; programs that start Ray in it read them, or the operator sets the mode
        return "cluster/node.env /etc/mbaas/node.env" in text and "RAY_AUTH_MODE" not in text
    if name.endswith(".env"):
        return "\nRAY_AUTH_MODE=token\n" in text
    contents: list[dict[str, Any]] = [part for part in yaml.safe_load_all(text) if part]
    if any("apiVersion" in part for part in contents):
        clusters = [part["spec"] for part in contents if part["kind"] in ("RayCluster", "RayJob")]
        specs = [spec.get("rayClusterSpec", spec) for spec in clusters]
        return bool(specs) and all(spec.get("authOptions") == {"mode": "token"} for spec in specs)
    (content,) = contents
    starts = [content[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    return "~/.ray/auth_token" in content["file_mounts"] and all("node.env; " in start for start in starts)


@pytest.mark.parametrize("name", FILES)
def test_every_configuration_that_we_ship_asks_for_a_token(name: str) -> None:
    assert has_tokens(name)


def test_security_says_where_tokens_are_turned_on() -> None:
    said = (ROOT / "SECURITY.md").read_text()
    for name in ("RAY_AUTH_MODE=token", "ray get-auth-token --generate", "cluster/node.env", "docs/cluster.md"):
        assert name in said
