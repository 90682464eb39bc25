"""``mbaas ledger`` shows or exports the samples that consumers received in their epochs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mbaas.base.units import count, counted, duration, seconds
from mbaas.cli.console import FEEDS, Address, AsJson, Cell, Rows, app, command, join_cluster, out, say_note, write_json
from mbaas.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


@command(app, FEEDS)
def ledger(
    name: Annotated[str, typer.Argument()],
    consumer: Annotated[str | None, typer.Argument(metavar="[CONSUMER]")] = None,
    inexact: Annotated[bool, typer.Option("--inexact")] = False,
    as_json: AsJson = False,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    address: Address = None,
) -> None:
    """Show the samples that each consumer received in each of its epochs, against the expected ones.

    A ledger counts samples and hashes their ids, in any order: it matches if the consumer received each sample of the
    epoch exactly once. [bold]from[/] and [bold]shuffled as[/], with the seed, determine the contents of every
    minibatch.

    Args:
        name: Name of the feed.
        consumer: Show each epoch of this consumer.
        inexact: Only epochs whose ledger does not match.
        parquet: Write the rows to this file.

    Examples:
        mbaas ledger train
        mbaas ledger train trial-3                   [dim]each of its epochs[/]
        mbaas ledger train --parquet ledgers.parquet
    """
    import pyarrow as pa

    import mbaas

    join_cluster(address)
    found = mbaas.connect(name).ledger()
    rows = found.to_pylist()
    if consumer is not None:
        _check_known(consumer, rows)
    chosen = [consumer in (None, row["consumer"]) and not (inexact and row["exact"]) for row in rows]
    nothing = "all ledgers match" if rows and inexact else "no consumer has finished an epoch yet"
    found = found.filter(pa.array(chosen, pa.bool_()))  # an empty list needs an explicit type
    rows = [row for row, is_chosen in zip(rows, chosen, strict=True) if is_chosen]
    if parquet is not None:
        _write(found, parquet)
        say_note(f"{counted(len(rows), 'ledger')} in {parquet}")
    elif as_json:
        write_json([{**row, "arrived": row["arrived"].isoformat()} for row in rows])
    elif not rows:
        out.print(nothing, style="dim")
    else:
        out.print(_by_consumer(rows) if consumer is None and not inexact else _by_epoch(rows))


def _check_known(consumer: str, rows: list[dict[str, Any]]) -> None:
    known = sorted({row["consumer"] for row in rows})
    if consumer not in known:
        there = ", ".join(known[:20]) or "none so far"
        raise ConfigError(f"no ledger of {consumer!r}; consumers that have finished an epoch: {there}")


def _write(found: pa.Table, path: Path) -> None:
    from pyarrow import parquet

    try:
        parquet.write_table(found, path)
    except OSError as error:
        raise ConfigError(f"--parquet {path} cannot be written: {error}") from None


def _time(value: float) -> str:
    return duration(value) if value >= 60 else seconds(value)


def _by_consumer(rows: list[dict[str, Any]]) -> Table:
    by_name = {name: [row for row in rows if row["consumer"] == name] for name in (row["consumer"] for row in rows)}

    def took(own: list[dict[str, Any]]) -> str:
        times = [row["seconds"] for row in own if row["seconds"]]
        return _time(sum(times) / len(times)) if times else "-"

    def matching(own: list[dict[str, Any]]) -> Cell:
        wrong = sum(not row["exact"] for row in own)
        return (f"{wrong} do not match", "bold red") if wrong else ("all match", "green")

    return Rows(by_name.values()).table(
        ("*consumer", lambda own: own[0]["consumer"]),
        (">epochs", len),
        (">samples", lambda own: count(sum(row["samples"] for row in own))),
        (">an epoch took", took),
        ("ledgers", matching),
    )


def _by_epoch(rows: list[dict[str, Any]]) -> Table:
    def matching(row: dict[str, Any]) -> Cell:
        return ("matches", "green") if row["exact"] else (f"{count(row['expected_samples'])} expected", "bold red")

    own = [("pipeline", lambda row: row["pipeline"][:8] or "the feed's")]
    if not any(row["pipeline"] for row in rows):
        own = []
    return Rows(rows).table(
        ("*consumer", lambda row: row["consumer"]),
        (">epoch", lambda row: row["epoch"]),
        (">feed epoch", lambda row: row["feed_epoch"]),
        (">from", lambda row: count(row["begin"])),
        (">samples", lambda row: count(row["samples"])),
        (">took", lambda row: _time(row["seconds"]) if row["seconds"] else "-"),
        ("ledger", matching),
        ("~shuffled as", lambda row: row["shuffled"]),
        *own,
    )
