"""Reads the headers of encoded images: format, size, orientation, and whether the file is complete."""

from __future__ import annotations

import re
import zlib
from itertools import takewhile
from struct import Struct, calcsize, unpack_from
from typing import Literal, NamedTuple

from mbaas.transforms.arrays import UnfitError

_PNG = b"\x89PNG\r\n\x1a\n"

# Markers of a JPEG (ITU-T T.81, table B.1)
_START, _END, _SCAN, _RESTART, _APP1 = 0xD8, 0xD9, 0xDA, 0xDD, 0xE1
# Matches a marker with a length. Skipped, as by decoders, are padding, stray bytes, escaped 0xFF bytes of the pixels,
# and markers without a length. A regular expression, because a Python loop over a gigabyte of padding would take
# minutes.
_SEGMENT = re.compile(rb"\xff[^\xff\x00\x01\xd0-\xd8]", re.DOTALL)
_SEGMENT_HEAD = Struct(">BBH")  # 0xFF, marker, length
_NO_SEGMENT = frozenset([0xFF, 0x00, 0x01, *range(0xD0, 0xD9)])  # second bytes that do not begin a segment
_SCAN_OR_END = re.compile(rb"\xff[\xda\xd9]")
_MOST_SEGMENTS = 65_536  # before the first scan; cameras and editors write some dozens, an ICC profile at most 255
_MOST_PASSES = 32
"""Limit of scans times pixels, in passes over the largest image. Each scan of a progressive JPEG covers the whole
image; encoders write about ten. Without a limit, libjpeg could run for hours.
"""

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC are within this range
_SEQUENTIAL = (0xC0, 0xC1)  # baseline and extended; the others are progressive, lossless or hierarchical

_FRAME = Struct(">BHHB")  # bits, height, width, channels
_CHUNK = Struct(">I4s")  # length and type of a PNG chunk
_ORIENTATION = 0x0112  # EXIF tag
# Numeric types of TIFF (TIFF 6.0, page 15), with rationals as two numbers. Like Pillow, accept any but BYTE for an
# orientation.
_TIFF_NUMBERS = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}

_RIFF_CHUNK = Struct("<4sI")  # type and length of a WebP chunk
_BMP_HEADS = (40, 52, 56, 64, 108, 124)  # header sizes written by Windows since version 3

_VP8_KEY_FRAME = b"\x9d\x01\x2a"

