"""The import rule: within mbaas imports point downward, and only the public face is seen from outside.

Read from the source, so imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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
    "core",
    "prep",
    "cache",
    "status",
    "messages",
    "transforms",
    "dataset",
    "placement",
    "allocation",
    "settings",
    "order",
    "runtime",
    "metrics",
    "files",
    "validation",
    "units",
    "errors",
)
"""From the top down: a package or module may import those that come after it, and itself."""

SEE_THE_FACE = ("cli", "bench", "analysis")
"""Who may `import mbaas`, the public face, which sits on top of `feed` and `loader`."""

PUBLIC_MODULES = ("mbaas", "mbaas.analysis", "mbaas.errors", "mbaas.transforms")
"""What others than mbaas may import modules or names from."""

CORE_MAY_IMPORT = ("core", "order", "placement", "messages", "settings", "errors", "allocation")
"""What the pure core may know of mbaas: values and arithmetic, nothing that acts."""

IMPURE = ("ray", "asyncio", "threading", "time", "os", "random", "pathlib", "io", "logging")
"""What the pure core never imports: it is told the time and what happened, and answers with what to do."""

ACTORS = {"cache": "mbaas.cache.node", "prep": "mbaas.prep.worker"}
"""The one module of a room that defines its actor; only coordinators start it, and nobody else imports that module."""

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


def names_of(source: str) -> set[str]:
    """The dotted names that a module imports, with the packages around them; of ``from a import b`` also ``a.b``, which
    may be a module. The public face is left out: it imports what is behind it only when that is used.
    """
    dotted = [f"{module}.{name}" for module, names in imports_of(source) for name in names or ("",)]
    return {name.rsplit(".", up)[0] for name in dotted for up in range(name.count("."))}


def defines_actor(source: str) -> bool:
    """Whether a module has a class or a function that runs in a process of its own."""
    decorated = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    decorators = [
        each for node in ast.walk(ast.parse(source)) if isinstance(node, decorated) for each in node.decorator_list
    ]
    calls = [each.func if isinstance(each, ast.Call) else each for each in decorators]
    return any(ast.unparse(each) in ("ray.remote", "remote") for each in calls)


def reached(start: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    """The modules of ``sources`` that ``start`` imports, whatever is between -> a module that imports it."""
    found: dict[str, str] = {}
    left = list(start.items())
    while left:
        importer, source = left.pop()
        for name in names_of(source) & sources.keys() - found.keys():
            found[name] = importer
            left.append((name, sources[name]))
    return found


def forbidden_to_clients(start: Mapping[str, str], sources: Mapping[str, str]) -> list[str]:
    """What the consumer's side must not reach: modules that define actors, and all of the coordinators'."""
    return [
        f"{importer} imports {name}"
        for name, importer in reached(start, sources).items()
        if defines_actor(sources[name]) or name.startswith("mbaas.coordinator")
    ]


def misplaced_actors(sources: Mapping[str, str]) -> list[str]:
    """Where `cache` or `prep` defines an actor in another module than `ACTORS` says, or somebody imports one of these
    modules who starts no actors.
    """
    rooms = tuple(f"mbaas.{room}." for room in ACTORS)
    defined = [name for name, source in sources.items() if name.startswith(rooms) and defines_actor(source)]
    found = [f"{name} defines an actor" for name in defined if name not in ACTORS.values()]
    for name, source in sources.items():
        if not name.startswith("mbaas.coordinator."):
            found += [f"{name} imports {actor}" for actor in sorted(names_of(source) & set(ACTORS.values()))]
    return found


def sources_of_mbaas() -> dict[str, str]:
    """Dotted name -> source, of all modules of mbaas."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in modules("mbaas")
    }


def impurities(source: str) -> list[str]:
    """What a module imports that the core must not."""
    tops = {module.partition(".")[0] for module, _ in imports_of(source)}
    foreign = layers_seen(source) - set(CORE_MAY_IMPORT)
    return [f"core imports {seen or 'the public face'}" for seen in sorted(foreign | tops & set(IMPURE))]


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


@pytest.mark.parametrize("path", modules("mbaas/core"), ids=lambda path: path.name)
def test_the_core_is_pure(path: Path) -> None:
    assert impurities(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import ray",
        "import os.path",
        "from time import monotonic",
        "def later():\n    import asyncio",
        "from pathlib import Path",
        "from mbaas.cache.planner import Planner",
        "from mbaas.dataset import Dataset",
        "from mbaas import status",
        "import mbaas",
    ],
)
def test_the_core_can_become_impure(line: str) -> None:
    assert len(impurities(line)) == 1


def test_actors_of_prep_and_cache_are_in_one_module_each_that_only_coordinators_import() -> None:
    assert misplaced_actors(sources_of_mbaas()) == []


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("mbaas.cache.reader", "import ray\n@ray.remote\nclass Reader: ...", "defines an actor"),
        ("mbaas.prep.engines", "from mbaas.prep.worker import PROBE_SAMPLES", "imports mbaas.prep.worker"),
        ("mbaas.messages", "from mbaas.cache import node", "imports mbaas.cache.node"),
    ],
)
def test_an_actor_can_be_misplaced(module: str, line: str, found: str) -> None:
    assert misplaced_actors(sources_of_mbaas() | {module: line}) == [f"{module} {found}"]


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


def clients_side(sources: Mapping[str, str]) -> dict[str, str]:
    """What runs in a trial."""
    return {name: sources[name] for name in sources if name == "mbaas.loader" or name.startswith("mbaas.client")}


def test_a_trial_imports_no_actor() -> None:
    """Neither the loader nor a module of client/, nor anything that these import in turn."""
    sources = sources_of_mbaas()
    assert forbidden_to_clients(clients_side(sources), sources) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from mbaas.prep.worker import PrepWorker", "imports mbaas.prep.worker"),
        ("def late():\n    from mbaas.cache import node", "imports mbaas.cache.node"),
        ("import mbaas.coordinator.counters", "imports mbaas.coordinator.counters"),
        ("import mbaas.feed", "mbaas.feed imports mbaas.coordinator.coordinator"),
    ],
)
def test_the_rule_for_trials_can_be_broken(line: str, reason: str) -> None:
    sources = sources_of_mbaas()
    found = forbidden_to_clients({"mbaas.client.some": line}, sources)
    assert any(reason in each for each in found)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("cache", "from mbaas.prep.engine import Engine"),
        ("cache", "from mbaas.core.state import StagingState"),
        ("prep", "from mbaas.core.state import StagingState"),
        ("prep", "from mbaas.client.rpc import get"),
        ("prep", "from mbaas.coordinator.coordinator import Coordinator"),
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
