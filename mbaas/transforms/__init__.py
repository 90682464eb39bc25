"""Declarative transforms with the names and semantics of torchvision, torchaudio and TorchIO.

A transform is a small immutable description without a generator or state. Its random parameters are a pure function of
(seed, epoch, sample id, index in the pipeline), so every engine and every retry draws the same ones. Images are
resampled bilinearly with antialiasing, torchvision's default.
"""

from typing import TYPE_CHECKING, Any

from mbaas.base.imports import unknown_attribute
from mbaas.transforms.arrays import CropOrPad, RandomCrop
from mbaas.transforms.auto_augment import AugMix, AutoAugment, RandAugment, TrivialAugmentWide
from mbaas.transforms.base import Transform
from mbaas.transforms.color import ColorJitter, Normalize, ToFloat
from mbaas.transforms.decoders import DecodeArray, DecodeAudio, DecodeImage
from mbaas.transforms.function import Map
from mbaas.transforms.geometry import (
    CenterCrop,
    Pad,
    RandomHorizontalFlip,
    RandomIoUCrop,
    RandomResizedCrop,
    RandomVerticalFlip,
    RandomZoomOut,
    Resize,
    ScaleJitter,
)
from mbaas.transforms.libraries import Albumentations, Torchvision
from mbaas.transforms.mixing import CutMix, MixUp, Mosaic
from mbaas.transforms.on_image import Boxes, Keypoints, Masks
from mbaas.transforms.operations import (
    GaussianBlur,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from mbaas.transforms.pipeline import Pipeline
from mbaas.transforms.sound import AmplitudeToDB, MelSpectrogram, SpecAugment
from mbaas.transforms.warps import RandomAffine, RandomPerspective, RandomRotation

__all__ = [
    "Albumentations",
    "AmplitudeToDB",
    "AugMix",
    "AutoAugment",
    "Boxes",
    "CenterCrop",
    "ColorJitter",
    "CropOrPad",
    "CutMix",
    "DecodeArray",
    "DecodeAudio",
    "DecodeImage",
    "GaussianBlur",
    "Keypoints",
    "Map",
    "Masks",
    "MelSpectrogram",
    "MixUp",
    "Mosaic",
    "Normalize",
    "Pad",
    "Pipeline",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomAutocontrast",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomIoUCrop",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "RandomZoomOut",
    "Resize",
    "ScaleJitter",
    "SpecAugment",
    "ToFloat",
    "Torchvision",
    "Transform",
    "TrivialAugmentWide",
]

_IN_TORCHVISION = {
    "Compose": "Pipeline([...])",
    "Lambda": "Map(fn)",
    "PILToTensor": "DecodeImage()",
    "ToDtype": "ToFloat()",
    "ToImage": "DecodeImage()",
    "ToTensor": "ToFloat() as the last transform",
}
"""Names of torchvision that a pipeline has under other names."""

if not TYPE_CHECKING:  # type checkers would take every name for a known one

    def __getattr__(name: str) -> Any:
        if name in _IN_TORCHVISION:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; use {_IN_TORCHVISION[name]}")
        raise unknown_attribute(__name__, name, __all__)
