"""Peers that the benchmark can run beside mbaas, and where they are installed: here, or in another environment.

Each is a row (a module of `mbaas.bench.rows`) which an interpreter runs that has the peer and mbaas.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mbaas import __version__
from mbaas.errors import ConfigError

LOOK_S = 120.0
"""How long an interpreter may take to say what it has: importing may take a while when no file is in memory yet."""


@dataclass(frozen=True)
class Peer:
    """A library that can share prepared samples between trials.

    Attributes:
        name: for people.
        modules: what its row imports.
        packages: the names under which pip may have installed it, the one to install first.
    """

    name: str
    modules: tuple[str, ...]
    packages: tuple[str, ...]


PEERS = {
    "tensorsocket": Peer("TensorSocket", ("torch", "tensorsocket"), ("tensorsocket",)),
    "tf-data": Peer("tf.data service", ("tensorflow",), ("tensorflow-cpu", "tensorflow")),
    "ray-data": Peer("Ray Data", ("pandas", "pyarrow", "ray.data"), ("ray",)),
}
"""Row -> the peer that it runs."""


@dataclass(frozen=True)
class Installed:
    """A peer that can be run.

    Attributes:
        python: the interpreter that has it.
        version: which one it is: "TensorSocket (tensorsocket 0.0.5)".
    """

    python: str
    version: str


LOOK = """
import importlib.metadata, importlib.util, json, sys

def is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it is in
        return False

def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

modules, packages = json.loads(sys.argv[1])
missing = [each for each in modules if not is_there(each)]
own = None if missing else importlib.import_module("mbaas").__version__
print(json.dumps([missing, own, {each: version(each) for each in packages}]))
"""
"""Run by an interpreter: says which modules it lacks, and the versions of packages."""


def find_peers(rows: Sequence[str], python: Path | None) -> tuple[dict[str, Installed], tuple[str, ...]]:
    """Look for the peers among ``rows``: in this environment, then in that of ``python``.

    Returns:
        those that were found, by their rows, and a sentence for each of the others.

    Raises:
        ConfigError: ``python`` is no Python.
    """
    found: dict[str, Installed] = {}
    left_out: list[str] = []
    for row in rows:
        if row not in PEERS:
            continue
        lacks = ""
        for interpreter in (sys.executable, *([] if python is None else [str(python)])):
            lacks, installed = _look(PEERS[row], interpreter)
            if not lacks:
                found[row] = Installed(interpreter, f"{PEERS[row].name} ({installed})")
                break
        else:
            left_out.append(_left_out(PEERS[row], lacks, python))
    return found, tuple(left_out)


def _look(peer: Peer, python: str) -> tuple[str, str]:
    """Return what an interpreter lacks to run a peer, or "", and the package that it has, with its version."""
    names = (("mbaas.bench.host", *peer.modules), peer.packages)
    try:
        done = subprocess.run(
            [python, "-c", LOOK, json.dumps(names)], capture_output=True, text=True, check=True, timeout=LOOK_S
        )
        missing, own, versions = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = said.strip().rpartition("\n")[2]
        raise ConfigError(f"peers_python must be a Python interpreter, got {python}, which says {reason!r}") from None
    if missing:
        return f"no {'mbaas' if missing[0].startswith('mbaas.') else missing[0]}", ""
    if own != __version__:
        return f"mbaas {own} instead of {__version__}", ""
    return "", next((f"{name} {versions[name]}" for name in peer.packages if versions[name]), "")


def _left_out(peer: Peer, lacks: str, python: Path | None) -> str:
    where = "this environment" if python is None else python
    return (
        f"{peer.name} is left out, because {where} has {lacks}: pip install 'mbaas[bench,peers]' here, or in another "
        "environment whose interpreter --peers-python names"
    )
