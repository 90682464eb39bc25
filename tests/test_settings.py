"""Each option of a feed is defined once and validates itself, and its errors name the valid values."""

from __future__ import annotations

import inspect
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest
import yaml
from annotated_types import Ge, Gt, Le

import mbaas
from mbaas.base.units import Unit
from mbaas.base.validation import descriptions_of
from mbaas.cli.feed_file import ON_IMAGES, FeedFile, load, schema
from mbaas.errors import ConfigError
from mbaas.feed import JoinRequest
from mbaas.serving import ServeRequest
from mbaas.settings import GROUPED, GROUPS, FeedOptions, FeedSettings
from tune_integration import get_loader

EXAMPLE = Path(__file__).parents[1] / "examples" / "feed.yaml"


def uncommented(text: str) -> str:
    """The example with all commented options enabled."""
    return re.sub(r"^( *)# (?=( *- |   )?( *)[A-Za-z_]+:)", r"\1", text, flags=re.MULTILINE)


def test_help_of_serve_lists_each_option_with_its_type_default_and_description() -> None:
    signature, text = inspect.signature(mbaas.serve), " ".join((mbaas.serve.__doc__ or "").split())
    names = [*signature.parameters]
    assert names == ["name", "dataset", "pipeline", *(each.name for each in fields(FeedOptions)), "replace"]
    for name, description in descriptions_of(ServeRequest).items():
        assert f" {name}: {description} " in text
    assert signature.parameters["cache_bytes"].annotation == int | None
    defaults = FeedOptions(batch_size=8)
    for name, parameter in signature.parameters.items():
        if parameter.default is not inspect.Parameter.empty and name != "replace":
            assert parameter.default == getattr(defaults, name), name


@pytest.mark.slow
def test_a_type_checker_sees_the_options_of_serve(tmp_path: Path) -> None:
    """Sizes and times may be strings with units; an unknown keyword and a wrong type are errors."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import mbaas
from mbaas.transforms import Pipeline

def run(data: mbaas.Dataset, pipeline: Pipeline) -> int | None:
    feed: mbaas.Feed = mbaas.serve("a", data, pipeline=pipeline, batch_size=8, cache_bytes="2 GiB")
    mbaas.serve("a", data, pipeline, batch_size=8, timeouts=mbaas.Timeouts(lease_s="2 min"))
    mbaas.serve("a", data, pipeline, batch_size="8")
    mbaas.serve("a", data, pipeline, batchsize=8)
    return mbaas.Staging(readahead_bytes="1 GB").readahead_bytes
"""
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(program)]  # strict, as CI has cached it
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1]).stdout
    errors = [line for line in found.splitlines() if ": error:" in line]
    assert [line.split(":")[1] for line in errors] == ["8", "9"], found
    assert ("batch_size" in errors[0], "batchsize" in errors[1]) == (True, True)


def test_join_and_get_loader_have_the_same_described_parameters() -> None:
    parameters = inspect.signature(mbaas.join).parameters
    assert inspect.signature(get_loader).parameters == parameters
    assert [*parameters][:3] == ["name", "consumer", "batch_size"]
    for function in (mbaas.join, get_loader):
        text = " ".join((function.__doc__ or "").split())
        for name, description in descriptions_of(JoinRequest).items():
            assert f" {name}: {description} " in text
    assert descriptions_of(JoinRequest).keys() == parameters.keys()


def test_arguments_by_position_are_bound_as_python_binds_them() -> None:
    with pytest.raises(TypeError, match="4 positional arguments were given, at most 3 are allowed"):
        mbaas.serve("feed", None, None, 8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="name was given by position and by name"):
        mbaas.serve("feed", None, None, name="feed", batch_size=8)  # type: ignore[call-arg]


