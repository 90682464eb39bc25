"""``mbaas cluster``: list and copy the files for Ray clusters that ship with mbaas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mbaas.cli.console import command, examples, group, line, out
from mbaas.errors import ConfigError

app = group(
    help="Files for clusters: [bold]ray up[/], Kubernetes, an image, the environment of a node, dashboards.",
    epilog=examples("mbaas cluster list", "mbaas cluster write raycluster.yaml"),
)


@command(app)
def list_() -> None:
    """List the files and their purposes.

    Examples:
        mbaas cluster list
    """
    found = _files()
    width = max(map(len, found))
    for name, file in found.items():
        line(out, f"{name:<{width}}  {_about(file)}")


@command(app)
def write(
    name: Annotated[str, typer.Argument()],
    to: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    force: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """Write one of the files for editing: values that you must set are marked EDIT.

    Args:
        name: One of [bold]mbaas cluster list[/].
        to: Output file. Default: the same name in the current folder.
        force: Overwrite the file.

    Examples:
        mbaas cluster write raycluster.yaml
        mbaas cluster write aws.yaml --to clusters/search.yaml
        mbaas cluster write node.env --force        [dim]instead of the one that is there[/]
    """
    found = _files()
    if name not in found:
        raise ConfigError(f"unknown file {name!r}; known are {', '.join(found)}")
    target = to if to is not None else Path(Path(name).name)
    if target.is_dir():
        target /= name
    # "x" instead of a check before, so that concurrent writers do not overwrite each other
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(found[name].read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(
            f"{target} exists already; overwrite it with --force, or choose another file with --to"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None
    line(out, str(target))


def _files() -> dict[str, Path]:
    import mbaas

    package = Path(mbaas.__file__).parent
    # a wheel contains the folder inside the package, a checkout has it next to the package
    installed, checkout = package / "cluster_files", package.parent / "cluster"
    folder = installed if installed.is_dir() else checkout
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _about(file: Path) -> str:
    """Return a file's purpose: the first line of its first comment, or a dashboard's description."""
    if file.suffix == ".json":
        return str(json.loads(file.read_text(encoding="utf-8"))["description"])
    with file.open(encoding="utf-8") as lines:
        said = next(text for text in lines if text.startswith("# "))
    return said.removeprefix("# ").strip()
