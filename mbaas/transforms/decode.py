"""DecodeImage: encoded bytes to pixels."""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.transforms.base import Transform


@dataclass(frozen=True)
class DecodeImage(Transform):
    """Decode JPEG or PNG bytes to RGB, uint8 [height, width, 3]; the first transform of every pipeline.

    Grey images get three equal channels, CMYK and YCCK become RGB, alpha is dropped, 16 bits a channel become
    the upper 8, and a JPEG is turned as its EXIF orientation says. The result is the same for all engines
    within a few grey levels.
    """
