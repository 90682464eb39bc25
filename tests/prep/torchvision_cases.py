"""Cases that mbaas and torchvision both compute: `record_torchvision.py` records torchvision's results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skimage import data

HEIGHT, WIDTH = 24, 29
FILLS: tuple[tuple[float, float, float] | None, ...] = (None, (0.0, 0.0, 0.0), (10.0, 200.0, 77.0))


def photograph() -> NDArray[np.uint8]:
    """Return a part of a photograph, uint8 [24, 29, 3]."""
    return np.ascontiguousarray(data.astronaut()[80 : 80 + HEIGHT, 200 : 200 + WIDTH])


LEVELS: dict[str, tuple[str, float]] = {
    f"{name} {value:g}": (name, value)
    for name, values in {
        "Brightness": (0.1, 1.3, 1.9),
        "Contrast": (0.1, 1.3, 1.9),
        "Color": (0.1, 1.3, 1.9),
        "Sharpness": (0.1, 0.91, 1.9),
        "Posterize": (0, 3, 8),
        "Solarize": (0, 100, 178.5, 255),
        "AutoContrast": (0,),
        "Equalize": (0,),
        "Invert": (0,),
        "Grayscale": (0,),
    }.items()
    for value in values
}
"""Case -> an operation that changes levels, and its value."""

BLURS = {
    f"blur {width}x{height} {sigma:g}": ((width, height), sigma) for width, height, sigma in ((3, 3, 0.1), (5, 9, 2.0))
}
"""Case -> kernel (width, height) and sigma."""

MOVES = {
    f"{name} {value:g}, {'nearest' if nearest else 'bilinear'}, {fill}": (name, value, nearest, fill)
    for (name, value), nearest, fill in itertools.product(
        (
            ("ShearX", 0.11),
            ("ShearY", -0.3),
            ("TranslateX", 7.0),
            ("TranslateY", -5.0),
            ("Rotate", 30.0),
            ("Rotate", -77.0),
        ),
        (True, False),
        FILLS,
    )
}
"""Case -> an operation that moves pixels, its value, whether it takes the nearest pixel, and the colour outside."""

AFFINES: dict[str, dict[str, Any]] = {
    "affine": {"angle": 12.0, "translate": (5, -4), "scale": 1.3, "shear": (3.0, -8.0), "center": None},
    "affine about a corner": {"angle": -50.0, "translate": (0, 0), "scale": 0.6, "shear": (0.0, 0.0), "center": (3, 4)},
}

EXPANDED = (33.0, -100.0)
"""Angles of rotations whose results are larger."""

CORNERS = ((3, 4), (WIDTH - 9, 2), (WIDTH - 4, HEIGHT - 6), (1, HEIGHT - 2))
"""Positions of the image's corners after a perspective, clockwise from the upper left."""

BOXES = ((2.0, 3.0, 20.0, 17.0), (21.0, 0.0, 29.0, 11.5))
"""Left, top, right, bottom."""

MIXTURES = {"MixUp 0.3": (0.3, 0, 0), "CutMix 0.7": (0.7, 21, 9), "CutMix 0.2, at the edge": (0.2, 2, HEIGHT - 1)}
"""Case -> the weight that is drawn, and the middle of the window, x and y."""

MIXED_LABELS = (2, 0, 4)


def minibatch() -> NDArray[np.float32]:
    """Return three images, float32[3, height, width, 3]."""
    image = photograph().astype(np.float32) / np.float32(255)
    return np.stack([image, image[::-1], 1 - image])
