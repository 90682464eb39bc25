"""``mbaas what-if`` makes predictions from saved measurements, for changes, curves and a price list."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from mbaas import files, validation
from mbaas.analysis.advice import MachineType, verdict
from mbaas.cli.analysis_view import what_if_page
from mbaas.cli.console import out, write_json
from mbaas.errors import ConfigError
from mbaas.model.pace import PARAMETERS
from mbaas.model.quantity import plain_fields
from mbaas.model.rates import Rates, Setup


def what_if(
    file: Path,
    changes: list[str],
    *,
    curve: str | None,
    machines: Path | None,
    epochs: int,
    gpu: Path | None,
    as_json: bool,
) -> None:
    """Print predictions from saved measurements.

    Args:
        file: written by ``mbaas analyze --save``.
        changes: strings such as "name=value", with names of `Setup`.
        curve: a string such as "name=value,value,...".
        machines: a price list; see `read_machines`.
        epochs: length of the priced job.
        gpu: measurements on a GPU: YAML, the fields of `GpuRates`; None: those in ``file``, if any.
        as_json: write one line with one JSON object.

    Raises:
        ConfigError: an invalid file or change.
    """
    from mbaas.analysis.advice import epoch_costs, offers
    from mbaas.analysis.decoding import decoding
    from mbaas.model.gpu_stages import crossing
    from mbaas.model.pace import bottleneck, fewest_prep_cores, predict, smallest_cache
    from mbaas.model.pace import curve as curve_of
    from mbaas.model.rates import GpuRates

    rates, setup = load(file)
    asked = changed(setup, changes)
    answer: dict[str, Any] = {
        "verdict": verdict(rates, asked),
        "before": predict(rates, setup).to_json(),
        "after": predict(rates, asked).to_json(),
        "smallest_cache": smallest_cache(rates, asked).to_json(),
        "fewest_prep_cores": fewest_prep_cores(rates, asked).to_json(),
        "bottleneck": vars(bottleneck(rates, asked)),
        "costs": epoch_costs(rates, asked).to_json(),
    }
    if (kept := decoding(rates, asked)) is not None:
        answer["decoding"] = kept.to_json()
    drawn = None
    if curve is not None:
        name, values = read_curve(curve)
        drawn = curve_of(rates, asked, name, values)
        answer["curve"] = {"parameter": name, "points": [[v, p.steady.to_json()] for v, p in drawn.points]}
    offered = None
    if machines is not None:
        offered = offers(rates, asked, read_machines(machines), epochs=epochs)
        answer["machines"] = [offer.to_json() for offer in offered]
    crosses = None if rates.on_gpu is None else crossing(rates, asked, rates.on_gpu)
    if gpu is not None:
        said = files.read(gpu)
        on_gpu = said.to(GpuRates)
        crosses = said.made(lambda: crossing(rates, asked, on_gpu))
    if crosses is not None:
        answer["gpu"] = {**plain_fields(crosses), "options": crosses.options}
    if as_json:
        write_json(json.dumps(answer))
    else:
        out.print(what_if_page(rates, setup, asked, curve=drawn, offered=offered, crosses=crosses))


def load(file: Path) -> tuple[Rates, Setup]:
    """Read the rates and the setup of a saved analysis.

    Raises:
        ConfigError: the file does not contain one.
    """
    plain, wanted = files.read_json(file), f"{file} must be what `mbaas analyze --save` wrote"
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
    """Return the setup with each "name=value" applied.

    Raises:
        ConfigError: an unknown name, or an invalid value.
    """
    for change in changes:
        name, _, text = change.partition("=")
        known = [field.name for field in fields(Setup)]
        if name not in known:
            raise ConfigError(f"--set {change}: unknown name {name!r}; {validation.instead(name, known)}")
        made: dict[str, Any] = {name: value(name, text)}
        setup = replace(setup, **made)
    return setup


def read_curve(text: str) -> tuple[str, list[float]]:
    """Parse "name=value,value,...".

    Raises:
        ConfigError: an unknown name, or invalid values.
    """
    name, _, values = text.partition("=")
    if name not in PARAMETERS:
        raise ConfigError(f"--curve {text}: unknown name {name!r}; {validation.instead(name, PARAMETERS)}")
    return name, [value(name, part) for part in values.split(",")]


def value(name: str, text: str) -> Any:
    """Parse the value of a field of `Setup`: a size with a unit, on or off, or a number.

    Raises:
        ConfigError: an invalid value.
    """
    # the annotation has the unit: "20 GB" is valid for cache_bytes, but not for trials
    return validation.read(get_type_hints(Setup, include_extras=True)[name], text, name=name)


def read_machines(file: Path) -> list[MachineType]:
    """Read a price list: YAML, a mapping from the name of a machine to the fields of `MachineType`.

    Raises:
        ConfigError: an invalid entry; contains the line.
    """
    listed = files.read(file).fields
    if not listed:
        raise ConfigError(f"{file} must name machines, each with price_per_h and cores")
    return [entry.to(MachineType, name=name) for name, entry in listed.items()]
