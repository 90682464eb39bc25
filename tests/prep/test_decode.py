"""On the CPU, unusual files decode, damaged files are refused, and upper rows can be decoded alone."""

from __future__ import annotations

import io
import tracemalloc
from struct import pack

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from mbaas.prep.decode import decode
from mbaas.prep.header import UndecodableError, peek
from mbaas.prep.pixels import Scratch

LIMIT = 100_000_000
KINDS = [
    "png",
    "png grey",
    "png alpha",
    "png palette",
    "png 16 bit",
    "png 16 bit grey",
    "png 1x1",
    "jpeg 1x1",
]
KINDS += ["jpeg grey", "jpeg progressive", "jpeg cmyk", *(f"jpeg exif {n}" for n in range(1, 9))]
KINDS += ["bmp", "bmp grey", "bmp 1x1"]
KINDS += [
    "png animated",
    "png beside its animation",
    "webp",
    "webp lossless",
    "webp alpha",
    "webp animated",
    "webp 1x1",
    *(f"{kind} exif {n}" for kind in ("png", "webp") for n in range(1, 9)),
]
DAMAGES = ["empty", "text named .jpg", "gif", "half a jpeg", "jpeg without its end", "header of a jpeg"]
DAMAGES += ["two bytes of a jpeg", "half a jpeg with an end marker", "half a png", "png without its end"]
DAMAGES += ["damaged png", "jpeg bomb", "png bomb", "webp bomb", "half a webp", "webp without an image", "damaged webp"]
DAMAGES += [
    "webp with a wrong frame",
    "webp with a long chunk",
    "sound",
    "half a bmp",
    "half a bmp of run lengths",
    "bmp bomb",
    "bmp of no kind",
]


def whole(raw, rows=None):
    data = memoryview(raw)
    return decode(data, peek(data, LIMIT), Scratch(), rows=rows)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_files_decode_to_what_they_show(odd_files, kind):
    """PNG and lossless WebP are exact. The others, of quality 95, are within 4 levels on average.

    A wrong orientation would cause a far larger error.
    """
    raw, shown = odd_files[kind]
    image = whole(raw)
    assert image.shape == shown.shape
    error = np.abs(image.astype(int) - shown)
    is_lossy = kind.startswith("jpeg") or kind in ("webp", "webp alpha")
    assert error.mean() < 4 if is_lossy else error.max() == 0


def test_the_header_tells_the_upright_size(odd_files):
    sizes = {kind: peek(memoryview(raw), LIMIT).size for kind, (raw, _) in odd_files.items()}
    assert sizes == {kind: shown.shape[:2] for kind, (_, shown) in odd_files.items()}


