"""Peers that the benchmark can compare with mbaas, and the environments in which they are installed.

Each peer is a row (a module of `mbaas.tools.bench.rows`), run by an interpreter that has the peer and mbaas.
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
"""Timeout for querying an interpreter; imports may take long if no file is in the page cache."""


@dataclass(frozen=True)
class Peer:
    """A library that can share prepared samples between trials.

    Attributes:
        modules: modules imported by its row.
        packages: names under which pip may have installed it, the recommended one first.
    """

    name: str
    modules: tuple[str, ...]
    packages: tuple[str, ...]


PEERS = {
    "tensorsocket": Peer("TensorSocket", ("torch", "tensorsocket"), ("tensorsocket",)),
    "tf-data": Peer("tf.data service", ("tensorflow",), ("tensorflow-cpu", "tensorflow")),
    "ray-data": Peer("Ray Data", ("pandas", "pyarrow", "ray.data"), ("ray",)),
}
"""Row -> its peer."""


@dataclass(frozen=True)
class InstalledPeer:
    """An installed peer: its interpreter, and name and version, such as "TensorSocket (tensorsocket 0.0.5)"."""

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
"""Program run by an interpreter: prints the modules it lacks, its mbaas version, and the versions of packages."""


def find_peers(rows: Sequence[str], python: Path | None) -> tuple[dict[str, InstalledPeer], tuple[str, ...]]:
    """Find the peers among ``rows``: in this environment, then in the environment of ``python``.

    Returns installed peers by row, and one sentence for each missing peer. Raises ConfigError if ``python`` is not a
    Python interpreter.
    """
    found: dict[str, InstalledPeer] = {}
    left_out: list[str] = []
    for row in rows:
        if row not in PEERS:
            continue
        lacks = ""
        for interpreter in (sys.executable, *([] if python is None else [str(python)])):
            lacks, installed = _look(PEERS[row], interpreter)
            if not lacks:
                found[row] = InstalledPeer(interpreter, f"{PEERS[row].name} ({installed})")
                break
        else:
            left_out.append(_left_out(PEERS[row], lacks, python))
    return found, tuple(left_out)


def _look(peer: Peer, python: str) -> tuple[str, str]:
    """Return what an interpreter lacks to run a peer, or "", and the installed package with its version."""
    names = (("mbaas.tools.bench.host", *peer.modules), peer.packages)
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
        f"{peer.name} is left out, because {where} has {lacks}: install mbaas's extras bench and peers here, or "
        "in another environment whose interpreter --peers-python names"
    )