def test_every_option_has_a_meaning() -> None:
    """Each option has a description in the JSON schema, which editors show."""
    definitions = schema()["$defs"]
    for kind in (*GROUPS.values(), FeedFile):
        properties = definitions[kind.__name__]["properties"] if kind is not FeedFile else schema()["properties"]
        silent = [name for name, part in properties.items() if name not in GROUPS and not part.get("description")]
        assert silent == [], kind


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: mbaas.Timeouts(lease_s=0), "timeouts.lease_s must be above 0 seconds, got 0"),
        (lambda: mbaas.Timeouts(lease_s=-1), "timeouts.lease_s must be a time such as '30 s', '1.6 ms' or '2 min', or"),
        (lambda: mbaas.Timeouts(prep_s=math.inf), "timeouts.prep_s must be a time such as"),
        (lambda: mbaas.Timeouts(reservations_s=5), "unknown option 'timeouts.reservations_s'; did you mean"),
        (lambda: mbaas.Disk(path="/x"), "disk.max_bytes is missing"),
        (lambda: mbaas.Disk(path=3, max_bytes=5), "disk.path must be text, got 3"),
        (lambda: mbaas.Disk(path="/x", max_bytes=0), "disk.max_bytes must be at least 1, got 0"),
        (lambda: mbaas.Scaling(stall_low=0.1), "scaling.stall_low must be below scaling.stall_high, got 0.1 and 0.1"),
        (lambda: mbaas.Scaling(idle_high=1.1), "scaling.idle_high must be at most 1, got 1.1"),
        (lambda: mbaas.Scaling(idle_low=0), "scaling.idle_low must be above 0, got 0"),
        (lambda: mbaas.Scaling(cooldown_s=-1.0), "scaling.cooldown_s must be a time such as"),
        (lambda: mbaas.Scaling(prep_labels={"zone": 1}), "scaling.prep_labels.zone must be text, got 1"),
        (lambda: mbaas.Lending(hold_s=-1), "lending.hold_s must be a time such as"),
        (lambda: mbaas.Lending(enabled=1), "lending.enabled must be true or false, got 1"),
        (lambda: mbaas.Threads(prep=0), "threads.prep must be at least 1, got 0"),
        (lambda: mbaas.Threads(fetch=257), "threads.fetch must be at most 256, got 257"),
        (lambda: mbaas.Staging(ahead_blocks=1.0), "staging.ahead_blocks must be a whole number, got 1.0"),
        (lambda: mbaas.Staging(readahead_bytes="x"), "staging.readahead_bytes must be a size such as '2 GiB'"),
        (lambda: FeedOptions(batch_size=True), "batch_size must be a whole number, got True"),
        (
            lambda: FeedOptions(batch_size=8, threads=4),
            "threads must be Threads(...), got 4",
        ),
        (lambda: mbaas.Scaling(ahead_blocks=2), "unknown option 'scaling.ahead_blocks'; known are "),
        (lambda: FeedOptions(batch_size=8, timeouts=4), "timeouts must be Timeouts(...), got 4"),
        (lambda: FeedOptions(batch_size=8, gpus_per_worker=-1), "gpus_per_worker must be at least 0, got -1"),
        (
            lambda: FeedOptions(batch_size=8, prep_workers=4, scaling=mbaas.Scaling(max_prep_workers=2)),
            "scaling.max_prep_workers must be at least prep_workers, 4, got 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_both_values(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize("name", ["lease_s", "max_prep_workers", "ahead_blocks", "max_bytes", "fetch"])
def test_an_option_of_a_group_is_found_by_its_name(name: str) -> None:
    group, _, _ = GROUPED[name][0].partition(".")
    code = f"{group}=mbaas.{GROUPS[group].__name__}({name}=...)"
    with pytest.raises(ConfigError, match=re.escape(f"unknown option {name!r} of serve; it is {code!r}")):
        mbaas.serve("feed", None, None, batch_size=8, **{name: 1})


def test_an_unknown_keyword_says_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'prep_worker' of serve; did you mean 'prep_workers'"):
        mbaas.serve("feed", None, None, batch_size=8, prep_worker=1)


def test_sizes_and_times_are_read_as_people_write_them(tmp_path: Path) -> None:
    found = FeedOptions(batch_size=8, cache_bytes="2 GiB", timeouts=mbaas.Timeouts(lease_s="2 min"))
    assert (found.cache_bytes, found.timeouts.lease_s) == (2 << 30, 120.0)
    assert mbaas.Disk(path=tmp_path, max_bytes="50 GB") == mbaas.Disk(path=str(tmp_path), max_bytes=50_000_000_000)


def test_settings_are_frozen_and_travel() -> None:
    """A feed's coordinator and consumers receive them by pickle."""
    made = FeedSettings(
        name="feed",
        batch_size=8,
        cache_bytes=0,
        staging_bytes=1,
        prep_workers=1,
        disk=mbaas.Disk(path="/x", max_bytes=5),
    )
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(AttributeError):
        made.batch_size = 9


def test_the_example_is_valid_by_the_schema_with_all_that_it_shows() -> None:
    """Editors validate files with the schema. The reference has a table with every option."""
    text = EXAMPLE.read_text()
    jsonschema.validate(yaml.safe_load(text), schema())
    shown = yaml.safe_load(uncommented(text))
    jsonschema.validate(shown, schema())


def test_the_example_shows_the_defaults() -> None:
    """Commented options have their default values, except values chosen for the example and machine-dependent ones."""
    chosen = {
        "listing",
        "exclude",
        "cache_bytes",
        "staging_bytes",
        "prep_workers",
        "step_per_s",
        "gpus_per_worker",
        "dali_share",
        "cpu_price_per_h",
        "disk",
        "detached",
    }
    chosen |= {
        "boxes",
        "keypoints",
        "masks",
        "filter",
        "split",
        "limit",
        "resample",
        "max_prep_workers",
        "max_borrowed",
        "prep_labels",
        "ahead_blocks",
        "readahead_bytes",
    }
    text = EXAMPLE.read_text()
    shown = {name: part for name, part in yaml.safe_load(uncommented(text)).items() if name not in yaml.safe_load(text)}

    def differs(shown: dict[str, Any], default: object) -> list[str]:
        return [
            name
            for name, part in shown.items()
            if name not in chosen
            and (
                differs(part, getattr(default, name))
                if is_dataclass(getattr(default, name))
                else part != getattr(default, name)
            )
        ]

    assert differs(shown, FeedOptions(batch_size=1)) == []
    assert differs(shown["boxes"], ON_IMAGES["boxes"]()) == ["beside"], "no list is a tuple"
    assert differs(shown["keypoints"], ON_IMAGES["keypoints"]()) == ["swaps"]
    assert differs(shown["masks"], ON_IMAGES["masks"]()) == []


@cache
def by_schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema())


