"""Declarative transforms with the names and semantics of torchvision, torchaudio and TorchIO.

A transform is a small immutable description without a generator or state. Its random parameters are a pure function of
(seed, epoch, sample id, index in the pipeline), so every engine and every retry draws the same ones. Images are
resampled bilinearly with antialiasing, torchvision's default.
"""

from mbaas.transforms.arrays import CropOrPad, RandomCrop
from mbaas.transforms.base import Transform
from mbaas.transforms.color import ColorJitter, Normalize
from mbaas.transforms.decoders import DecodeArray, DecodeAudio, DecodeImage
from mbaas.transforms.function import Map
from mbaas.transforms.geometry import (
    CenterCrop,
    RandomHorizontalFlip,
    RandomIoUCrop,
    RandomResizedCrop,
    RandomZoomOut,
    Resize,
)
from mbaas.transforms.on_image import Boxes, Keypoints, Masks
from mbaas.transforms.pipeline import Pipeline
from mbaas.transforms.sound import AmplitudeToDB, MelSpectrogram, SpecAugment

__all__ = [
    "AmplitudeToDB",
    "Boxes",
    "CenterCrop",
    "ColorJitter",
    "CropOrPad",
    "DecodeArray",
    "DecodeAudio",
    "DecodeImage",
    "Keypoints",
    "Map",
    "Masks",
    "MelSpectrogram",
    "Normalize",
    "Pipeline",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomIoUCrop",
    "RandomResizedCrop",
    "RandomZoomOut",
    "Resize",
    "SpecAugment",
    "Transform",
]
