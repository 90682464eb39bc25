"""The import rule: imports within mbaas point downward, and users import only public modules.

The tests parse the source, so imports inside functions and for type checkers count, too.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    "cli",
    "analysis",
    "tools",
    "serving",
    "feed",
    "loader",
    "coordinator",
    "client",
    "core",
    "pictures",
    "prep",
    "cache",
    "status",
    "calls",
    "wire",
    "transforms",
    "dataset",
    "model",
    "settings",
    "memory",
    "samples",
    "ray_cluster",
    "base",
    "errors",
)
"""From the top down: a package or module may import itself and those after it."""

SEE_THE_FACE = ("cli", "tools", "analysis")
"""Packages that may `import mbaas`, the public package, which is above `feed` and `loader`."""

PUBLIC = ("mbaas", "mbaas.analysis", "mbaas.dataset", "mbaas.errors", "mbaas.transforms", "tune_integration")
"""Modules that users may import, limited to the names in ``__all__``. All other modules are private."""

USES_PRIVATE = {
    "examples/comparing.py": {"mbaas.prep.engines"},
    "examples/tune_augmentation.py": {"mbaas.tools.bench.cpu"},
    "examples/tune_digits.py": {"mbaas.prep.engines"},
    "tune_integration/callback.py": {"mbaas.coordinator.control"},
    "tune_integration/trial.py": {"mbaas.feed", "mbaas.base.validation", "mbaas.ray_cluster.actor_names"},
}
"""Exceptions: the examples compare a feed with a DataLoader that prepares samples with the same code, and count CPU
time. The Tune callback announces and removes trials. `get_loader` has the parameters of `join`, and finds the class
trainable of its process, which needs a private name of Ray."""

CORE_MAY_IMPORT = ("core", "samples", "wire", "settings", "errors", "model")
"""Parts of mbaas that the pure core may import: values and arithmetic, no side effects."""

PURE_MODULES = {"memory": "mbaas.memory.budgets", "base": "mbaas.base.units"}
"""Room -> its only module that the pure core may import."""

IMPURE = ("ray", "asyncio", "threading", "time", "os", "random", "pathlib", "io", "logging")
"""Modules that the pure core never imports: it receives time and events, and returns instructions."""

ACTORS = {"cache": "mbaas.cache.node", "prep": "mbaas.prep.worker"}
"""The only module of `cache` and of `prep` that defines an actor. Only coordinators import and start it."""

DISTRIBUTIONS = metadata.packages_distributions()
"""Top-level module -> PyPI distributions that install it."""

COME_WITH = {"mbaas": "itself", "pydantic-core": "pydantic, which needs exactly one version of it"}
"""Distributions that need no line in pyproject.toml, and their reasons."""

Import = tuple[str, tuple[str, ...]]
"""The dotted module, and the names imported from it (none for a plain import)."""


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    """All absolute imports of a module, at any depth."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found.append((node.module or "", tuple(alias.name for alias in node.names)))
    return tuple(found)


def layers_seen(source: str) -> set[str]:
    """The layers of mbaas that a module imports; "" is the public package."""
    seen = set()
    for module, names in imports_of(source):
        top, _, rest = module.partition(".")
        if top == "mbaas" and rest:
            seen.add(rest.split(".")[0])
        elif top == "mbaas":
            seen.update(name if name in LAYERS else "" for name in names or ("",))
    return seen


def violations(layer: str, source: str) -> list[str]:
    """Imports of a module of ``layer`` that break the rule."""
    below = set(LAYERS[LAYERS.index(layer) :])
    allowed = below | ({""} if layer in SEE_THE_FACE else set())
    return [f"{layer} imports {seen or 'the public face'}" for seen in sorted(layers_seen(source) - allowed)]