def bounds_of(annotation: Any) -> Iterator[Any]:
    """The metadata of an annotation, such as `Ge(1)`."""
    yield from getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        yield from bounds_of(part)


def beyond(bound: Any) -> list[float]:
    """Numbers just outside a bound."""
    if isinstance(bound, Gt):
        return [bound.gt]
    return [bound.ge - 1] if isinstance(bound, Ge) else [bound.le + 1] if isinstance(bound, Le) else []


ANYTHING: tuple[Any, ...] = (-1, 0, 1.5, 2**63, True, [1], "", "a/b", " a", "a\n")


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, each.name) for group, kind in {"": FeedFile, **GROUPS}.items() for each in fields(kind)],
)
def test_the_schema_refuses_what_the_command_refuses(group: str, option: str) -> None:
    """Values include numbers just beyond each bound.

    Strings are tested as names only: the schema has no grammar of sizes.
    """
    whole = yaml.safe_load(EXAMPLE.read_text())
    kind, given = (GROUPS[group], {}) if group else (FeedFile, whole)
    if group == "disk":
        given = {"path": "/x", "max_bytes": 5}
    annotation = get_type_hints(kind, include_extras=True)[option]
    refused = []
    for value in (*ANYTHING, *(value for bound in bounds_of(annotation) for value in beyond(bound))):
        changed = {**given, option: value}
        try:
            kind(**changed)
        except ConfigError:
            refused.append(value)
            has_unit = any(isinstance(bound, Unit) for bound in bounds_of(annotation))
            passes = by_schema().is_valid({**whole, group: changed} if group else changed)
            assert passes == (has_unit and isinstance(value, str)), value
    assert refused


@pytest.mark.parametrize(
    "wrong",
    [{"timeouts": {"lease": 3}}, {"pipeline": ["Blur"]}, {"pipeline": [{"Resize": {"sizes": 8}}]}, {"ahead_blocks": 2}],
)
def test_the_schema_refuses_names_that_there_are_not(wrong: dict[str, object]) -> None:
    assert not by_schema().is_valid({**yaml.safe_load(EXAMPLE.read_text()), **wrong})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("lease_s: 0", "timeouts.lease_s must be above 0 seconds, got 0 (a whole number)"),
        (
            "lease_s: -1",
            "timeouts.lease_s must be a time such as '30 s', '1.6 ms' or '2 min', or a number of seconds, 0 or more, "
            "got -1 (a whole number)",
        ),
    ],
)
def test_a_file_with_a_number_out_of_bounds_is_told_what_it_must_be(wrong: str, sentence: str, tmp_path: Path) -> None:
    """The first case is the example in the docstring of `mbaas.base.files`."""
    file = tmp_path / "feed.yaml"
    text = EXAMPLE.read_text()
    file.write_text(f"{text}\ntimeouts:\n  {wrong}\n")
    with pytest.raises(ConfigError, match=re.escape(f"feed.yaml:{len(text.splitlines()) + 3}: {sentence}")):
        load(file)


@pytest.mark.slow
def test_the_schema_is_printed() -> None:
    run = [sys.executable, "-m", "mbaas", "serve", "--schema"]
    assert json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout) == schema()


def test_settings_need_no_ray() -> None:
    """The pure core imports them."""
    run = "import sys, mbaas.settings; print(sorted({'ray', 'torch', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", run], capture_output=True, check=True, text=True).stdout == "[]\n"
