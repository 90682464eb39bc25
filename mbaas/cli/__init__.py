"""The command ``mbaas``: one module for each command, with its arguments.

Exit codes: 0 success, 1 an error of the service (`mbaas.MbaasError`), 2 an invalid command line or file, 130
interrupted by Ctrl-C. Results go to stdout, everything else to stderr. Commands import Ray, Arrow and NumPy when they
run, never for ``--help``.
"""

import importlib
from typing import Annotated

import typer

from mbaas.cli import cluster, simulate
from mbaas.cli.console import CLUSTERS, DECISIONS, app, examples

__all__ = ["app"]

# Each adds its command to the app, in the order of ``mbaas --help``.
for _module in (
    "doctor",
    "init",
    "check",
    "serve",
    "show",
    "status",
    "top",
    "ledger",
    "analyze",
    "what_if",
    "plan",
    "bench",
    "chaos",
):
    importlib.import_module(f"mbaas.cli.{_module}")
app.add_typer(simulate.app, name="simulate", rich_help_panel=DECISIONS)
app.add_typer(cluster.app, name="cluster", rich_help_panel=CLUSTERS)


def _show_version(wanted: bool) -> None:
    if wanted:
        from mbaas import __version__

        typer.echo(f"mbaas {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "mbaas init data/flowers       [dim]write feed.yaml for these data[/]",
        "mbaas show feed.yaml          [dim]draw the first minibatch of this feed[/]",
        "mbaas serve feed.yaml         [dim]serve it, until Ctrl-C[/]",
        "mbaas status                  [dim]list the running feeds[/]",
        "mbaas status train --watch    [dim]the status of one feed, repeatedly[/]",
        "mbaas stop train",
    )
    + "\n\n[bold]Which question first[/]\n"
    + "\n".join(
        f"  {command:28}  [dim]{answer}[/]"
        for command, answer in (
            ("1. analyze feed.yaml", "is loading the problem? measures here"),
            ("2. what-if measured.json", "what if caches, cores, trials change?"),
            ("3. plan jobs.yaml", "what do several searches need?"),
            ("4. bench", "which loader is fastest here?"),
            ("5. simulate policies", "which way to cache, on any system?"),
        )
    )
)
def mbaas(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Minibatch as a service on Ray: fetch and prepare each minibatch once, and deliver it to every trial."""