EXIF_TYPES = {1: "B", 3: "H", 4: "I", 5: "II", 6: "b", 7: "B", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I"}


@pytest.mark.parametrize("order", ["<", ">"], ids=["little endian", "big endian"])
@pytest.mark.parametrize("kind", EXIF_TYPES)
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:Metadata Warning, tag 274 had too many entries")
def test_an_orientation_of_any_type_is_read_as_pillow_reads_it(order, kind, count):
    """A quarter turn (6) as a TIFF entry of each type; rationals are 6/1."""
    code = order + EXIF_TYPES[kind]
    value = b"".join(pack(code, *(6, 1)[: len(EXIF_TYPES[kind])]) for _ in range(count))
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + pack(f"{order}IHHHI", 8, 1, 0x0112, kind, count)
    in_place = value if len(value) <= 4 else pack(f"{order}I", len(head) + 8)
    exif = b"Exif\0\0" + head + in_place.ljust(8, b"\0") + (value if len(value) > 4 else b"")
    out = io.BytesIO()
    Image.new("RGB", (40, 30)).save(out, "JPEG", exif=exif)
    width, height = ImageOps.exif_transpose(Image.open(out)).size
    assert peek(out.getbuffer(), LIMIT).size == (height, width)


def test_all_kinds_are_tested(odd_files, bad_files):
    assert (sorted(odd_files), sorted(bad_files)) == (sorted(KINDS), sorted(DAMAGES))


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_are_refused_with_a_reason(bad_files, kind):
    raw, reason = bad_files[kind]
    with pytest.raises(UndecodableError) as refused:
        whole(raw)
    assert reason in str(refused.value)


@pytest.mark.parametrize("kind", ["jpeg bomb", "png bomb", "webp bomb"])
def test_bombs_are_refused_before_memory_is_allocated(bad_files, kind):
    tracemalloc.start()
    try:
        with pytest.raises(UndecodableError, match="over the limit"):
            whole(bad_files[kind][0])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_limit_of_pixels_is_inclusive(jpegs):
    data = memoryview(jpegs[0])
    assert peek(data, 400 * 500).size == (400, 500)
    with pytest.raises(UndecodableError, match="500x400 is 200,000 pixels, over the limit of 199,999"):
        peek(data, 400 * 500 - 1)


def test_every_cut_of_a_file_is_refused(jpegs, encode, photos):
    """No prefix of a file may pass as an image, whatever byte it ends at."""
    small = photos[2][:60, :60]
    for raw in (jpegs[2], encode(small, "PNG"), encode(small, "WEBP"), encode(small, "WEBP", lossless=True)):
        cuts = [*range(min(700, len(raw))), *range(700, len(raw), 997)]
        for cut in cuts:
            with pytest.raises(UndecodableError):
                whole(raw[:cut])


def test_a_thumbnails_end_marker_does_not_hide_a_truncation(jpegs, encode, photos):
    """EXIF may contain a whole JPEG, whose end marker is present even if the file is cut off."""
    thumbnail = encode(photos[0][:32, :32], "JPEG")
    app1 = b"Exif\0\0II*\0" + bytes(20) + thumbnail
    segment = b"\xff\xe1" + (len(app1) + 2).to_bytes(2, "big") + app1
    raw = jpegs[0][:2] + segment + jpegs[0][2:]
    assert (whole(raw) == whole(jpegs[0])).all()
    with pytest.raises(UndecodableError, match="truncated JPEG"):
        whole(raw[:-1000])


def test_harmless_stray_bytes_are_accepted(jpegs):
    raw = jpegs[0]
    assert (whole(raw + bytes(100)) == whole(raw)).all()
    assert (whole(raw[:-2] + bytes(30) + raw[-2:]) == whole(raw)).all()
    tables = raw.index(b"\xff\xdb")
    assert (whole(raw[:tables] + bytes(2) + raw[tables:]) == whole(raw)).all()
    assert (whole(raw[:-2] + bytes(30) + raw[-2:], rows=50)[:50] == whole(raw)[:50]).all()


def segment(marker, content):
    return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content


def frame(height, width, marker=0xC0):
    return segment(marker, bytes((8, *divmod(height, 256), *divmod(width, 256), 1, 1, 0x11, 0)))


def test_what_decoders_skip_hides_no_other_header(jpegs):
    """libjpeg skips 0xFF00. A reader that took it for a segment would jump over the real header to a false one."""
    hidden = b"\xff\x00" + (2 + len(frame(9, 9))).to_bytes(2, "big")
    data = memoryview(jpegs[0][:2] + hidden + frame(30_000, 30_000) + frame(8, 8) + jpegs[0][2:])
    with pytest.raises(UndecodableError, match="two headers give the number of its pixels"):
        peek(data, 10**8)
    assert peek(memoryview(jpegs[0][:2] + b"\xff\x00\x00\x04ab" + jpegs[0][2:]), 10**8).size == (400, 500)


def test_padding_and_tiny_segments_cost_no_time(jpegs):
    """A loop over each byte took seconds for these files."""
    start, rest = jpegs[0][:2], jpegs[0][2:]
    assert peek(memoryview(start + b"\xff" * (20 << 20) + rest), 10**8).size == (400, 500)
    with pytest.raises(UndecodableError, match="more than 65,536 segments come before its pixels"):
        peek(memoryview(start + segment(0xE7, b"") * (5 << 20) + rest), 10**8)


def test_a_progressive_image_of_many_scans_is_refused_before_libjpeg_works_for_hours():
    scan = segment(0xDA, bytes((1, 1, 0, 1, 1, 0))) + b"\0"
    large = b"\xff\xd8" + frame(10_000, 10_000, 0xC2) + scan * 1000 + b"\xff\xd9"
    with pytest.raises(
        UndecodableError, match=r"1,000 scans of 100,000,000 pixels each are more than 32 of 100,000,000"
    ):
        peek(memoryview(large), 10**8)
    small = b"\xff\xd8" + frame(100, 100, 0xC2) + scan * 1000 + b"\xff\xd9"
    assert peek(memoryview(small), 10**8).scans == 1000


def test_an_image_of_another_size_than_its_header_is_refused(jpegs, monkeypatch):
    """Windows are chosen by the header's size and would exceed the image."""
    header = peek(memoryview(jpegs[0]), 10**8)
    with pytest.raises(UndecodableError, match="corrupt JPEG: its header says 500x300, its decoder 500x400"):
        decode(memoryview(jpegs[0]), header._replace(height=300), Scratch())
    with pytest.raises(UndecodableError, match="corrupt JPEG: its header says 600x400, its decoder 500x400"):
        decode(memoryview(jpegs[0]), header._replace(width=600), Scratch())


def test_damage_inside_the_pixels_is_refused(jpegs):
    raw = jpegs[0]
    middle = len(raw) // 2
    with pytest.raises(UndecodableError, match="corrupt JPEG"):
        whole(raw[:middle] + raw[middle + 4000 :])


@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411", "Gray"])
@pytest.mark.parametrize(("height", "width"), [(400, 500), (131, 67)])
def test_upper_rows_alone_equal_those_of_the_whole_image(photos, sampling, height, width):
    photo = np.ascontiguousarray(photos[1][:height, :width])
    pixels = photo[:, :, :1] if sampling == "Gray" else photo
    space = "GRAY" if sampling == "Gray" else "RGB"
    raw = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 92, space, sampling)
    image = whole(raw)
    heights = set()
    for rows in range(1, height + 1):
        upper = whole(raw, rows=rows)
        heights.add(len(upper))
        assert rows <= len(upper) <= height
        np.testing.assert_array_equal(upper, image[: len(upper)])
    assert min(heights) < height / 2


