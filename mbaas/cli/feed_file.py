"""The file of `mbaas serve` and `mbaas analyze`: a feed's name, data, pipeline and options.

::

    name: train
    data: s3://bucket/train
    batch_size: 256
    pipeline:
      - DecodeImage
      - RandomResizedCrop: 224                        # one value is the first parameter
      - ColorJitter: {brightness: 0.2, contrast: 0.2}
      - Map: my_prep:sharpen                          # function in a module next to the file, or installed
    timeouts: {lease_s: 2 min}
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter, WithJsonSchema

from mbaas import transforms
from mbaas.base import files
from mbaas.base.imports import import_named
from mbaas.base.validation import descriptions_of, instead, options
from mbaas.cli.feed_data import DataOptions, FeedData, parameters_of, schema_of, section
from mbaas.errors import ConfigError
from mbaas.settings import GROUPED, FeedName, FeedOptions
from mbaas.transforms import Pipeline, Transform
from mbaas.transforms.pipeline import ON_IMAGES

TRANSFORMS: dict[str, type[Transform]] = {
    name: kind
    for name, kind in vars(transforms).items()
    if isinstance(kind, type) and issubclass(kind, Transform) and kind is not Transform
}

if TYPE_CHECKING:
    BoxesFile = Any
    KeypointsFile = Any
    MasksFile = Any
    Steps = list[Any]
else:
    BoxesFile, KeypointsFile, MasksFile = (section(kind, within=name) for name, kind in ON_IMAGES.items())
    _STEP = {
        "anyOf": [
            {"enum": list(TRANSFORMS)},
            {
                "type": "object",
                "properties": {name: schema_of(kind) for name, kind in TRANSFORMS.items()},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
        ]
    }
    Steps = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _STEP, "minItems": 1})]


@options()
class FeedFile(DataOptions, FeedOptions):
    """A feed for `mbaas serve`."""

    name: FeedName
    """Name under which consumers join the feed."""

    pipeline: Steps
    """Steps applied to each sample, in this order: transforms by name, with their parameters."""

    boxes: BoxesFile | None = None
    """Boxes on the images, which transforms move with the pixels."""

    keypoints: KeypointsFile | None = None
    """Key points on the images, which transforms move with the pixels."""

    masks: MasksFile | None = None
    """Masks of the objects in boxes, made from COCO segmentations; needs the extra mbaas[coco]."""


@dataclass(frozen=True)
class FeedConfig:
    """A feed as described in a file; ``options`` are the keys other than name, data and pipeline."""

    name: str
    data: FeedData
    pipeline: Pipeline
    options: FeedOptions


def load(file: Path, *, name: str | None = None) -> FeedConfig:
    """Read and check a YAML file, without Ray and without reading the data; ``name`` replaces the name in the file.

    Raises:
        ConfigError: contains file, line, value and the expected value.
    """
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; mbaas init {file} writes a feed file for its data")
    top = files.read(file)
    said = top.to(FeedFile, elsewhere=GROUPED, **({"name": name} if name is not None else {}))
    data = FeedData.of(top, said)
    lying = {
        name: top.fields[name].made(partial(kind, **vars(part)))
        for name, kind in ON_IMAGES.items()
        if (part := getattr(said, name)) is not None
    }
    return FeedConfig(said.name, data, pipeline_of(top.fields["pipeline"], **lying), FeedOptions(**said.given()))


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors and other programs."""
    whole = TypeAdapter(FeedFile).json_schema()
    described = {name: {"description": text} for name, text in descriptions_of(FeedFile).items()}
    properties = {name: {**described.get(name, {}), **part} for name, part in whole["properties"].items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "properties": properties}


def pipeline_of(entry: files.Located, **lying: Any) -> Pipeline:
    """Return the pipeline described by a list in a file; ``lying`` holds boxes, key points and masks, as for
    `Pipeline`.

    Raises:
        ConfigError: an unknown transform or parameter, a wrong value or a wrong order; contains the line.
    """
    made = [_transform(item) for item in entry.items]
    return entry.made(lambda: Pipeline(made, **lying))


_CODE = {"Map": "fn", "Torchvision": "transform", "Albumentations": "transform"}
"""Transform -> parameter that a file names as "module:function"."""


def _transform(item: files.Located) -> Transform:
    name, given = _name_and_parameters(item)
    if name not in TRANSFORMS:
        raise item.error(f"unknown transform {name!r}; {instead(name, TRANSFORMS)}")
    parameters = _keywords(name, given) if given is not None else {}
    code = _CODE.get(name, "")
    if isinstance(path := parameters.get(code), str):
        place = _at(item, given, code)
        try:
            parameters[code] = import_named(path, place.file.parent, what=f"{name}'s {code}")
        except ConfigError as error:
            raise place.error(str(error)) from None
    try:
        return TRANSFORMS[name](**parameters)
    except ConfigError as error:
        raise _at(item, given, error.option).error(str(error)) from None
    except TypeError:  # a missing required parameter: unknown ones were rejected above
        parts = inspect.signature(TRANSFORMS[name]).parameters.values()
        wanted = ", ".join(part.name for part in parts if part.default is part.empty)
        raise item.error(f"{name} needs {wanted}, got {', '.join(parameters) or 'no parameter'}") from None


def _at(item: files.Located, given: files.Located | None, parameter: str) -> files.Located:
    return given.fields.get(parameter, item) if given is not None else item


def _name_and_parameters(item: files.Located) -> tuple[str, files.Located | None]:
    if isinstance(item.value, str):
        return item.value, None
    if len(item.fields) != 1:
        raise item.error(f"a transform must be a name, or 'name: parameters', got {item.said}")
    (name, parameters), *_ = item.fields.items()
    return name, parameters if parameters.value is not None else None


def _keywords(name: str, given: files.Located) -> dict[str, Any]:
    known = [*parameters_of(TRANSFORMS[name])]
    if not given.fields:
        return {known[0]: given.value}
    for key, field in given.fields.items():
        if key not in known:
            raise field.error(f"{name} has no parameter {key!r}; {instead(key, known)}")
    return {key: field.value for key, field in given.fields.items()}
