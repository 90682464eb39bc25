"""Records torchvision's results for test_operations.py: ``python tests/prep/record_torchvision.py``.

torchvision_results.npz was made with torchvision 0.28.0 on torch 2.13.0. The tests need no torchvision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F
from torchvision_cases import (
    AFFINES,
    BLURS,
    BOXES,
    CORNERS,
    EXPANDED,
    HEIGHT,
    LEVELS,
    MIXED_LABELS,
    MIXTURES,
    MOVES,
    WIDTH,
    minibatch,
    photograph,
)

MODES = {True: InterpolationMode.NEAREST, False: InterpolationMode.BILINEAR}
FACTORS = {
    "Brightness": F.adjust_brightness,
    "Contrast": F.adjust_contrast,
    "Color": F.adjust_saturation,
    "Sharpness": F.adjust_sharpness,
    "Posterize": F.posterize,
    "Solarize": F.solarize,
}
OTHERS = {
    "AutoContrast": F.autocontrast,
    "Equalize": F.equalize,
    "Invert": F.invert,
    "Grayscale": lambda image: F.rgb_to_grayscale(image, 3),
}


def moved(image, name, value, nearest, fill):
    fill = None if fill is None else list(fill)
    degrees = float(np.degrees(np.arctan(value)))
    match name:
        case "ShearX":
            return F.affine(image, 0.0, [0, 0], 1.0, [degrees, 0.0], MODES[nearest], fill, [0, 0])
        case "ShearY":
            return F.affine(image, 0.0, [0, 0], 1.0, [0.0, degrees], MODES[nearest], fill, [0, 0])
        case "TranslateX":
            return F.affine(image, 0.0, [int(value), 0], 1.0, [0.0, 0.0], MODES[nearest], fill)
        case "TranslateY":
            return F.affine(image, 0.0, [0, int(value)], 1.0, [0.0, 0.0], MODES[nearest], fill)
    return F.rotate(image, value, MODES[nearest], fill=fill)


def mixed(kind: str, weight: float, x: int, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels, for a given draw."""
    mixing = getattr(v2, kind)(num_classes=5)
    mixing._dist = SimpleNamespace(sample=lambda _: torch.tensor(weight, dtype=torch.float64))
    with mock.patch("torch.randint", side_effect=[torch.tensor([x]), torch.tensor([y])]):
        images, labels = mixing(torch.from_numpy(minibatch().transpose(0, 3, 1, 2).copy()), torch.tensor(MIXED_LABELS))
    return images.permute(0, 2, 3, 1), labels


def main() -> None:
    image = torch.from_numpy(photograph().transpose(2, 0, 1).copy())
    boxes = tv_tensors.BoundingBoxes(BOXES, format="XYXY", canvas_size=(HEIGHT, WIDTH), dtype=torch.float64)
    found: dict[str, torch.Tensor] = {}
    for case, (name, value) in LEVELS.items():
        found[case] = OTHERS[name](image) if name in OTHERS else FACTORS[name](image, value)
    for case, (kernel, sigma) in BLURS.items():
        found[case] = F.gaussian_blur(image, list(kernel), [sigma, sigma])
    for case, given in MOVES.items():
        found[case] = moved(image, *given)
    for case, given in AFFINES.items():
        others = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        found[case] = F.affine(image, interpolation=MODES[True], fill=[0.0] * 3, **others)
        found[f"{case}, boxes"] = F.affine(boxes, **others)
    for angle in EXPANDED:
        found[f"expanded {angle:g}"] = F.rotate(image, angle, MODES[True], expand=True, fill=[0.0] * 3)
        found[f"expanded {angle:g}, boxes"] = F.rotate(boxes, angle, expand=True)
    start = [[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]]
    end = [list(corner) for corner in CORNERS]
    found["perspective"] = F.perspective(image, start, end, MODES[False], [0.0] * 3)
    found["perspective, boxes"] = F.perspective(boxes, start, end)
    for case, draw in MIXTURES.items():
        found[case], found[f"{case}, labels"] = mixed(case.split()[0], *draw)
    results = {case: (each.permute(1, 2, 0) if each.ndim == 3 else each).numpy() for case, each in found.items()}
    np.savez_compressed(Path(__file__).with_name("torchvision_results.npz"), **results)
    print(f"{len(results)} results of torchvision")


if __name__ == "__main__":
    sys.exit(main())
