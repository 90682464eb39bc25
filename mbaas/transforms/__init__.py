"""What is done to each sample: declarative transforms with torchvision's names and meanings.

A transform is a small frozen description. It holds no generator and no state: its random parameters are a
pure function of (seed, epoch, sample id, its index in the pipeline), so every engine and every retry draws
the same. Resampling is bilinear with antialiasing, torchvision's default.
"""

from mbaas.transforms.arrays import CropOrPad, RandomCrop
from mbaas.transforms.base import Transform
from mbaas.transforms.boxes import Boxes
from mbaas.transforms.color import ColorJitter
from mbaas.transforms.decoders import DecodeArray, DecodeAudio, DecodeImage
from mbaas.transforms.detection import RandomIoUCrop, RandomZoomOut
from mbaas.transforms.function import Map
from mbaas.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from mbaas.transforms.normalize import Normalize
from mbaas.transforms.on_image import Keypoints, Masks
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
