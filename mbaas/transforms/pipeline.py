"""A validated sequence of transforms."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mbaas.base.notebook import table
from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import BatchTransform, Field
from mbaas.transforms.arrays import ArrayTransform, Form
from mbaas.transforms.base import ImageTransform, Size, Transform
from mbaas.transforms.color import Normalize
from mbaas.transforms.decoders import DecodeImage, Decoder
from mbaas.transforms.function import Map, pickled
from mbaas.transforms.libraries import LibraryTransform
from mbaas.transforms.on_image import Boxes, Keypoints, Masks
from mbaas.transforms.sound import MelSpectrogram

_VERSION = "mbaas-pipeline-1"
"""Part of every fingerprint; increased when the same transforms produce other pixels."""


@dataclass(frozen=True, init=False, repr=False)
class Pipeline:
    """The transforms of each sample, in order, from its bytes to the values in minibatches.

    Example: ``Pipeline([DecodeImage(), RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(mean, std)])``, or for
    sound ``Pipeline([DecodeAudio(), RandomCrop(16000), MelSpectrogram(), AmplitudeToDB()])``.

    Attributes:
        transforms: all transforms in order; the index of each selects its substream of random numbers.
        boxes: boxes on the image, if any; transforms move them with the pixels.
        keypoints: keypoints on the image, if any.
        masks: masks on the image, if any.

    Raises:
        ConfigError: the first transform is not the only decoder, a transform does not accept its input, samples differ
            in length without a bound, or Normalize is not last. Boxes, keypoints and masks need images. Masks cannot be
            combined with a Map, whose function may move pixels in any way. Masks and transforms that depend on boxes
            need ``boxes``, and images of one size or with a bound on their size.
    """

    transforms: tuple[Transform, ...]
    boxes: Boxes | None
    keypoints: Keypoints | None
    masks: Masks | None

    def __init__(
        self,
        transforms: Iterable[Transform],
        *,
        boxes: Boxes | None = None,
        keypoints: Keypoints | None = None,
        masks: Masks | None = None,
    ) -> None:
        object.__setattr__(self, "transforms", _checked(transforms))
        self.forms  # noqa: B018 (for its errors)
        given = {"boxes": boxes, "keypoints": keypoints, "masks": masks}
        for name, kind in ON_IMAGES.items():
            if not isinstance(given[name], kind | None):
                wanted = f"a pipeline's {name} must be a {kind.__name__}"
                raise ConfigError(f"{wanted}, got {shown(given[name])}", option=name)
            if given[name] is not None and not self.has_images:
                raise ConfigError(f"{name} lie on images, but {self.decoder!r} makes none", option=name)
            object.__setattr__(self, name, given[name])
        if self.maps and masks is not None:
            raise ConfigError(
                f"{self.maps[0]!r} may move pixels in any way, and masks are made when all is done to an image, so a "
                f"pipeline with it cannot have {masks!r}"
            )
        leaving = next(
            (each for each in self.transforms if isinstance(each, ImageTransform) and each.leaves_fields), None
        )
        if leaving is not None and self._on_image:
            raise ConfigError(
                f"{leaving!r} {leaving.leaves_fields} in ways that {', '.join(self._on_image)} do not follow, so a "
                "pipeline cannot have both"
            )
        for each in (*(each for each in self.transforms if each.needs_boxes), *([masks] if masks is not None else [])):
            if boxes is None:
                raise ConfigError(f"{each!r} goes by boxes: say in Pipeline's boxes which field has them")
            if self.output_shape is None and self.most_pixels is None:
                raise ConfigError(
                    f"a pipeline with {each!r} must make all images equally large, by a Resize to (height, width) or "
                    "by a crop, or say how large they may be, by DecodeImage's max_pixels"
                )

    def __repr__(self) -> str:
        lying = "".join(f", {name}={each!r}" for name, each in self._on_image.items())
        return f"Pipeline([{', '.join(map(repr, self.transforms))}]{lying})"

    @property
    def _on_image(self) -> dict[str, Boxes | Keypoints | Masks]:
        """Boxes, keypoints and masks that are set, by keyword."""
        return {name: each for name in ON_IMAGES if (each := getattr(self, name)) is not None}

    @property
    def maps(self) -> tuple[Map, ...]:
        return tuple(each for each in self.transforms if isinstance(each, Map))

    @property
    def has_fields_on_image(self) -> bool:
        """True if fields move with the pixels of the image."""
        return bool(self._on_image)

    @property
    def fields_on_image(self) -> tuple[str, ...]:
        """Names of the dataset fields that move with the pixels, and of fields with one value per box."""
        boxes = () if self.boxes is None else (self.boxes.field, *self.boxes.beside)
        points = () if self.keypoints is None else (self.keypoints.field,)
        return tuple(dict.fromkeys((*boxes, *points)))

    def _repr_html_(self) -> str:
        rows = {str(number): repr(transform) for number, transform in enumerate(self.transforms)}
        rows |= {name: repr(each) for name, each in self._on_image.items()}
        makes = f"uint8 {list(self.output_shape)}" if self.output_shape else "a size that the data decides"
        if not self.has_images:
            makes = f"{self.decoder.field}: {self.forms[-1].kind}"
        elif self.most_pixels is not None:
            makes = f"images of up to {self.most_pixels:,} pixels"
        return table("Pipeline", {**rows, "makes": makes})

    def known(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Return the fields of prepared samples.

        Raises:
            ConfigError: the dataset lacks a field for boxes, keypoints, masks or a Map, or has one with the decoder's
                name for the sample.
        """
        if self.decoder.field in {field.name for field in fields}:
            made = shown(self.decoder.field)
            raise ConfigError(
                f"the dataset has a field {made} already, so {self.decoder!r} must make one of another name: field=..."
            )
        names = [field.name for field in fields]
        for function in self.maps:
            for name in function.fields:
                if name not in names:
                    has = ", ".join(names) or "none"
                    raise ConfigError(f"{function!r} takes the field {shown(name)}, but samples have {has}")
        if self.keypoints is not None:
            self.keypoints.check(fields)
        moved = fields if self.boxes is None else self.boxes.moved(fields)
        for function in self.maps:
            moved = function.made(moved)
        if self.masks is None or self.boxes is None:
            return moved
        size = None if self.output_shape is None else self.output_shape[:2]
        return self.masks.made(moved, self.boxes, size, self.most_pixels or 0)

    @property
    def decoder(self) -> Decoder:
        first = self.transforms[0]
        assert isinstance(first, Decoder), first
        return first

    @property
    def has_images(self) -> bool:
        """True if samples are decoded as images; a Map may convert them to something else."""
        return isinstance(self.decoder, DecodeImage)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """Form of samples after each of ``transforms``; raises ConfigError as the class does."""
        return _forms_of(self.decoder, self.transforms[1:])

    @property
    def normalize(self) -> Normalize | None:
        """The transform that runs in the consumer, if any."""
        last = self.transforms[-1]
        return last if isinstance(last, Normalize) else None

    @property
    def prep(self) -> tuple[Transform, ...]:
        """The transforms that run in prep workers, with the same indices as in ``transforms``."""
        return self.transforms[:-1] if self.normalize else self.transforms

    @property
    def output_shape(self) -> tuple[int, int, int] | None:
        """(height, width, 3) of every prepared image; None if it depends on the data."""
        size: Size | None = None  # the size of a decoded image depends on the image
        for transform in self.prep:
            size = size if transform.keeps_size else transform.fixed_size
        return None if size is None else (*size, 3)

    @property
    def most_pixels(self) -> int | None:
        """Maximum pixels of a prepared image if images differ in size; None if all have one size."""
        decoder = self.decoder
        return decoder.max_pixels if isinstance(decoder, DecodeImage) and self.output_shape is None else None

    @property
    def differing(self) -> int:
        """Number of leading axes whose lengths vary between prepared samples."""
        return self.forms[-1].differing if self.most_pixels is None else 2

    @property
    def longest(self) -> int:
        """Greatest length of the axis that varies, or greatest product of these lengths; 0 if none does."""
        return self.most_pixels or self.forms[-1].longest or 0

    @property
    def cpu_only(self) -> Transform | None:
        """The first transform that only the cpu engine supports, if any.

        For images this is a Map, or padding that mirrors or repeats pixels. For sound it is a Map after a
        MelSpectrogram, or a MelSpectrogram with an odd ``n_fft``, ``n_fft`` below 4, or a ``power`` other than 1 or 2.
        Sound without a MelSpectrogram has no work for DALI, so it is the decoder, as for all other arrays.
        """
        first = next((index for index, each in enumerate(self.transforms) if isinstance(each, MelSpectrogram)), 0)
        return next((each for each in self.transforms[first:] if each.dali_limit), None)

    @property
    def is_random(self) -> bool:
        """True if a sample may differ between epochs; a Map counts as random unless it is deterministic."""
        return any(map(_is_random, self.transforms))

    @cached_property
    def prefix(self) -> int:
        """Length of the deterministic prefix: leading transforms with the same result in every epoch. At least 1.

        Their output, the decoded sample, may be cached instead of the bytes. They are not random and do not depend on
        fields. Boxes and keypoints move in a way that follows from image sizes, which excludes a Map.
        """
        for index, transform in enumerate(self.transforms):
            if _is_random(transform) or transform.needs_boxes or isinstance(transform, Normalize):
                return index
            if isinstance(transform, Map) and (transform.fields or self.has_fields_on_image):
                return index
        return len(self.transforms)

    def pickled(self) -> bytes:
        """Return the pipeline as bytes, to be sent to prep workers.

        Raises:
            ConfigError: it cannot be pickled.
        """
        try:
            return pickled(self)
        except Exception as error:  # whatever an object of the pipeline raises
            raise ConfigError(
                f"a pipeline is pickled to reach prep workers, and this one cannot be: {error}"
            ) from error

    def common_prefix(self, other: Pipeline) -> int:
        """Return the number of leading transforms that both pipelines have, up to the shorter deterministic prefix."""
        both = zip(self.transforms[: self.prefix], other.transforms[: other.prefix], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].identity() == pair[1].identity(), both))

    def difference(self, other: Pipeline) -> str:
        """Return a clause on the first difference from another pipeline; "" for equal ones."""
        for own, theirs in itertools.zip_longest(self.transforms, other.transforms):
            if own is None:
                return f"without {theirs!r}"
            if theirs is None:
                return f"also {own!r}"
            if own.identity() != theirs.identity():
                return _difference(own, theirs)
        for name in ON_IMAGES:
            if getattr(self, name) != getattr(other, name):
                return f"{name} {getattr(self, name)!r} instead of {getattr(other, name)!r}"
        return ""

    def with_prefix(self, prefix: int) -> Pipeline:
        """Return this pipeline with a shorter deterministic prefix; with 0, an engine neither gets nor keeps decoded
        samples.
        """
        pipeline = copy.copy(self)
        vars(pipeline)["prefix"] = min(prefix, self.prefix)
        return pipeline

    @cached_property
    def prefix_fingerprint(self) -> str:
        """32 hex digits, like `fingerprint`, of the prefix. Pipelines with the same one may share decoded samples."""
        return self._digest_of(self.prefix)

    @cached_property
    def prefix_forms(self) -> tuple[int, ...]:
        """Numbers of the forms that samples have after 1, 2, ... `prefix` transforms: equal for equal transforms.

        They have 31 bits, and are never 0.
        """
        digests = (int(self._digest_of(applied)[:8], 16) for applied in range(1, self.prefix + 1))
        return tuple(max(1, digest & 0x7FFFFFFF) for digest in digests)

    def _digest_of(self, applied: int) -> str:
        return _digest("prefix", *(transform.identity() for transform in self.transforms[:applied]))

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits, the same in every process; equal for equal transforms (see ``Map.identity``)."""
        return _digest(*(each.identity() for each in self.transforms), *map(repr, self._on_image.values()))


ON_IMAGES: dict[str, type] = {"boxes": Boxes, "keypoints": Keypoints, "masks": Masks}
"""Keyword -> class of annotations on the image."""


def _difference(own: Transform, other: Transform) -> str:
    if repr(own) == repr(other):  # a function has the same name, and other code or other values
        return f"another {own!r}"
    if type(own) is type(other) and not isinstance(own, Map):
        for name, value in vars(own).items():
            before = getattr(other, name, None)
            if repr(value) != repr(before):
                return f"{type(own).__name__} with {name}={shown(value)} instead of {shown(before)}"
    return f"{own!r} instead of {other!r}"


def _digest(*lines: str) -> str:
    return hashlib.blake2b("\n".join([_VERSION, *lines]).encode(), digest_size=16).hexdigest()


def _is_random(transform: Transform) -> bool:
    return transform.draws > 0 or (isinstance(transform, Map) and not transform.deterministic)


def _checked(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    if isinstance(transforms, Transform):
        raise ConfigError(f"a pipeline takes a list of transforms, got {transforms!r}; write [{transforms!r}]")
    given = tuple(transforms)
    entries: tuple[object, ...] = given  # objects, or type checkers would report the check below as unnecessary
    for index, transform in enumerate(entries):
        if not isinstance(transform, Transform):
            raise ConfigError(
                f"a pipeline holds transforms, but number {index} is {transform!r}{_instead_of(transform)}"
            )
    names = [type(transform).__name__ for transform in given]
    listed = ", ".join(names) or "no transform"
    decoders = sum(isinstance(each, Decoder) for each in given)
    if not given or not isinstance(given[0], Decoder):
        raise ConfigError(f"a pipeline's first transform must be DecodeImage, DecodeAudio or DecodeArray, got {listed}")
    if decoders > 1:
        raise ConfigError(f"a pipeline needs one decoder, got {decoders}: {listed}")
    if any(isinstance(each, Normalize) for each in given[:-1]):
        raise ConfigError(f"Normalize or ToFloat must be the last transform, once, got {listed}")
    return given


def _instead_of(entry: object) -> str:
    """Return a hint how a pipeline can use something else, or "" if it cannot."""
    if isinstance(entry, BatchTransform):
        return "; pass it as batch_fn to join or get_loader, because it changes whole minibatches"
    if isinstance(entry, type):
        return f"; write {entry.__name__}()" if issubclass(entry, Transform) else ""
    if type(entry).__module__.startswith("torchvision."):
        return "; put it into Torchvision(...)"
    if type(entry).__module__.startswith("albumentations."):
        return "; put it into Albumentations(...)"
    return "; put it into Map(...)" if callable(entry) else ""


def _forms_of(decoder: Decoder, others: Sequence[Transform]) -> tuple[Form, ...]:
    """Return the form after the decoder and after each other transform; image forms have no sizes.

    The result of a Map is assumed to have the form of its input. Samples show the actual form later.

    Raises:
        ConfigError: a transform does not accept its input, or the length of samples is unbounded.
    """
    forms = [decoder.form]
    has_images = decoder.form.kind == "image"
    accepted = (ImageTransform, Normalize, Map) if has_images else (ArrayTransform, Map)
    for transform in others:
        if not isinstance(transform, accepted) or (isinstance(transform, LibraryTransform) and not has_images):
            kind = "arrays and sound" if has_images else "images"
            raise ConfigError(f"{transform!r} is a transform of {kind}, but {decoder!r} makes {decoder.form.kind}s")
        if has_images:
            transform.fixed_size  # noqa: B018 (for the error of a RandomCrop with three lengths)
        if isinstance(transform, ArrayTransform) and not has_images:
            forms.append(transform.result(forms[-1]))
        else:
            forms.append(forms[-1])
    if forms[-1].differing and forms[-1].longest is None:
        bound = "max_s" if decoder.form.kind == "sound" else "longest"
        raise ConfigError(
            f"samples of this pipeline may have any length: give {decoder!r} {bound}, the greatest one, or have a "
            "RandomCrop or a CropOrPad give all the same"
        )
    return tuple(forms)
