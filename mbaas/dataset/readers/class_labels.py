"""Class names that Hugging Face datasets store in a table's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from mbaas.fields import LABEL


def class_names_in(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Read class names from the metadata of a schema: column -> names in label order."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: tuple(map(str, found["names"])) for name, found in features.items() if "names" in found}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):  # other programs may use another form
        return {}


def with_classes(
    class_names: tuple[str, ...], known: dict[str, pa.Array]
) -> tuple[tuple[str, ...], dict[str, pa.Array]]:
    """Return class names and fields: with the given names if all labels are valid indices into them."""
    labels = known[LABEL.name]
    if not class_names or not pa.types.is_integer(labels.type):
        return (), known
    least, most = pc.min_max(labels).values()
    if least.as_py() < 0 or most.as_py() >= len(class_names):  # -1 means an unknown label in a test set
        return (), known
    return class_names, known | {LABEL.name: labels.cast(pa.int64())}
