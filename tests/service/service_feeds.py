"""Sizes and the pipeline of the feeds that these tests share."""

from __future__ import annotations

from mbaas import transforms as T

SAMPLES = 1003
STAGING_BYTES = 8 << 20
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def augmented() -> T.Pipeline:
    """A random pipeline. It does not resample, because each prep worker would import torch for that."""
    return T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.4), T.RandomHorizontalFlip()])
