"""Shared parts of all commands: the cluster that they join, output, tables, help, and exit codes.

Results go to stdout, everything else to stderr. An error that was raised on purpose becomes a sentence and an exit
code; any other is a bug and keeps its traceback.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.styled import Styled
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from mbaas.errors import ConfigError, FeedFailedError, FeedNotFoundError, MbaasError, ResourceError, WaitTimeoutError

if TYPE_CHECKING:
    from mbaas.status import FeedStatus

Function = TypeVar("Function", bound=Callable[..., Any])
Made = TypeVar("Made")
Item = TypeVar("Item")

FAILED = 1
MISUSED = 2
CUT_OFF = 130
"""Exit codes: an error of the service, an invalid command line or file, and the shells' code for Ctrl-C."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]

Address = Annotated[
    str | None,
    typer.Option(
        help="host:port of the Ray cluster's head. Default: RAY_ADDRESS, or the cluster on this machine.",
        metavar="HOST:PORT",
    ),
]

Statuses: TypeAlias = "dict[str, FeedStatus | MbaasError]"
"""Feeds and their status; for a feed that is starting, ending or silent, the error instead."""

REACH_TIMEOUT_S = 3.0
"""Connection timeout of a cluster's head; Ray itself would try for 20 s."""

_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "5")
"""Environment of a process that joins a cluster and never starts one: Ray tries for 5 s instead of 20 s."""

out = Console(highlight=False)
"""For results."""

err = Console(stderr=True, highlight=False)
"""For everything else: progress and errors."""


def line(console: Console, text: str, style: str | None = None) -> None:
    """Write one line unchanged, however long: pipes and logs need unfolded lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def say_error(sentence: str) -> None:
    """Write an error, as one line on stderr."""
    err.print(f"[bold red]error:[/] {plain(sentence)}", soft_wrap=True)


def say_note(sentence: str) -> None:
    """Write a note that stops nothing, as one line on stderr."""
    err.print(f"[yellow]note:[/] {plain(sentence)}", soft_wrap=True)


def plain(sentence: str) -> str:
    """Escape text for `Console.print`: without line breaks or markup."""
    # rich treats "[name]" as a style and drops it, and names of feeds and files may contain brackets.
    return " ".join(sentence.split()).replace("[", r"\[")


def write_json(value: object, *, indent: int | None = None) -> None:
    """Write a value as JSON for programs: never coloured, never folded. Paths and other objects become strings."""
    sys.stdout.write(json.dumps(value, indent=indent, default=str) + "\n")
    sys.stdout.flush()


def write_result(value: object, page: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Write a command's result: as JSON for programs, or as a page for people."""
    if as_json:
        write_json(value)
    else:
        out.print(page())


Cell: TypeAlias = "RenderableType | int | tuple[str, str]"
"""A cell of a table: text, a number, or (text, style)."""

_STYLES = {"*": "bold", "~": "dim"}


