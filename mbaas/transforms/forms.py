"""Computes the form of samples after each transform of a pipeline, without looking at a sample."""

from __future__ import annotations

from collections.abc import Sequence

from mbaas.errors import ConfigError
from mbaas.transforms.arrays import ArrayTransform, Form
from mbaas.transforms.base import Transform
from mbaas.transforms.decoders import Decoder
from mbaas.transforms.function import Map


def forms_of(decoder: Decoder, others: Sequence[Transform]) -> tuple[Form, ...]:
    """Return the form after the decoder and after each other transform; image forms have no sizes.

    The result of a Map is assumed to have the form of its input. Samples show the actual form later.

    Raises:
        ConfigError: a transform does not accept its input, or the length of samples is unbounded.
    """
    forms = [decoder.form]
    has_images = decoder.form.kind == "image"
    for transform in others:
        is_of_arrays = isinstance(transform, ArrayTransform)
        if is_of_arrays == has_images and not isinstance(transform, Map):
            kind = "arrays and sound" if is_of_arrays else "images"
            raise ConfigError(f"{transform!r} is a transform of {kind}, but {decoder!r} makes {decoder.form.kind}s")
        forms.append(transform.result(forms[-1]) if isinstance(transform, ArrayTransform) else forms[-1])
    if forms[-1].differs and forms[-1].longest is None:
        bound = "max_s" if decoder.form.kind == "sound" else "longest"
        raise ConfigError(
            f"samples of this pipeline may have any length: give {decoder!r} {bound}, the greatest one, or have a "
            "RandomCrop or a CropOrPad give all the same"
        )
    return tuple(forms)
