"""What the feeds of these tests are made of."""

from __future__ import annotations

from mbaas import transforms as T

SAMPLES = 1003
STAGING_BYTES = 8 << 20
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def augmented() -> T.Pipeline:
    """A pipeline with chance in it, and without resampling, for which each prep worker would import torch."""
    return T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.4), T.RandomHorizontalFlip()])