class Rows(Generic[Item]):
    """Items that are shown as a table."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = items

    def table(
        self, *columns: tuple[str, Callable[[Item], Cell]], text_folds: bool = False, strong_first: bool = False
    ) -> Table:
        """Return a table without borders.

        Args:
            columns: headings and functions of an item. A heading may follow marks: ">" for numbers, "*" for bold and
                "~" for dim text.
            text_folds: fold every text column on a narrow terminal, instead of only the first.
            strong_first: the first cell is bold, because the first item is the recommended one.
        """
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for index, (heading, _) in enumerate(columns):
            name = heading.lstrip(">*~")
            is_number, style = heading.startswith(">"), _STYLES.get(heading[:1], "")
            folds = index == 0 or (text_folds and not is_number)
            justify: Any = "right" if is_number else "left"
            overflow: Any = "fold" if folds else "ellipsis"
            table.add_column(name, justify=justify, overflow=overflow, no_wrap=not folds, style=style)
        for number, item in enumerate(self._items):
            first, *others = (_shown(cell(item)) for _, cell in columns)
            table.add_row(Styled(first, "bold") if strong_first and not number else first, *others)
        return table


def _shown(cell: Cell) -> RenderableType:
    if isinstance(cell, tuple):
        return Text(*cell)
    return Text(str(cell)) if isinstance(cell, (str, int)) else cell


def facts(rows: Iterable[Iterable[RenderableType]], *columns: Column) -> RenderableType:
    """Return indented lines, each with a name and more ``columns``."""
    grid = Table.grid(Column(style="cyan", no_wrap=True), *columns, padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return Padding(grid, (0, 0, 0, 2), expand=False)


def stack(parts: Iterable[RenderableType | None]) -> RenderableType:
    """Stack the parts of a page that there are, with an empty line between."""
    first, *others = (part for part in parts if part is not None)
    return Group(first, *(Padding(part, (1, 0, 0, 0)) for part in others))


def is_named(address: str | None) -> bool:
    """Return whether the user named a cluster, by ``--address`` or ``RAY_ADDRESS``."""
    return (address or os.environ.get("RAY_ADDRESS") or "auto") != "auto"


def join_cluster(address: str | None) -> None:
    """Connect this process to a running cluster, and show that meanwhile."""
    with doing("connecting to Ray"):
        connect(address, start=False)


def doing(what: str) -> AbstractContextManager[object]:
    """Show what is done meanwhile, on a terminal."""
    return err.status(f"{plain(what)} ...")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int, str], float | None]]:
    """Show a bar meanwhile, on a terminal.

    Yields a function of the number of items that are done, the number of all, and a text about them. It returns the
    estimated seconds for the others; None if they are unknown.
    """
    from rich import progress  # not for commands without long work

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}", markup=False),  # the name of a folder may contain brackets
        progress.BarColumn(20),
        progress.TextColumn("{task.fields[counted]}", markup=False),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with progress.Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        bar.add_task(what, total=None, counted="")
        (task,) = bar.tasks

        def show(done: int, total: int, text: str) -> float | None:
            bar.update(task.id, total=total, completed=done, counted=text)
            return task.time_remaining

        yield show


def check_folders(*files: Path | None) -> None:
    """Raise ConfigError if the folder of a file that is to be written does not exist, before any long work."""
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise ConfigError(f"the folder of {file} does not exist")


class NoClusterError(ResourceError):
    """No cluster is running on this machine, and none was named."""


def connect(address: str | None, *, start: bool) -> None:
    """Connect this process to a cluster; with ``start``, start one if none is running here.

    Args:
        address: "host:port" of the head; None: environment variable ``RAY_ADDRESS``, or the cluster on this machine.
            "local" starts a separate one, as in Python.
        start: start an embedded cluster if none is running. A named cluster must be running.

    Raises:
        ConfigError: the address is not "host:port".
        ResourceError: no cluster answers there.
    """
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named == "local" and not start:
        origin, omit = ("--address", "leave it out") if address else ("RAY_ADDRESS", "unset it")
        raise NoClusterError(f'{origin} is "local", which names no cluster; {omit}, or set it to host:port of one')
    if named not in ("auto", "local"):
        _check_reachable(named)
    if named != "auto":
        # In the environment, so that child processes join the same cluster.
        os.environ["RAY_ADDRESS"] = named
    # Not if a cluster may be started here, because its processes would inherit the setting.
    if named not in ("auto", "local") or not start:
        os.environ.setdefault(*_TRIES)
    from mbaas.ray_cluster import connection

    try:
        connection.ensure_ray(start=start)
    except ResourceError as error:
        if not isinstance(error.__context__, ConnectionError):
            raise
        # Ray has one class for "no cluster" and "no answer"; only the messages differ.
        is_gone = isinstance(error.__context__, connection.NoAnswerError)  # its address is still in Ray's folder
        if named == "auto" and (is_gone or "find any running" in str(error.__context__)):
            raise NoClusterError(_none_at(named)) from None
        reason = _first_line(error.__context__)
        raise ResourceError(f"cannot join the Ray cluster at {named}: {reason}; {connection.ABOUT_TOKENS}") from None
    except (ConnectionError, RuntimeError) as error:  # RuntimeError: another version of Ray or Python
        raise ResourceError(f"cannot join the Ray cluster at {named}: {_first_line(error)}") from None


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(
            f"the address of a cluster must be host:port of its head, such as 10.0.0.1:6379, got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
    except (OSError, OverflowError):
        raise ResourceError(_none_at(address)) from None


def _none_at(address: str) -> str:
    if address != "auto":
        return f"no Ray cluster answers at {address}; check --address or RAY_ADDRESS"
    return (
        "no Ray cluster is running on this machine; start one with `mbaas serve`, or set --address or RAY_ADDRESS to "
        "one elsewhere"
    )


def statuses(name: str | None, *, within_s: float | None = None) -> Statuses:
    """Return the status of the feed ``name``, or of all feeds, each within ``within_s`` or a starting feed's limit.

    Raises:
        FeedNotFoundError: no feed with this name; the message lists the running feeds.
    """
    import mbaas

    found: Statuses = {}
    for feed in mbaas.feeds() if name is None else [mbaas.connect(name)]:
        try:
            found[feed.name] = feed.status() if within_s is None else feed.status(timeout_s=within_s)
        except (FeedNotFoundError, FeedFailedError, WaitTimeoutError) as error:
            found[feed.name] = error
    return found


@contextmanager
def updated_page(*, live: bool) -> Iterator[Callable[[RenderableType], None]]:
    """Return a function that shows a page: in the place of the last one if ``live`` and on a terminal, or below it."""
    if not live or not out.is_terminal:
        yield out.print
        return
    # Draw once per page: a refresh thread would only repeat the same figures.
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as shown:
        yield lambda page: shown.update(page, refresh=True)


def examples(*lines: str) -> str:
    return "\n".join(["[bold]Examples[/]", *(f"  {line}" for line in lines)])


FIRST, FEEDS, CLUSTERS = "Before the first feed", "Feeds", "Clusters"
DECISIONS = "Decisions, from the first to the last"
"""Headings of the list of commands."""


def command(app: typer.Typer, panel: str | None = None) -> Callable[[Function], Function]:
    """Register a command of ``app``, with the help in its docstring.

    The text is kept paragraph by paragraph. Section "Args" has the help of options, if they do not have it themselves.
    ``panel`` is the command's heading in the list of all commands.
    """

    def register(function: Function) -> Function:
        text, _, shown = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        # typer would keep the source's line breaks
        paragraphs = text.partition("\n\nArgs:\n")[0].split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        name = function.__name__.strip("_").replace("_", "-")  # "list_": "list" is a builtin
        any_function: Any = function
        any_function.__signature__ = _with_help(function)
        epilog = examples(*textwrap.dedent(shown).splitlines())
        return app.command(name, help=text, epilog=epilog, rich_help_panel=panel)(function)

    return register


def _with_help(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature, as for typer, with the descriptions in its docstring."""
    texts, parameters = described(function), []
    # Python 3.10's `get_type_hints` hides the options of a parameter whose default is None.
    for name, each in inspect.signature(function, eval_str=True).parameters.items():
        hint = each.annotation
        if name in texts:
            kind, *options = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            option: Any = copy(options[0]) if options else typer.Option()
            option.help = texts[name]
            hint = Annotated[kind, option]
        parameters.append(each.replace(annotation=hint))
    return inspect.Signature(parameters)


