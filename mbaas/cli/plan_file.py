"""The file that `mbaas plan` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mbaas import units
from mbaas.analysis.plan.jobs import Cluster, Node, Points, Samples, TrainingJob
from mbaas.analysis.rates import Rates
from mbaas.cli import document
from mbaas.cli.document import Located
from mbaas.cli.pipelines import suggestion
from mbaas.errors import ConfigError

Made = TypeVar("Made")

Kinds = Mapping[str, Callable[[str, Located], Any]]
"""How the value of each key is read: from the key and what the file says there."""


def load(file: Path) -> tuple[list[TrainingJob], Cluster]:
    """Read and check a file.

    Raises:
        ConfigError: says the file, the line, what is there and what must be.
    """
    values = _section("a plan", document.read(file), {"cluster": _cluster, "datasets": _named, "jobs": _named})
    datasets = {name: _dataset(name, entry) for name, entry in values["datasets"].items()}
    return [_job(name, entry, datasets) for name, entry in values["jobs"].items()], values["cluster"]


def _cluster(key: str, entry: Located) -> Cluster:
    kinds: Kinds = {
        "nodes": _bounds,
        "node": _node,
        "storage_bytes_per_s": _rate_points,
        "storage_shared": _flag,
    }
    values = _section(key, entry, kinds, optional=["storage_shared"])
    least, most = values.pop("nodes")
    storage = values.pop("storage_bytes_per_s")
    return _made(entry, lambda: Cluster(least_nodes=least, most_nodes=most, storage=storage, **values))


def _node(key: str, entry: Located) -> Node:
    kinds: Kinds = {
        "cores": _count,
        "memory_bytes": _size,
        "gpus": _number,
        "object_store_bytes": _size,
        "memory_bytes_per_s": _rate,
        "disk_bytes": _size,
        "disk_bytes_per_s": _rate,
        "network_bytes_per_s": _rate,
        "read_threads": _count,
    }
    values = _section(key, entry, kinds, optional=kinds.keys() - {"cores", "memory_bytes"})
    return _made(entry, lambda: Node(**values))


def _dataset(name: str, entry: Located) -> Samples:
    values = _section(name, entry, {"samples": _count, "dataset_bytes": _size})
    return _made(entry, lambda: Samples(name=name, **values))


def _job(name: str, entry: Located, datasets: Mapping[str, Samples]) -> TrainingJob:
    measured: Kinds = {"step_per_s": _number, "prep": _points, "batch_size": _count, "pixel_bytes": _size}
    kinds: Kinds = {
        "dataset": _text,
        **measured,
        "rates": _rates,
        "trials": _count,
        "cores_per_trial": _number,
        "gpus_per_trial": _number,
        "reserved_workers": _count,
        "staging_bytes": _size,
    }
    needed = {"dataset"} if "rates" in entry.fields else {"dataset", *measured}
    values = _section(name, entry, kinds, optional=kinds.keys() - needed)
    from_file = values.pop("rates", {})
    for rate in ("step_per_s", "prep"):
        if rate in values:  # stated beside the file: exact
            from_file.pop(f"{rate.removesuffix('_per_s')}_spread", None)
    values = {**from_file, **values}
    dataset = values.pop("dataset")
    if dataset not in datasets:
        raise entry.fields["dataset"].error(f"unknown dataset {dataset!r}; {suggestion(dataset, datasets)}")
    return _made(entry, lambda: TrainingJob(name=name, dataset=datasets[dataset], **values))


def _section(key: str, entry: Located, kinds: Kinds, *, optional: Collection[str] = ()) -> dict[str, Any]:
    """The values of a mapping; a key that says nothing is as good as missing."""
    _mapping(key, entry)
    for name, field in entry.fields.items():
        if name not in kinds:
            raise field.error(f"unknown key {name!r}; {suggestion(name, kinds)}")
    said = {name: field for name, field in entry.fields.items() if field.value is not None}
    required = [name for name in kinds if name not in optional]
    if missing := [name for name in required if name not in said]:
        raise entry.error(f"{missing[0]!r} is missing; {key} needs {', '.join(required)}")
    return {name: kinds[name](name, field) for name, field in said.items()}


def _made(entry: Located, make: Callable[[], Made]) -> Made:
    """What ``make`` makes; if it refuses a value, the error says in which line that stands."""
    try:
        return make()
    except ConfigError as error:
        words = set(re.findall(r"\w+", str(error)))
        named = next((field for key, field in entry.fields.items() if words & {key, key.partition("_")[0]}), entry)
        raise named.error(str(error)) from None


def _mapping(key: str, entry: Located) -> Located:
    if not isinstance(entry.value, dict):
        raise entry.error(f"{key} must hold 'key: value' lines, got {entry.said}")
    return entry


def _named(key: str, entry: Located) -> dict[str, Located]:
    return _mapping(key, entry).fields


def _bounds(key: str, entry: Located) -> tuple[int, int]:
    """``4``, or ``{least: 1, most: 8}``."""
    if not isinstance(entry.value, dict):
        return (_count(key, entry),) * 2
    values = _section(key, entry, {"least": _count, "most": _count})
    return values["least"], values["most"]


def _points(key: str, entry: Located) -> Points:
    return _pairs(key, entry, _number)


def _rate_points(key: str, entry: Located) -> Points:
    return _pairs(key, entry, _rate)


def _pairs(key: str, entry: Located, rate: Callable[[str, Located], float]) -> Points:
    """One rate, of one worker or reader, or a list of [count, rate]."""
    if not isinstance(entry.value, list):
        return ((1.0, rate(key, entry)),)
    if bad := next((item for item in entry.items if len(item.items) != 2), None):
        raise bad.error(f"{key} must be a rate, or a list of [count, rate], got {bad.said}")
    return tuple((_number(key, count), rate(key, per_s)) for count, per_s in (item.items for item in entry.items))


def _rates(key: str, entry: Located) -> dict[str, Any]:
    """What `mbaas analyze` measured, from a file of `mbaas.analysis.Rates.to_json`, alone or under ``rates``."""
    path = entry.file.resolve().parent / Path(_text(key, entry)).expanduser()
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        rates = Rates.from_json(plain.get("rates", plain))
    except OSError as error:
        raise entry.error(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise entry.error(f"{path} does not hold measured rates: {error}") from None
    return {
        "step_per_s": rates.step.value,
        "step_spread": (rates.step.low / rates.step.value, rates.step.high / rates.step.value),
        "prep": rates.feed_points,
        "prep_spread": rates.prep.spread,
        "batch_size": rates.batch_size,
        "pixel_bytes": round(rates.pixel_bytes),
    }


def _count(key: str, entry: Located) -> int:
    if type(entry.value) is not int:
        raise entry.error(f"{key} must be a whole number, got {entry.said}")
    return entry.value


def _number(key: str, entry: Located) -> float:
    if type(entry.value) not in (int, float):
        raise entry.error(f"{key} must be a number, got {entry.said}")
    return float(entry.value)


def _size(key: str, entry: Located) -> int:
    return _parsed(key, entry, units.parse_bytes, units.WANTED_BYTES)


def _rate(key: str, entry: Located) -> float:
    return _parsed(key, entry, units.parse_bytes_per_s, units.WANTED_BYTES_PER_S)


def _parsed(key: str, entry: Located, parse: Callable[[object], Made | None], wanted: str) -> Made:
    number = parse(entry.value)
    if number is None:
        raise entry.error(f"{key} must be {wanted}, got {entry.said}")
    return number


def _flag(key: str, entry: Located) -> bool:
    if type(entry.value) is not bool:
        raise entry.error(f"{key} must be true or false, got {entry.said}")
    return entry.value


def _text(key: str, entry: Located) -> str:
    if not isinstance(entry.value, str):
        raise entry.error(f"{key} must be text, got {entry.said}")
    return entry.value
