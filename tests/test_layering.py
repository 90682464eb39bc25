"""The import rule: within mbaas imports point downward, and only the public face is seen from outside.

Read from the source, so imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    "cli",
    "analysis",
    "bench",
    "feed",
    "loader",
    "coordinator",
    "client",
    "prep",
    "core",
    "cache",
    "status",
    "messages",
    "settings",
    "transforms",
    "dataset",
    "placement",
    "order",
    "allocation",
    "runtime",
    "metrics",
    "units",
    "errors",
)
"""From the top down: a package or module may import those that come after it, and itself."""

SEE_THE_FACE = ("cli", "bench", "analysis")
"""Who may `import mbaas`, the public face, which sits on top of `feed` and `loader`."""

PUBLIC_MODULES = ("mbaas", "mbaas.analysis", "mbaas.errors", "mbaas.transforms")
"""What others than mbaas may import modules or names from."""

Import = tuple[str, tuple[str, ...]]
"""The dotted module, and the names taken from it (none for a plain import)."""


def imports_of(source: str) -> Iterator[Import]:
    """All absolute imports of a module, wherever they stand."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or "", tuple(alias.name for alias in node.names)


def layers_seen(source: str) -> set[str]:
    """The layers of mbaas that a module imports; "" is the public face."""
    seen = set()
    for module, names in imports_of(source):
        top, _, rest = module.partition(".")
        if top == "mbaas" and rest:
            seen.add(rest.split(".")[0])
        elif top == "mbaas":
            seen.update(name if name in LAYERS else "" for name in names or ("",))
    return seen


def violations(layer: str, source: str) -> list[str]:
    """What a module of ``layer`` imports against the rule."""
    below = set(LAYERS[LAYERS.index(layer) :])
    allowed = below | ({""} if layer in SEE_THE_FACE else set())
    return [f"{layer} imports {seen or 'the public face'}" for seen in sorted(layers_seen(source) - allowed)]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "mbaas").with_suffix("").parts[0]


@pytest.mark.parametrize("path", modules("mbaas"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":  # the face itself is put together from what lies below
        assert not layers_seen(path.read_text()) & {"cli", "bench"}
        return
    if layer == "__main__":
        assert layers_seen(path.read_text()) == {"cli"}
        return
    assert layer in LAYERS, f"give {layer} a place in LAYERS"
    assert violations(layer, path.read_text()) == []


@pytest.mark.parametrize("path", modules("mbaas"), ids=lambda path: str(path.relative_to(ROOT)))
def test_mbaas_does_not_know_its_users(path: Path) -> None:
    tops = {module.partition(".")[0] for module, _ in imports_of(path.read_text())}
    assert not tops & {"tune_integration", "cluster", "benchmarks", "examples", "tests", "support"}


@pytest.mark.parametrize("path", modules("tune_integration"), ids=lambda path: str(path.relative_to(ROOT)))
def test_tune_integration_sees_the_public_face_only(path: Path) -> None:
    import mbaas

    for module, names in imports_of(path.read_text()):
        if module.partition(".")[0] != "mbaas":
            continue
        assert module in PUBLIC_MODULES, module
        public = {*mbaas.__all__, "errors", "transforms"} if module == "mbaas" else set(names)
        assert set(names) <= public, f"{module} does not export {set(names) - public}"


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("cache", "from mbaas.prep.engine import Engine"),
        ("order", "import mbaas.dataset.base"),
        ("core", "from mbaas import feed"),
        ("coordinator", "def late():\n    from mbaas.loader import Loader"),
        ("prep", "import mbaas"),
        ("feed", "from mbaas.bench import runner"),
        ("errors", "from mbaas import metrics"),
    ],
)
def test_the_rule_can_be_broken(layer: str, line: str) -> None:
    assert len(violations(layer, line)) == 1