@cache
def names_of(source: str) -> frozenset[str]:
    """Imported dotted names with their parent packages.

    ``from a import b`` also gives ``a.b``, which may be a module. The bare public package `mbaas` is left out: it
    imports its modules lazily.
    """
    dotted = [f"{module}.{name}" for module, names in imports_of(source) for name in names or ("",)]
    return frozenset(name.rsplit(".", up)[0] for name in dotted for up in range(name.count(".")))


@cache
def defines_actor(source: str) -> bool:
    """Return whether a module contains a Ray actor or task."""
    return any(
        ast.unparse(node) == "ray.remote" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    )


def is_decorated(source: str) -> bool:
    """Return whether ``ray.remote`` decorates a class or function, which Ray then cannot pickle by name."""
    decorated = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    decorators = [
        each for node in ast.walk(ast.parse(source)) if isinstance(node, decorated) for each in node.decorator_list
    ]
    calls = [each.func if isinstance(each, ast.Call) else each for each in decorators]
    return any(ast.unparse(each) == "ray.remote" for each in calls)


def reached(start: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    """The modules of ``sources`` that ``start`` imports, directly or not -> one of their importers."""
    found: dict[str, str] = {}
    left = list(start.items())
    while left:
        importer, source = left.pop()
        for name in names_of(source) & sources.keys() - found.keys():
            found[name] = importer
            left.append((name, sources[name]))
    return found


def forbidden_to_clients(start: Mapping[str, str], sources: Mapping[str, str]) -> list[str]:
    """Imports forbidden on the consumer's side: modules that define actors, and the coordinator."""
    return [
        f"{importer} imports {name}"
        for name, importer in reached(start, sources).items()
        if defines_actor(sources[name]) or name.startswith("mbaas.coordinator")
    ]


def misplaced_actors(sources: Mapping[str, str]) -> list[str]:
    """Actors of `cache` or `prep` outside `ACTORS`, and imports of the modules in `ACTORS` by non-coordinators."""
    rooms = tuple(f"mbaas.{room}." for room in ACTORS)
    defined = [name for name, source in sources.items() if name.startswith(rooms) and defines_actor(source)]
    found = [f"{name} defines an actor" for name in defined if name not in ACTORS.values()]
    for name, source in sources.items():
        if not name.startswith("mbaas.coordinator."):
            found += [f"{name} imports {actor}" for actor in sorted(names_of(source) & set(ACTORS.values()))]
    return found


def sources_of_mbaas() -> dict[str, str]:
    """Dotted name -> source, for all modules of mbaas."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in modules("mbaas")
    }


def impurities(source: str) -> list[str]:
    """Imports of a module that are forbidden in the core."""
    tops = {module.partition(".")[0] for module, _ in imports_of(source)}
    foreign = layers_seen(source) - set(CORE_MAY_IMPORT)
    for room, module in PURE_MODULES.items():
        seen = {name for name in names_of(source) if name.startswith(f"mbaas.{room}.")}
        if seen & sources_of_mbaas().keys() == {module}:
            foreign.discard(room)
    return [f"core imports {seen or 'the public face'}" for seen in sorted(foreign | tops & set(IMPURE))]


def public_names(module: str) -> set[str]:
    """A module's ``__all__``, read from its source."""
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return set(names)


def is_public(module: str, name: str) -> bool:
    """Return whether users may write ``from module import name`` or ``module.name``."""
    return module in PUBLIC and (f"{module}.{name}" in PUBLIC or name in public_names(module))


def private_uses(source: str) -> list[str]:
    """Private modules and names of mbaas or tune_integration that a user's code takes."""
    found: list[str] = []
    aliases = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            taken = [(alias.name, None, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            taken = [(node.module or "", alias.name, alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for module, name, local in taken:
            if module.partition(".")[0] not in ("mbaas", "tune_integration"):
                continue
            if module not in PUBLIC:
                found.append(module)
            elif name is None or f"{module}.{name}" in PUBLIC:
                aliases[local] = module if name is None else f"{module}.{name}"
            elif not is_public(module, name):
                found.append(f"{module}.{name}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (module := aliases.get(ast.unparse(node.value), "")):
            found += [] if is_public(module, node.attr) else [f"{module}.{node.attr}"]
    return found


def foreign_underscores(source: str) -> list[str]:
    """Underscore names that a module imports from another module of this repository."""
    ours = ("mbaas", "tune_integration", "benchmarks", "support")
    return [
        f"{module}.{name}"
        for module, names in imports_of(source)
        for name in names or ("",)
        if module.partition(".")[0] in ours
        and any(part.startswith("_") and not part.startswith("__") for part in (*module.split("."), name))
    ]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def shown_in(document: Path) -> str:
    """All Python blocks of a document, concatenated."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE))


USERS = {
    **{str(path.relative_to(ROOT)): path.read_text() for path in modules("examples")},
    # tune_integration may import its own private modules.
    **{
        str(path.relative_to(ROOT)): re.sub(r"(?m)^from tune_integration.*$", "", path.read_text())
        for path in modules("tune_integration")
    },
    **{
        str(path.relative_to(ROOT)): shown_in(path)
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    },
}
"""User code in examples, tune_integration and documents."""


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "mbaas").with_suffix("").parts[0]


@pytest.mark.parametrize("path", modules("mbaas"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":  # the public package is built from all layers below
        assert not layers_seen(path.read_text()) & {"cli", "bench"}
        return
    if layer == "__main__":
        assert layers_seen(path.read_text()) == {"cli"}
        return
    assert layer in LAYERS, f"give {layer} a place in LAYERS"
    assert violations(layer, path.read_text()) == []


def test_the_architecture_page_shows_these_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (table,) = re.findall(r"^\| layer \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    shown = [name for row in table.splitlines() for name in re.findall(r"`(\w+)(?:\.py|/)`", row.split("|")[2])]
    assert shown == list(LAYERS)


def circle(sources: Mapping[str, str]) -> list[str]:
    """The modules of an import circle, or none. Packages are left out: they import their public names lazily."""
    modules = {name for name in sources if not any(other.startswith(f"{name}.") for other in sources)}
    try:
        TopologicalSorter({name: names_of(sources[name]) & modules - {name} for name in modules}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_in_one_direction() -> None:
    assert circle(sources_of_mbaas()) == []
    assert len(circle({"mbaas.a": "from mbaas.b import c", "mbaas.b": "def late():\n    from mbaas import a"})) == 3


DATASET_ROOMS = ("readers", "table", "concatenation", "storage", "base", "subsets")
"""The modules and rooms of `mbaas.dataset`, from the top down."""


def test_the_rooms_of_datasets_import_downward() -> None:
    ordered = [f"mbaas.dataset.{room}" for room in DATASET_ROOMS]
    for name, source in sources_of_mbaas().items():
        if not name.startswith("mbaas.dataset."):
            continue
        seen = {".".join(each.split(".")[:3]) for each in names_of(source) if each.startswith("mbaas.dataset.")}
        (place,) = [number for number, room in enumerate(ordered) if f"{name}.".startswith(f"{room}.")]
        assert not seen & set(ordered[:place]), name


RAYS_PRIVATE_NAMES = re.compile(r"\bray\._|\bray\.core\b|_private\.|\bof_ray\._|\binternal_kv\b|\._actor_id\b")


def test_only_one_room_uses_names_that_ray_does_not_publish() -> None:
    """A new version of Ray may change them."""
    found = {name for name, source in sources_of_mbaas().items() if RAYS_PRIVATE_NAMES.search(source)}
    assert {name for name in found if not name.startswith("mbaas.ray_cluster.")} == set()
    assert "mbaas.ray_cluster.references" in found


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
        "from mbaas.memory.slots import Slot",
        "from mbaas.base import files",
        "from mbaas import status",
        "import mbaas",
    ],
)
def test_the_core_can_become_impure(line: str) -> None:
    assert len(impurities(line)) == 1


def test_actor_classes_are_importable() -> None:
    """Ray pickles a decorated class by value, for each job.

    A process that looks up an actor of another job would then have the class twice, and call methods of one copy on an
    instance of the other.
    """
    assert [name for name, source in sources_of_mbaas().items() if is_decorated(source)] == []
    assert is_decorated("import ray\n@ray.remote(num_cpus=0)\nclass Reader: ...")


def test_actors_of_prep_and_cache_are_in_one_module_each_that_only_coordinators_import() -> None:
    assert misplaced_actors(sources_of_mbaas()) == []


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("mbaas.cache.reader", "import ray\n@ray.remote\nclass Reader: ...", "defines an actor"),
        ("mbaas.prep.engines", "from mbaas.prep.worker import STALL_WARNING_S", "imports mbaas.prep.worker"),
        ("mbaas.wire", "from mbaas.cache import node", "imports mbaas.cache.node"),
    ],
)
def test_an_actor_can_be_misplaced(module: str, line: str, found: str) -> None:
    assert misplaced_actors(sources_of_mbaas() | {module: line}) == [f"{module} {found}"]


@pytest.mark.parametrize("path", modules("mbaas"), ids=lambda path: str(path.relative_to(ROOT)))
def test_mbaas_does_not_know_its_users(path: Path) -> None:
    tops = {module.partition(".")[0] for module, _ in imports_of(path.read_text())}
    assert not tops & {"tune_integration", "cluster", "benchmarks", "examples", "tests", "support"}


@pytest.mark.parametrize("module", PUBLIC)
def test_what_is_public_says_so(module: str) -> None:
    """Each name in ``__all__`` also exists."""
    names = public_names(module)
    assert names
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []


def test_each_error_that_users_catch_is_in_the_public_package() -> None:
    assert public_names("mbaas.errors") <= public_names("mbaas")


@pytest.mark.parametrize("where", USERS)
def test_users_are_shown_public_names_only(where: str) -> None:
    """Also in documents and in tune_integration, which follows the rules for users."""
    assert set(private_uses(USERS[where])) == USES_PRIVATE.get(where, set())


@pytest.mark.parametrize(
    "source",
    [
        "from mbaas.client.stream import Stream",
        "import mbaas.runtime",
        "from mbaas import runtime",
        "from mbaas.dataset import fingerprint",
        "import mbaas\nmbaas.runtime.feed_names()",
        "from mbaas import transforms as T\nT.identity",
        "def late():\n    from tune_integration.callback import FeedCallback",
    ],
)
def test_a_private_name_is_noticed(source: str) -> None:
    assert len(private_uses(source)) == 1


def test_a_name_with_an_underscore_is_used_in_its_own_module_only() -> None:
    packages = ("mbaas", "tune_integration", "benchmarks", "examples", "tests")
    found = {str(path): foreign_underscores(path.read_text()) for package in packages for path in modules(package)}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    ["from mbaas.feed import _served", "import mbaas._late", "from support import _waiting", "from mbaas._x import y"],
)
def test_a_foreign_underscore_is_noticed(line: str) -> None:
    assert len(foreign_underscores(line)) == 1


def clients_side(sources: Mapping[str, str]) -> dict[str, str]:
    """The modules that run in a trial."""
    return {name: sources[name] for name in sources if name == "mbaas.loader" or name.startswith("mbaas.client")}


def test_a_trial_imports_no_actor() -> None:
    """Neither directly nor indirectly, from the loader or a module of client/."""
    sources = sources_of_mbaas()
    assert forbidden_to_clients(clients_side(sources), sources) == []


def test_whoever_joins_a_feed_imports_no_actor() -> None:
    """An actor's imports would cost each trial 0.15 s."""
    sources = sources_of_mbaas()
    found = reached({"mbaas.feed": sources["mbaas.feed"]}, sources)
    assert "mbaas.loader" in found
    assert [name for name in found if defines_actor(sources[name])] == []


@pytest.mark.parametrize("actor", ACTORS.values())
def test_an_actor_of_prep_or_cache_loads_no_library_that_only_others_use(actor: str) -> None:
    """Every process of a feed pays for its imports at start: tenacity takes 10 ms."""
    sources = sources_of_mbaas()
    # A dataset imports its own modules when it arrives.
    start = {name: sources[name] for name in sources if name == actor or name.startswith("mbaas.dataset.")}
    del start["mbaas.dataset.storage.retry"]
    assert "mbaas.dataset.storage.faults" in reached(start, sources)
    assert "mbaas.dataset.storage.retry" not in reached(start, sources)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from mbaas.prep.worker import PrepWorker", "imports mbaas.prep.worker"),
        ("def late():\n    from mbaas.cache import node", "imports mbaas.cache.node"),
        ("import mbaas.coordinator.counters", "imports mbaas.coordinator.counters"),
        ("import mbaas.serving", "mbaas.coordinator.actor imports mbaas.coordinator.coordinator"),
    ],
)
def test_the_rule_for_trials_can_be_broken(line: str, reason: str) -> None:
    sources = sources_of_mbaas()
    found = forbidden_to_clients({"mbaas.client.some": line}, sources)
    assert any(reason in each for each in found)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("cache", "from mbaas.prep.engines import Engine"),
        ("cache", "from mbaas.core.staging.state import StagingState"),
        ("prep", "from mbaas.core.staging.state import StagingState"),
        ("prep", "from mbaas.client.stream import Stream"),
        ("prep", "from mbaas.coordinator.coordinator import Coordinator"),
        ("samples", "import mbaas.dataset.base"),
        ("core", "from mbaas import feed"),
        ("coordinator", "def late():\n    from mbaas.loader import Loader"),
        ("prep", "import mbaas"),
        ("feed", "from mbaas.tools.bench import runner"),
        ("errors", "from mbaas.ray_cluster import metrics"),
    ],
)
def test_the_rule_can_be_broken(layer: str, line: str) -> None:
    assert len(violations(layer, line)) == 1


def imported_tests(source: str) -> list[str]:
    """The test files that a module imports."""
    return [module for module, _ in imports_of(source) if module.rpartition(".")[2].startswith("test_")]


def test_what_several_tests_share_is_in_no_file_of_tests() -> None:
    """Shared code is in a helper module or in `support`, so each test file can be run or moved alone."""
    found = {
        str(path): imported_tests(path.read_text()) for package in ("tests", "benchmarks") for path in modules(package)
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("line", ["from test_staging import Feed", "def late():\n    import core.test_staging"])
def test_an_import_from_a_file_of_tests_is_noticed(line: str) -> None:
    assert len(imported_tests(line)) == 1


def undeclared(source: str) -> list[str]:
    """Imported distributions missing in pyproject.toml, even if installed as dependencies of others."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = {*COME_WITH, *re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=', text)}
    found = {module.partition(".")[0] for module, _ in imports_of(source)}
    named = {top: {name.lower().replace("_", "-") for name in DISTRIBUTIONS.get(top, ())} for top in sorted(found)}
    return [top for top, names in named.items() if names and not names & declared]


@pytest.mark.parametrize("package", ["mbaas", "tune_integration", "benchmarks", "examples", "tests"])
def test_what_is_imported_is_declared(package: str) -> None:
    found = {str(path): undeclared(path.read_text()) for path in modules(package)}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("line", ["import requests", "def late():\n    from botocore.config import Config"])
def test_an_undeclared_import_is_noticed(line: str) -> None:
    assert len(undeclared(line)) == 1


def test_no_two_test_files_have_one_name() -> None:
    """If two had the same name, pytest would collect only one when it runs the whole suite."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
