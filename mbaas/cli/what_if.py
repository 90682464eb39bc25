"""``mbaas what-if`` makes predictions from saved measurements, for changes, curves and a price list."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mbaas.base import validation
from mbaas.cli.console import DECISIONS, AsJson, app, command, write_result
from mbaas.errors import ConfigError

if TYPE_CHECKING:
    from mbaas.model.rates import Rates, Setup
    from mbaas.tools.analysis.advice import MachineType


@command(app, DECISIONS)
def what_if(
    measured: Annotated[Path, typer.Argument(metavar="FILE.json")],
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE")] = None,
    curve: Annotated[str | None, typer.Option(metavar="NAME=V,V")] = None,
    machines: Annotated[Path | None, typer.Option(metavar="FILE.yaml")] = None,
    epochs: int = 90,
    gpu: Annotated[Path | None, typer.Option(metavar="FILE.yaml")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the effect of more cache, cores, nodes, trials or faster storage from measured rates.

    Args:
        measured: A file written by `mbaas analyze --save`.
        changes: Change one of nodes, cores, cache_bytes, ...
        curve: Predict several values of one parameter.
        machines: A price list; see docs/analyze.md.
        epochs: Number of epochs, for --machines.
        gpu: Measurements on a GPU; see docs/analyze.md.

    Examples:
        mbaas what-if a.json --set trials=8 --set sharing=off
        mbaas what-if a.json --set cache_bytes=20GB --set storage_factor=0.5
        mbaas what-if a.json --curve cache_bytes=0,10GB,20GB,40GB
        mbaas what-if a.json --machines prices.yaml --epochs 90    [dim]the cheapest first[/]
        mbaas what-if a.json --gpu gpu.yaml    [dim]decode on the CPU, or on the GPU?[/]
    """
    from mbaas.base import files
    from mbaas.cli.analysis_view import what_if_page
    from mbaas.model import pace
    from mbaas.model.gpu_stages import crossing
    from mbaas.model.quantity import plain
    from mbaas.model.rates import GpuRates
    from mbaas.tools.analysis import advice
    from mbaas.tools.analysis.decoding import decoding

    rates, setup = load(measured)
    asked = changed(setup, changes or [])
    answer: dict[str, Any] = {
        "verdict": advice.verdict(rates, asked),
        "before": pace.predict(rates, setup),
        "after": pace.predict(rates, asked),
        "smallest_cache": pace.smallest_cache(rates, asked),
        "fewest_prep_cores": pace.fewest_prep_cores(rates, asked),
        "bottleneck": pace.bottleneck(rates, asked),
        "costs": advice.epoch_costs(rates, asked),
    }
    if (kept := decoding(rates, asked)) is not None:
        answer["decoding"] = kept
    drawn = offered = None
    if curve is not None:
        name, values = read_curve(curve)
        drawn = pace.curve(rates, asked, name, values)
        answer["curve"] = {"parameter": name, "points": [[value, found.steady] for value, found in drawn.points]}
    if machines is not None:
        offered = answer["machines"] = advice.offers(rates, asked, read_machines(machines), epochs=epochs)
    crosses = None if rates.on_gpu is None else crossing(rates, asked, rates.on_gpu)
    if gpu is not None:
        said = files.read(gpu)
        on_gpu = said.to(GpuRates)
        crosses = said.made(lambda: crossing(rates, asked, on_gpu))
    if crosses is not None:
        answer["gpu"] = {**vars(crosses), "options": crosses.options}
    view = partial(what_if_page, rates, setup, asked, curve=drawn, offered=offered, crosses=crosses)
    write_result(plain(answer), view, as_json=as_json)


def load(file: Path) -> tuple[Rates, Setup]:
    """Read the rates and the setup of a saved analysis; raise ConfigError for any other file."""
    from mbaas.base import files
    from mbaas.model.rates import Rates, Setup

    wanted = f"{file} must be a file written by `mbaas analyze --save`"
    try:
        plain = files.read_json(file)
    except ConfigError as error:
        if not file.is_file():  # a missing file is not a wrong one, such as a feed file
            raise
        raise ConfigError(f"{error}; {wanted}") from None
    if lacking := [repr(key) for key in ("rates", "setup") if key not in plain]:
        raise ConfigError(f"{wanted}, it lacks {' and '.join(lacking)}")
    try:
        # null means not given: such fields get their defaults
        setup = {name: value for name, value in plain["setup"].items() if value is not None}
        return Rates.from_json(plain["rates"]), Setup(**setup)
    # A file from another version or edited by hand may lack keys, or have values of other types.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{wanted}: {error}") from None


def changed(setup: Setup, changes: list[str]) -> Setup:
    """Return the setup with each "name=value" applied; raise ConfigError for an unknown name or invalid value."""
    from mbaas.model.rates import Setup

    for change in changes:
        name, _, text = change.partition("=")
        known = [field.name for field in fields(Setup)]
        if name not in known:
            raise ConfigError(f"--set {change}: unknown name {name!r}; {validation.instead(name, known)}")
        made: dict[str, Any] = {name: value(name, text)}
        setup = replace(setup, **made)
    return setup


def read_curve(text: str) -> tuple[str, list[float]]:
    """Parse "name=value,value,..."; raise ConfigError for an unknown name or invalid values."""
    from mbaas.model.pace import PARAMETERS

    name, _, values = text.partition("=")
    if name not in PARAMETERS:
        raise ConfigError(f"--curve {text}: unknown name {name!r}; {validation.instead(name, PARAMETERS)}")
    return name, [value(name, part) for part in values.split(",")]


def value(name: str, text: str) -> Any:
    """Parse the value of a field of `Setup`: a size with a unit, on or off, or a number; raise ConfigError."""
    from mbaas.base import files
    from mbaas.model.rates import Setup

    # the annotation has the unit: "20 GB" is valid for cache_bytes, but not for trials
    return files.read_value(get_type_hints(Setup, include_extras=True)[name], text, name=name)


def read_machines(file: Path) -> list[MachineType]:
    """Read a price list: YAML, machine -> fields of `MachineType`. A ConfigError has the line of an invalid entry."""
    from mbaas.base import files
    from mbaas.tools.analysis.advice import MachineType

    listed = files.read(file).fields
    if not listed:
        raise ConfigError(f"{file} must list machines, each with price_per_h and cores")
    return [entry.to(MachineType, name=name) for name, entry in listed.items()]
