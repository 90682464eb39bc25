"""Decodes images to RGB pixels on the CPU: JPEG by libjpeg-turbo; PNG, WebP and BMP by OpenCV.

Only the rows of a JPEG down to the lower edge of a known crop are decoded; their pixels stay the same. The half-size
decoding of libjpeg is not used: crop edges would fall between pixels, which changes the result by some levels.
"""

from __future__ import annotations

from typing import Any, cast

import cv2
import numpy as np
import simplejpeg

from mbaas.prep.header import Header, UndecodableError
from mbaas.prep.pixels import Image, Scratch

# RGB, 8 bits, no alpha. The orientation is undone in this module, for both decoders.
_OPENCV_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_LARGEST_MCU = 16  # maximum number of rows in one coded unit of a JPEG
_UPSAMPLING_MARGIN = 4  # chroma upsampling reads some rows below the last one
_WORTH_CUTTING = 32  # rows; skipping fewer saves less than copying the file costs
_NAMES = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "bmp": "BMP"}
_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
"""EXIF orientation -> flip code of OpenCV; orientations 5 to 8 are transposed first."""

# Warnings of libjpeg about damaged entropy-coded data. It fills the rest with grey, which must not be trained on.
_DAMAGE = ("premature end", "bad huffman", "instead of rst", "inconsistent progression", "arithmetic")


def decode(data: memoryview, header: Header, scratch: Scratch, *, rows: int | None = None) -> Image:
    """Decode an image and turn it upright.

    Args:
        scratch: memory for the result, which is valid until the next call with the same scratch.
        rows: number of upper rows needed. The result may end there, with the same pixels as the whole image.

    Raises:
        UndecodableError: the file is damaged.
    """
    # The upper rows of a turned image are not the upper rows of the stored one.
    upright = header.orientation == 1
    assert header.format != "decoded", "the engine opens these"
    if header.format == "jpeg":
        image = _decode_jpeg(data, header, scratch, rows if upright else None)
    else:
        data = _still(data) if header.is_animated else data
        otherwise = f"corrupt {_NAMES[header.format]}: its pixels cannot be decompressed"
        image = _decode_by_opencv(data, header, otherwise)
    return image if upright else _turned(image, header.orientation)


def decode_whole(data: memoryview, header: Header, scratch: Scratch, into: Image) -> bool:
    """Decode the whole image into ``into``, uint8 [height, width, 3] of the upright image.

    Returns:
        True if it was decoded, and its upper rows are sure to equal the result of `decode` for these rows alone. False
        for files that are damaged, or irregular in a way that only the lower rows show.
    """
    if header.format == "jpeg" and header.orientation == 1:
        try:
            return simplejpeg.decode_jpeg(data, buffer=into).shape == into.shape
        except ValueError:
            if header.sequential:
                return False
    try:
        np.copyto(into, decode(data, header, scratch))
    except UndecodableError:
        return False
    return True


def _still(png: memoryview) -> memoryview:
    """Return an APNG without its animation: the image that Pillow and viewers without APNG support show."""
    still, at = bytearray(png[:8]), 8
    while at + 12 <= len(png):  # length, kind and checksum of a chunk, 4 bytes each
        after = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if bytes(png[at + 4 : at + 8]) not in (b"acTL", b"fcTL", b"fdAT"):
            still += png[at:after]
        at = after
    return memoryview(still)


def _decode_by_opencv(data: memoryview, header: Header, otherwise: str) -> Image:
    try:
        image = cast("Image | None", cv2.imdecode(np.frombuffer(data, np.uint8), _OPENCV_FLAGS))
    except cv2.error as error:
        raise UndecodableError(f"OpenCV refuses it: {error}") from error
    if image is None:
        raise UndecodableError(otherwise)
    _check_size(image.shape, header)
    return image


def _decode_jpeg(data: memoryview, header: Header, scratch: Scratch, rows: int | None) -> Image:
    height = header.height
    if rows is not None and header.sequential:
        # Rows are coded in strips of up to 16, so ending within a strip would save nothing.
        height = -(-(rows + _UPSAMPLING_MARGIN) // _LARGEST_MCU) * _LARGEST_MCU
    if height > header.height - _WORTH_CUTTING:
        return _decode_whole(data, header, scratch)
    return _decode_upper(data, header, scratch, height)[:rows]


def _decode_whole(data: memoryview, header: Header, scratch: Scratch) -> Image:
    try:
        # simplejpeg uses only as much of the buffer as it needs, and rejects one that is too small.
        image = simplejpeg.decode_jpeg(data, buffer=scratch.array("pixels", (header.height, header.width, 3)))
    except ValueError as error:
        complaint = str(error)
    else:
        _check_size(image.shape, header)
        return image
    if any(word in complaint.lower() for word in _DAMAGE):
        raise UndecodableError(f"corrupt JPEG: {complaint}")
    # Irregular but harmless, such as stray bytes between segments: OpenCV continues where simplejpeg gives up.
    # OpenCV allocates by the file's own size, so first check with libjpeg that this is the size checked by `peek`.
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
    except ValueError:
        raise UndecodableError(f"corrupt JPEG: {complaint}") from None
    except KeyError:  # simplejpeg has no name for this chroma subsampling
        height, width = header.height, header.width
    _check_size((height, width), header)
    return _decode_by_opencv(data, header, f"corrupt JPEG: {complaint}")


def _check_size(shape: tuple[int, ...], header: Header) -> None:
    """Raise UndecodableError unless a size matches the header, from which crop windows were chosen."""
    height, width, *_ = shape
    if (height, width) != (header.height, header.width):
        said = f"{header.width}x{header.height}"
        name = _NAMES[header.format]
        raise UndecodableError(f"corrupt {name}: its header says {said}, its decoder {width}x{height}")


def _decode_upper(data: memoryview, header: Header, scratch: Scratch, height: int) -> Image:
    # Entropy decoding is most of a JPEG's cost and must start at the top. With a smaller height in its header, libjpeg
    # stops there, and reports the rest as stray bytes before the end marker.
    copy = scratch.array("source", (len(data),))  # the cache's memory is read-only and shared
    copy[:] = data
    copy[header.height_at : header.height_at + 2] = divmod(height, 256)
    into = scratch.array("pixels", (height, header.width, 3))
    try:
        return simplejpeg.decode_jpeg(copy, buffer=into)
    except ValueError as error:
        complaint = str(error)
    if complaint.endswith("extraneous bytes before marker 0xd9"):
        return into
    # Other errors may be damage: decode the whole image, so that the outcome is the same for every crop.
    return _decode_whole(data, header, scratch)


def _turned(image: Image, orientation: int) -> Image:
    """Undo an EXIF orientation (2 to 8), in a new array."""
    turned: Any = cv2.transpose(image) if orientation >= 5 else image
    flip = _FLIPS.get(orientation)
    return turned if flip is None else cv2.flip(turned, flip)