def test_upper_rows_of_files_that_are_not_sequential(odd_files, encode, photos):
    restarts = encode(photos[0], "JPEG", restart_marker_rows=1)
    for raw in (odd_files["jpeg progressive"][0], odd_files["jpeg cmyk"][0], restarts):
        data = memoryview(raw)
        assert not peek(data, LIMIT).sequential
        assert (whole(raw, rows=10)[:10] == whole(raw)[:10]).all()


def test_damage_within_the_upper_rows_is_refused(jpegs):
    raw = jpegs[0]
    cut = raw[: len(raw) // 4] + b"\xff\xd9"
    with pytest.raises(UndecodableError, match="premature end"):
        whole(cut, rows=200)


def test_input_stays_as_it_is(jpegs):
    raw = np.frombuffer(bytearray(jpegs[0]), np.uint8)
    before = raw.copy()
    whole(raw, rows=20)
    whole(raw)
    assert (raw == before).all()


def test_what_opencv_raises_becomes_a_reason(odd_files, monkeypatch):
    """OpenCV raises above 2**30 pixels, which only a raised max_pixels permits."""

    def refuse(*_args):
        raise cv2.error("too large")

    monkeypatch.setattr(cv2, "imdecode", refuse)
    with pytest.raises(UndecodableError, match="OpenCV refuses it: too large"):
        whole(odd_files["png"][0])


def test_a_png_wider_than_libpng_takes_is_refused(encode):
    raw = encode(np.zeros((1, 1_000_001, 3), np.uint8), "PNG")
    with pytest.raises(UndecodableError, match="corrupt PNG: its pixels cannot be decompressed"):
        whole(raw)