_OTHERS = (
    (b"GIF8", "a GIF image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"RIFF", "a RIFF file of another kind"),
    (b"<", "HTML or XML"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
)


class UndecodableError(UnfitError):
    """The bytes cannot be decoded; the message is the reason, as one clause. Private to prep."""


class Header(NamedTuple):
    """The header of an image, as needed by prep.

    Attributes:
        format: the file format; "decoded" for a container (`mbaas.prep.decoded`), with the size of the upright
            original.
        height, width: stored size in pixels, before the EXIF orientation is applied.
        channels: stored channels: 1 grey, 3 colour; for a JPEG, 4 is CMYK or YCCK. 3 for PNG palettes, and for WebP,
            whose alpha is dropped.
        orientation: EXIF orientation, 1 to 8; 1 is upright.
        height_at: offset of a JPEG's 16-bit height in the file.
        sequential: True for a JPEG with one scan in row order and no restarts: its upper rows can be decoded alone.
        scans: number of passes of a JPEG decoder over the whole image.
        is_animated: True for a PNG with an animation; the still image may not be one of its frames.
        as_stored: True if the EXIF orientation is to be ignored; ``orientation`` is then 1.
    """

    format: Literal["jpeg", "png", "webp", "bmp", "decoded"]
    height: int
    width: int
    channels: int
    bits: int
    orientation: int = 1
    height_at: int = 0
    sequential: bool = False
    scans: int = 1
    as_stored: bool = False
    is_animated: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels of the upright image."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def peek(data: memoryview, max_pixels: int) -> Header:
    """Read the header of a JPEG, PNG, WebP or BMP. Check that the file is complete and has at most ``max_pixels``.

    Raises:
        UndecodableError: the file has another format, is truncated, damaged (PNG: checksums) or too large.
    """
    start = bytes(data[:12])
    if start[:2] == b"\xff\xd8":
        header = _peek_jpeg(data)
    elif start[:8] == _PNG:
        header = _peek_png(data)
    elif start[:4] == b"RIFF" and start[8:] == b"WEBP":
        header = _peek_webp(data)
    elif start[:2] == b"BM":
        header = _peek_bmp(data)
    else:
        raise UndecodableError(_unknown(data))
    # Check before memory is allocated: a header of twenty bytes can claim gigabytes.
    check_pixels(header.height, header.width, max_pixels, header.scans)
    return header


def check_pixels(height: int, width: int, max_pixels: int, scans: int = 1) -> None:
    """Raise UndecodableError if the size claimed by a header is 0 or too large."""
    pixels = height * width
    if pixels > max_pixels:
        raise UndecodableError(f"{width}x{height} is {pixels:,} pixels, over the limit of {max_pixels:,} (max_pixels)")
    if pixels * scans > _MOST_PASSES * max_pixels:
        passes = f"its {scans:,} scans of {pixels:,} pixels each"
        raise UndecodableError(f"{passes} are more than {_MOST_PASSES} of {max_pixels:,} (max_pixels)")
    if pixels == 0:
        raise UndecodableError(f"its header says {width}x{height} pixels")


def _unknown(data: memoryview) -> str:
    if not len(data):
        return "the file is empty (0 bytes)"
    start = bytes(data[:12])
    for signature, name in _OTHERS:
        if start.startswith(signature):
            return f"it is {name}, not JPEG, PNG, WebP or BMP"
    return f"it is not JPEG, PNG, WebP or BMP: it starts with {start!r}"


def _truncated(data: memoryview, what: str) -> UndecodableError:
    return UndecodableError(f"truncated {what}: it breaks off after {len(data):,} bytes")


def _peek_jpeg(data: memoryview) -> Header:
    """Walk the segments up to the first scan (ITU-T T.81, annex B)."""
    at, end, orientation, restarts = 2, len(data), 1, False
    frame: tuple[int, int, tuple[int, int, int, int]] | None = None
    for _ in range(_MOST_SEGMENTS):
        if at + 4 > end:
            break
        begin, marker, length = _SEGMENT_HEAD.unpack_from(data, at)
        if begin != 0xFF or marker in _NO_SEGMENT:  # rare: most files have no bytes between segments
            found = _SEGMENT.search(data, at)
            if found is None or found.start() + 4 > end:
                break
            at = found.start()
            _, marker, length = _SEGMENT_HEAD.unpack_from(data, at)
        if marker == _END:
            break
        if marker == _SCAN:
            return _jpeg_header(data, at, frame, orientation, restarts)
        if at + 2 + length > end:
            break
        if marker in _FRAMES and length >= 8:  # a shorter segment is not a valid frame header
            if frame is not None:  # a decoder may allocate for either one
                raise UndecodableError("corrupt JPEG: two headers give the number of its pixels")
            frame = (marker, at + 5, _FRAME.unpack_from(data, at + 4))
        elif marker == _RESTART:
            restarts = True
        elif marker == _APP1 and orientation == 1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            orientation = _orientation(data[at + 10 : at + 2 + length])
        at += 2 + length
    else:
        raise UndecodableError(f"corrupt JPEG: more than {_MOST_SEGMENTS:,} segments come before its pixels")
    # The file, or the image, ended before the first scan.
    raise _truncated(data, "JPEG")


def _jpeg_header(
    data: memoryview,
    scan_at: int,
    frame: tuple[int, int, tuple[int, int, int, int]] | None,
    orientation: int,
    restarts: bool,
) -> Header:
    if frame is None:
        raise UndecodableError("corrupt JPEG: pixels start before a header that gives their number")
    # Entropy-coded data contains no end marker, so one after the scan's start means that the scan is complete. The end
    # marker of a thumbnail is before the scan. Nearly every file ends with the marker, which avoids the search.
    if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[scan_at:]).rfind(b"\xff\xd9") < 0:
        raise _truncated(data, "JPEG")
    marker, height_at, (bits, height, width, channels) = frame
    # A single scan of all channels stores the rows in order; with several scans, each covers the whole image.
    one_scan = bytes(data[scan_at + 4 : scan_at + 5]) == bytes((channels,))
    plain = marker in _SEQUENTIAL and bits == 8 and channels in (1, 3)
    sequential = plain and one_scan and not restarts
    scans = 1 if marker in _SEQUENTIAL and one_scan else _count_scans(data, scan_at)
    return Header("jpeg", height, width, channels, bits, orientation, height_at, sequential, scans)


def _count_scans(data: memoryview, at: int) -> int:
    """Count the scans up to the image's end; their marker cannot occur within pixels."""
    found = (match[0][1] for match in _SCAN_OR_END.finditer(data, at))
    return sum(1 for _ in takewhile(lambda marker: marker == _SCAN, found))


def _orientation(tiff: memoryview) -> int:
    """Read the EXIF orientation from a TIFF structure; 1 if it is missing or invalid."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None or len(tiff) < 10:
        return 1
    (first,) = unpack_from(f"{order}I", tiff, 4)
    if first + 2 > len(tiff):
        return 1
    (entries,) = unpack_from(f"{order}H", tiff, first)
    # Entries have 12 bytes each. The count may be wrong, so stop at the end of the data.
    for at in range(first + 2, min(first + 2 + 12 * entries, len(tiff) - 11), 12):
        tag, kind, count = unpack_from(f"{order}HHI", tiff, at)
        if tag == _ORIENTATION:
            value = _first_number(tiff, order, at + 8, kind, count)
            return int(value) if value in range(1, 9) else 1
    return 1


def _first_number(tiff: memoryview, order: str, at: int, kind: int, count: int) -> float:
    """Return the first number of a TIFF entry whose value or offset is at ``at``; 0 if it is not a number."""
    kinds = _TIFF_NUMBERS.get(kind)
    if kinds is None or count < 1:
        return 0
    if calcsize(f"{order}{kinds}") * count > 4:  # longer values are stored at an offset
        (at,) = unpack_from(f"{order}I", tiff, at)
    if at + calcsize(f"{order}{kinds}") > len(tiff):
        return 0
    value, *divisor = unpack_from(f"{order}{kinds}", tiff, at)
    return float(value / divisor[0] if divisor and divisor[0] else value)


def _peek_png(data: memoryview) -> Header:
    """Walk all chunks (PNG specification, section 5) and check their checksums."""
    at, end = len(_PNG), len(data)
    header: Header | None = None
    while at + 12 <= end:  # length, type and checksum of a chunk, 4 bytes each
        length, kind = _CHUNK.unpack_from(data, at)
        after = at + 12 + length
        if after > end:
            break
        if zlib.crc32(data[at + 4 : after - 4]) != int.from_bytes(data[after - 4 : after], "big"):
            raise UndecodableError(f"corrupt PNG: wrong checksum of the chunk at byte {at:,}")
        if header is None:
            header = _png_header(data, length, kind)
        elif kind == b"acTL":
            header = header._replace(is_animated=True)
        elif kind == b"eXIf":  # without the "Exif\0\0" prefix of a JPEG
            header = header._replace(orientation=_orientation(data[at + 8 : after - 4]))
        if kind == b"IEND":
            return header
        at = after
    raise _truncated(data, "PNG")


def _png_header(data: memoryview, length: int, kind: bytes) -> Header:
    if kind != b"IHDR" or length != 13:
        raise UndecodableError("corrupt PNG: it does not start with its header")
    width, height, bits, color = unpack_from(">IIBB", data, 16)
    # Channels by colour type: grey, RGB, palette, grey with alpha, RGB with alpha (PNG specification, 11.2.2).
    return Header("png", height, width, {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}.get(color, 0), bits)


def _peek_webp(data: memoryview) -> Header:
    """Walk all chunks (RFC 9649, section 2). The image of an animation is its first frame, as in other libraries."""
    size: tuple[int, int] | None = None
    at, end, orientation, pixels = 12, 8 + int.from_bytes(data[4:8], "little"), 1, False
    if end > len(data):
        raise _truncated(data, "WebP")
    while at + 8 <= end:
        kind, length = _RIFF_CHUNK.unpack_from(data, at)
        content = data[at + 8 : at + 8 + length]
        if at + 8 + length > end:
            raise UndecodableError(f"corrupt WebP: the chunk at byte {at:,} ends after the file")
        if kind in (b"VP8 ", b"VP8L", b"VP8X") and size is None:
            size = _webp_size(kind, content)
        elif kind == b"EXIF":
            orientation = _orientation(content[6:] if bytes(content[:6]) == b"Exif\0\0" else content)
        pixels |= kind in (b"VP8 ", b"VP8L", b"ANMF")
        at += 8 + length + length % 2  # chunks begin at even bytes
    if size is None or not pixels:
        raise UndecodableError("corrupt WebP: it has no image")
    return Header("webp", *size, 3, 8, orientation)


def _webp_size(kind: bytes, content: memoryview) -> tuple[int, int]:
    if kind == b"VP8X" and len(content) >= 10:  # the canvas
        return 1 + int.from_bytes(content[7:10], "little"), 1 + int.from_bytes(content[4:7], "little")
    if kind == b"VP8 " and len(content) >= 10 and bytes(content[3:6]) == _VP8_KEY_FRAME:  # RFC 6386, section 9.1
        width, height = unpack_from("<HH", content, 6)
        return height & 0x3FFF, width & 0x3FFF  # the upper 2 bits are a scale for display
    if kind == b"VP8L" and len(content) >= 5 and content[0] == 0x2F:
        (bits,) = unpack_from("<I", content, 1)
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    raise UndecodableError("corrupt WebP: its first chunk does not tell how large the image is")


def _peek_bmp(data: memoryview) -> Header:
    """Read the two headers of a BMP; rows of pixels are padded to a multiple of 4 bytes."""
    if len(data) < 30:
        raise _truncated(data, "BMP")
    begin, size = unpack_from("<II", data, 10)
    if size == 12:  # OS/2 1.x
        width, height, _, bits = unpack_from("<HHHH", data, 18)
        compression = packed = 0
    elif size in _BMP_HEADS and len(data) >= 38:
        width, height, _, bits, compression, packed = unpack_from("<iiHHII", data, 18)
    else:
        raise UndecodableError(f"corrupt BMP: its header says that it has {size:,} bytes")
    width, height = max(width, 0), abs(height)  # a negative height means top-down row order
    nbytes = (width * bits + 31) // 32 * 4 * height if compression in (0, 3) else packed  # 1 and 2: run lengths
    if begin + nbytes > len(data):
        raise _truncated(data, "BMP")
    return Header("bmp", height, width, 3, 8)
