"""Images for the tests of prep: photographs, and valid and damaged files of many kinds."""

from __future__ import annotations

import io
import zlib
from struct import pack

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from support.orientation import oriented


@pytest.fixture(scope="session")
def photos():
    """Five photographs from scikit-image, resized to uint8 [400, 500, 3]."""
    from skimage import data

    sources = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket(), data.astronaut()[100:, 12:]]
    return [np.ascontiguousarray(cv2.resize(image, (500, 400), interpolation=cv2.INTER_AREA)) for image in sources]


@pytest.fixture(scope="session")
def jpegs(photos):
    """The photographs as JPEG of quality 90, 4:2:0."""
    return [simplejpeg.encode_jpeg(image, quality=90, colorsubsampling="420") for image in photos]


def encoded(image, kind, **options):
    """Image (array or Pillow) encoded by Pillow as ``kind``: "JPEG", "PNG" or "WEBP"."""
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture(scope="session")
def encode():
    return encoded


@pytest.fixture(scope="session")
def broken_png(photos):
    """A PNG with valid checksums but broken compressed pixels, refused by DALI and by the cpu engine."""
    png = encoded(photos[0], "PNG")
    start = png.index(b"IDAT")
    length = int.from_bytes(png[start - 4 : start], "big")
    body = b"IDAT" + png[start + 4 : start + 4 + length // 2] + bytes(length - length // 2)
    return png[:start] + body + zlib.crc32(body).to_bytes(4, "big") + png[start + 8 + length :]


@pytest.fixture(scope="session")
def odd_files(photos):
    """Valid files of unusual kinds: name -> (bytes, expected pixels as uint8 [h, w, 3])."""
    photo = photos[0][:120, :90]
    picture = Image.fromarray(photo)
    grey = np.asarray(picture.convert("L"))
    see_through = np.dstack([photo, np.full(grey.shape, 9, np.uint8)])
    wide = photo.astype(np.uint16) * 256 + 77
    as_grey = np.repeat(grey[:, :, None], 3, axis=2)
    cmyk = encoded(picture.convert("CMYK"), "JPEG", quality=95)
    files = {
        "png": (encoded(photo, "PNG"), photo),
        "png grey": (encoded(grey, "PNG"), as_grey),
        "png alpha": (encoded(see_through, "PNG"), photo),
        "png palette": (
            encoded(picture.convert("P"), "PNG"),
            np.asarray(picture.convert("P").convert("RGB")),
        ),
        "png 16 bit": (cv2.imencode(".png", wide[:, :, ::-1])[1].tobytes(), photo),
        "png 16 bit grey": (cv2.imencode(".png", grey.astype(np.uint16) * 256 + 77)[1].tobytes(), as_grey),
        "png 1x1": (encoded(photo[:1, :1], "PNG"), photo[:1, :1]),
        "jpeg 1x1": (encoded(photo[:1, :1], "JPEG", quality=100), photo[:1, :1]),
        "jpeg grey": (encoded(grey, "JPEG", quality=95), as_grey),
        "jpeg progressive": (encoded(photo, "JPEG", quality=95, progressive=True), photo),
        "jpeg cmyk": (cmyk, photo),
        "webp": (encoded(photo, "WEBP", quality=95), photo),
        "webp lossless": (encoded(photo, "WEBP", lossless=True), photo),
        "webp alpha": (encoded(see_through, "WEBP", quality=95, exact=True), photo),
        "webp animated": (
            encoded(picture, "WEBP", lossless=True, save_all=True, append_images=[picture.rotate(90)]),
            photo,
        ),
        "webp 1x1": (encoded(photo[:1, :1], "WEBP", lossless=True), photo[:1, :1]),
        "png animated": (encoded(picture, "PNG", save_all=True, append_images=[picture.rotate(90)]), photo),
        "png beside its animation": (
            encoded(picture, "PNG", save_all=True, default_image=True, append_images=[picture.rotate(180)]),
            photo,
        ),
        "bmp": (encoded(photo, "BMP"), photo),
        "bmp grey": (encoded(photo[..., 0], "BMP"), np.repeat(photo[..., :1], 3, axis=2)),
        "bmp 1x1": (encoded(photo[:1, :1], "BMP"), photo[:1, :1]),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = oriented(photo, orientation)
        files[f"jpeg exif {orientation}"] = (encoded(stored, "JPEG", quality=95, exif=exif), photo)
        files[f"png exif {orientation}"] = (encoded(stored, "PNG", exif=exif), photo)
        files[f"webp exif {orientation}"] = (encoded(stored, "WEBP", lossless=True, exif=exif), photo)
    return files


def damaged_files(jpeg, png, webp):
    """Files to be refused: name -> (bytes, part of the reason)."""
    bomb_jpeg = bytearray(jpeg)
    at = jpeg.index(b"\xff\xc0") + 5
    bomb_jpeg[at : at + 4] = (30000).to_bytes(2, "big") * 2
    middle = len(jpeg) // 2
    canvas = b"VP8X\n\0\0\0" + bytes(4) + (29999).to_bytes(3, "little") * 2
    return {
        "empty": (b"", "the file is empty (0 bytes)"),
        "text named .jpg": (
            b"hello, this is text\n" * 20,
            "it is not JPEG, PNG, WebP or BMP: it starts with b'hello, this ",
        ),
        "gif": (b"GIF89a" + bytes(50), "it is a GIF image, not JPEG, PNG, WebP or BMP"),
        "half a jpeg": (jpeg[:middle], f"truncated JPEG: it breaks off after {middle:,} bytes"),
        "jpeg without its end": (jpeg[:-2], "truncated JPEG: it breaks off after"),
        "header of a jpeg": (jpeg[:300], "truncated JPEG"),
        "two bytes of a jpeg": (jpeg[:2], "truncated JPEG"),
        "half a jpeg with an end marker": (
            jpeg[:middle] + b"\xff\xd9",
            "corrupt JPEG: Corrupt JPEG data: premature end",
        ),
        "half a png": (png[: len(png) // 2], "truncated PNG: it breaks off after"),
        "png without its end": (png[:-12], "truncated PNG"),
        "damaged png": (png[:5000] + b"\0\0\0" + png[5003:], "corrupt PNG: wrong checksum"),
        "half a webp": (webp[: len(webp) // 2], "truncated WebP: it breaks off after"),
        "webp without an image": (b"RIFF\4\0\0\0WEBP", "corrupt WebP: it has no image"),
        "webp with a wrong frame": (webp[:23] + bytes(3) + webp[26:], "its first chunk does not tell how large"),
        "webp with a long chunk": (
            webp[:16] + b"\xff\xff\xff\0" + webp[20:],
            "corrupt WebP: the chunk at byte 12 ends after the file",
        ),
        "damaged webp": (webp[:30] + b"\xff" * (len(webp) - 30), "corrupt WebP: its pixels cannot be decompressed"),
        "half a bmp": (encoded(np.zeros((40, 30, 3), np.uint8), "BMP")[:-100], "truncated BMP: it breaks off after"),
        "bmp bomb": (
            b"BM" + bytes(8) + pack("<IIiiHHI", 54, 40, 30_000, 30_000, 1, 8, 1) + bytes(20),
            "over the limit",
        ),
        "half a bmp of run lengths": (
            b"BM" + bytes(8) + pack("<IIiiHHIIIIII", 54, 40, 8, 8, 1, 8, 1, 99, 0, 0, 0, 0) + bytes(90),
            "truncated BMP: it breaks off after 144 bytes",
        ),
        "bmp of no kind": (b"BM" + bytes(40), "corrupt BMP: its header says that it has 0 bytes"),
        "sound": (b"RIFF\4\0\0\0WAVE", "it is a RIFF file of another kind, not JPEG, PNG, WebP or BMP"),
        "webp bomb": (
            b"RIFF" + (len(webp) + 10).to_bytes(4, "little") + b"WEBP" + canvas + webp[12:],
            "30000x30000 is 900,000,000 pixels, over the limit of 100,000,000 (max_pixels)",
        ),
        "jpeg bomb": (
            bytes(bomb_jpeg),
            "30000x30000 is 900,000,000 pixels, over the limit of 100,000,000 (max_pixels)",
        ),
        "png bomb": (
            bomb_png(),
            "30000x30000 is 900,000,000 pixels, over the limit of 100,000,000 (max_pixels)",
        ),
    }


def bomb_png():
    """A few hundred bytes that claim 30,000x30,000 pixels, with valid checksums."""

    def chunk(kind, content):
        body = kind + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = (30000).to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.fixture(scope="session")
def bad_files(photos, jpegs):
    return damaged_files(jpegs[0], encoded(photos[1], "PNG"), encoded(photos[1], "WEBP"))