def described(call: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of parameters in the section "Args" of a docstring.

    ``path, listing: as for `read_images`.`` stands for the descriptions of that function.
    """
    text = (inspect.getdoc(call) or "").partition("Args:")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for names, words in re.findall(r"^    (\w+(?:, \w+)*): ((?:.|\n {5})*)", text, re.MULTILINE):
        other = re.fullmatch(r"as for `(\w+)`\.", words.strip())
        meant = described(getattr(inspect.getmodule(call), other[1])) if other is not None else {}
        found.update((name, meant.get(name) or " ".join(words.split())) for name in names.split(", "))
    return found


def takes(request: type[Made]) -> Callable[[Callable[[Made], None]], Callable[..., None]]:
    """Turn a function of a ``request`` into one whose parameters are the fields of this dataclass, as for typer."""

    def decorated(function: Callable[[Made], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(**given: Any) -> None:
            function(request(**given))

        hints = get_type_hints(request, include_extras=True)
        found = inspect.signature(request).parameters.items()
        signature = inspect.Signature([each.replace(annotation=hints[name]) for name, each in found])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = hints
        return call

    return decorated


class SentencesGroup(TyperGroup):
    """Commands whose expected errors end as a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_as_notes():
                return super().invoke(ctx)
        except ConfigError as error:
            say_error(str(error))
            raise typer.Exit(MISUSED) from None
        except MbaasError as error:
            say_error(str(error))
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            say_error("interrupted")
            raise typer.Exit(CUT_OFF) from None


def group(**options: Any) -> typer.Typer:
    """Return a group of commands with the common look and error handling; ``options`` are for `typer.Typer`."""
    return typer.Typer(
        cls=SentencesGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,  # a bug shows a plain traceback, for reports
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **options,
    )


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Show mbaas's own warnings as notes, and hide the developer warnings of libraries."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            say_note(str(message))

    # mbaas raises plain UserWarnings; libraries have their own classes for developers.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


@contextmanager
def end_as_ctrl_c(on_signal: Callable[[], None] | None = None) -> Iterator[None]:
    """Treat a supervisor's SIGTERM, or a closed terminal's SIGHUP, like Ctrl-C.

    After the first of these signals, ``on_signal`` runs in a thread; it may end this process if the work does not end.
    """
    watch = threading.Thread(target=on_signal, name="mbaas-ending", daemon=True)

    def interrupt(*_: Any) -> None:
        # Only for the first signal: a second Ctrl-C must not move the deadline.
        if on_signal is not None and watch.ident is None:
            watch.start()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


app = group(name="mbaas")
"""The command ``mbaas``. The modules of this package add their commands."""
