"""Decoding images to RGB pixels on the CPU: libjpeg-turbo for JPEG, OpenCV for PNG, WebP and BMP.

Of a JPEG whose crop is known, only the rows down to the crop's end are decoded; the pixels stay the same.
Decoding at half size, which libjpeg also offers, is left out: a crop's edges then fall between pixels, and
the result is off by some levels.
"""

from __future__ import annotations

from typing import Any, cast

import cv2
import numpy as np
import simplejpeg

from mbaas.prep.header import Header, UndecodableError
from mbaas.prep.pixels import Image, Scratch

# In RGB, 8 bits and without alpha; the orientation is undone here, for both decoders alike.
_OPENCV_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_LARGEST_MCU = 16  # rows that a JPEG encodes together, at most
_UPSAMPLING_MARGIN = 4  # rows below the last one that its colours are interpolated from, and some to spare
_WORTH_CUTTING = 32  # rows: to leave out fewer saves less than the copy of the file costs
_NAMES = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "bmp": "BMP"}
_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
"""EXIF orientation to OpenCV's flip code, after a transposition for 5 to 8."""

# What libjpeg says of entropy-coded data that it cannot follow; it goes on with grey, which must not be trained on.
_DAMAGE = ("premature end", "bad huffman", "instead of rst", "inconsistent progression", "arithmetic")


def decode(data: memoryview, header: Header, scratch: Scratch, *, rows: int | None = None) -> Image:
    """Decode an image and turn it upright.

    Args:
        data: all bytes of a file that ``peek`` accepted.
        header: what ``peek`` said of it.
        scratch: the result may lie there, and is valid until the next call with it.
        rows: the caller reads only this many upper rows: the result may end there. What it has is equal to
            the upper part of the whole image.

    Raises:
        UndecodableError: the file is damaged.
    """
    # Where the image is turned, its upper rows are not the upper rows of what is stored.
    upright = header.orientation == 1
    assert header.format != "decoded", "the engine opens these"
    if header.format == "jpeg":
        image = _decode_jpeg(data, header, scratch, rows if upright else None)
    else:
        data = _still(data) if header.is_animated else data
        otherwise = f"corrupt {_NAMES[header.format]}: its pixels cannot be decompressed"
        image = _as_said(_decode_by_opencv(data, otherwise), header)
    return image if upright else _turned(image, header.orientation)


def decode_whole(data: memoryview, header: Header, scratch: Scratch, into: Image) -> bool:
    """Decode the whole image into ``into``, uint8 [height, width, 3] of the upright image.

    Returns:
        Whether it was done, and its upper rows are sure to be what `decode` makes of them alone. Of a file that is
        damaged, or odd in a way that only the lower rows show, they are not.
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
    """Return a PNG without its animation: its image is what every viewer shows that knows of none, and Pillow reads."""
    still, at = bytearray(png[:8]), 8
    while at + 12 <= len(png):  # length, kind and checksum of a chunk, 4 bytes each
        after = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if bytes(png[at + 4 : at + 8]) not in (b"acTL", b"fcTL", b"fdAT"):
            still += png[at:after]
        at = after
    return memoryview(still)


def _decode_by_opencv(data: memoryview, otherwise: str) -> Image:
    """Decode by OpenCV; ``otherwise`` is the reason to give if it only says that it cannot."""
    try:
        image = cast("Image | None", cv2.imdecode(np.frombuffer(data, np.uint8), _OPENCV_FLAGS))
    except cv2.error as error:
        raise UndecodableError(f"OpenCV refuses it: {error}") from error
    if image is None:
        raise UndecodableError(otherwise)
    return image


def _decode_jpeg(data: memoryview, header: Header, scratch: Scratch, rows: int | None) -> Image:
    height = header.height
    if rows is not None and header.sequential:
        # Rows are encoded in strips of up to 16, so to end within one would save nothing.
        height = -(-(rows + _UPSAMPLING_MARGIN) // _LARGEST_MCU) * _LARGEST_MCU
    if height > header.height - _WORTH_CUTTING:
        return _decode_whole(data, header, scratch)
    return _decode_upper(data, header, scratch, height)[:rows]


def _decode_whole(data: memoryview, header: Header, scratch: Scratch) -> Image:
    try:
        # Of which it uses no more than it needs, and which it refuses if it is too small.
        image = simplejpeg.decode_jpeg(data, buffer=scratch.array("pixels", (header.height, header.width, 3)))
    except ValueError as error:
        complaint = str(error)
    else:
        return _as_said(image, header)
    if any(word in complaint.lower() for word in _DAMAGE):
        raise UndecodableError(f"corrupt JPEG: {complaint}")
    # Odd but harmless, such as stray bytes between segments: OpenCV goes on where simplejpeg gives up.
    # It allocates what it finds in the file, so first libjpeg is asked whether that is what was checked.
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
    except ValueError:
        raise UndecodableError(f"corrupt JPEG: {complaint}") from None
    except KeyError:  # simplejpeg's, of colours that are sampled in a way that it has no name for
        height, width = header.height, header.width
    _check_size(height, width, header)
    return _as_said(_decode_by_opencv(data, f"corrupt JPEG: {complaint}"), header)


def _as_said(image: Image, header: Header) -> Image:
    """Return the image if it is as large as its header: windows were chosen by that."""
    _check_size(image.shape[0], image.shape[1], header)
    return image


def _check_size(height: int, width: int, header: Header) -> None:
    if (height, width) != (header.height, header.width):
        said = f"{header.width}x{header.height}"
        name = _NAMES[header.format]
        raise UndecodableError(f"corrupt {name}: its header says {said}, its decoder {width}x{height}")


def _decode_upper(data: memoryview, header: Header, scratch: Scratch, height: int) -> Image:
    """Decode the upper ``height`` rows, by a header that says that there are no more.

    Most of a JPEG's cost is its entropy coding, which has to be read from the top: libjpeg stops where the
    header says that the image ends, and reports what follows as stray bytes before the end marker.
    """
    copy = scratch.array("source", (len(data),))  # what the cache handed out is read-only, and others read it, too
    copy[:] = data
    copy[header.height_at : header.height_at + 2] = divmod(height, 256)
    into = scratch.array("pixels", (height, header.width, 3))
    try:
        return simplejpeg.decode_jpeg(copy, buffer=into)
    except ValueError as error:
        complaint = str(error)
    if complaint.endswith("extraneous bytes before marker 0xd9"):
        return into
    # Anything else may be damage: the whole image decides, as it would for any other crop of it.
    return _decode_whole(data, header, scratch)


def _turned(image: Image, orientation: int) -> Image:
    """Undo EXIF's orientation (2 to 8): a new array."""
    turned: Any = cv2.transpose(image) if orientation >= 5 else image
    flip = _FLIPS.get(orientation)
    return turned if flip is None else cv2.flip(turned, flip)
