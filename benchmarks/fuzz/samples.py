"""Fuzz targets for encoded and decoded samples: an engine prepares a damaged one between good ones."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import cv2
import numpy as np
import simplejpeg

from benchmarks.fuzz.mutations import damaged, sealed_png
from benchmarks.fuzz.run import Case
from mbaas import transforms
from mbaas.errors import BadSampleError
from mbaas.prep.decoded import HEADER_BYTES, DecodedRows
from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.prep.header import UndecodableError, peek
from mbaas.samples.fields import Packed
from mbaas.wire.samples import EngineName

MAX_PIXELS = 400_000
"""Pixel limit of the engines: low, so that unbounded memory use shows."""

MAX_BYTES = 1 << 20
"""Limit of a decoded sample or of a block's decoded samples, low for the same reason."""

_RATE = 8000
_SOUNDS = (
    ("WAV", "PCM_16"),
    ("WAV", "FLOAT"),
    ("WAV", "IMA_ADPCM"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("AIFF", None),
)


def _damaged_between(
    engines: Sequence[Engine], files: Sequence[list[bytes]], damage: Callable[[Random], bytes]
) -> Case:
    """Return a case: an engine prepares a damaged file between two good ones, which must not change.

    Args:
        engines: each case chooses one.
        files: good files for each engine; the first that it can prepare is used.
        damage: returns the damaged file.
    """
    good = [
        next(found for file in of if (found := _field_of(engine, file)) is not None)
        for engine, of in zip(engines, files, strict=True)
    ]

    def prepared(which: int, data: bytes) -> tuple[list[Any], list[int]]:
        file, field = good[which]
        out = field.empty(3)
        out[:] = 77
        done = engines[which].prepare(Batch([file, data, file], np.arange(3), 0, {}), out)
        rows = [done.made.value(row) for row in range(3)] if isinstance(done.made, Packed) else list(done.made)
        return rows, [bad.row for bad in done.bad]

    wanted = [prepared(which, file)[0] for which, (file, _) in enumerate(good)]

    def case(chance: Random) -> None:
        which = chance.randrange(len(engines))
        made, bad = prepared(which, damage(chance))
        assert bad in ([], [1]), bad
        for row in (0, 2):
            assert made[row].tobytes() == wanted[which][row].tobytes(), "a bad sample changed its neighbours"
        assert not bad or not made[1].any(), "a bad row is not zero"

    return case


def _field_of(engine: Engine, file: bytes) -> tuple[bytes, Any] | None:
    try:
        return file, engine.field(file, "a good file", {})
    except BadSampleError:
        return None


# ---- images ----


def images() -> dict[str, bytes]:
    """Make small images of all supported kinds: name -> encoded bytes."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (13, 17, 3), np.uint8)
    photo = Image.fromarray(cv2.resize(noise, (150, 120), interpolation=cv2.INTER_CUBIC))
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "jpeg": (photo, "JPEG", {"quality": 90}),
        "jpeg 4:4:4": (photo, "JPEG", {"quality": 40, "subsampling": 0}),
        "jpeg grey": (photo.convert("L"), "JPEG", {}),
        "jpeg cmyk": (photo.convert("CMYK"), "JPEG", {}),
        "jpeg progressive": (photo, "JPEG", {"progressive": True}),
        "jpeg restarts": (photo, "JPEG", {"restart_marker_rows": 1}),
        "jpeg turned": (photo, "JPEG", {"exif": exif}),
        "png": (photo, "PNG", {}),
        "png grey": (photo.convert("L"), "PNG", {}),
        "png palette": (photo.convert("P"), "PNG", {}),
        "png alpha": (photo.convert("RGBA"), "PNG", {}),
        "png 16 bits": (Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 256), "PNG", {}),
        "webp": (photo, "WEBP", {}),
        "webp turned": (photo.convert("RGBA"), "WEBP", {"lossless": True, "exif": exif}),
        "webp animated": (photo, "WEBP", {"save_all": True, "append_images": [photo.rotate(90)]}),
        "png animated": (photo, "PNG", {"save_all": True, "append_images": [photo.rotate(90)]}),
    }
    return {name: _saved(picture.save, kind, **options) for name, (picture, kind, options) in kinds.items()}


def _damaged_image(chance: Random, good: list[bytes]) -> bytes:
    data = damaged(chance, chance.choice(good), good)
    # otherwise every damaged PNG would fail its checksums, and never reach a decoder
    return sealed_png(data) if data[:4] == b"\x89PNG" and chance.random() < 0.8 else data


def header(_: Path) -> Case:
    """Headers: `peek` must agree with the decoder."""
    good = list(images().values())

    def case(chance: Random) -> None:
        data = _damaged_image(chance, good)
        try:
            found = peek(memoryview(data), MAX_PIXELS)
        except UndecodableError:
            return
        assert 0 < found.height * found.width <= MAX_PIXELS, found
        if found.format == "jpeg":
            with contextlib.suppress(ValueError, KeyError):  # KeyError: colour subsampling without a name in simplejpeg
                height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
                assert (found.height, found.width) == (height, width), f"{found}, but libjpeg finds {width}x{height}"

    return case


_PIPELINES = (
    [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip()],
    [transforms.Resize(40), transforms.CenterCrop(32)],
    [transforms.CenterCrop((32, 32)), transforms.ColorJitter(0.4, 0.4, 0.4)],
    [transforms.Resize((32, 32))],
)


def _image_case(kind: EngineName) -> Case:
    good = list(images().values())
    pipelines = [transforms.Pipeline([transforms.DecodeImage(), *rest]) for rest in _PIPELINES]
    any_size = transforms.DecodeImage(max_pixels=100_000)
    pipelines.append(transforms.Pipeline([any_size, transforms.RandomHorizontalFlip()]))
    engines = [make_engine(kind, pipeline, seed=0, max_pixels=MAX_PIXELS) for pipeline in pipelines]
    return _damaged_between(engines, [good] * len(engines), lambda chance: _damaged_image(chance, good))


def cpu(_: Path) -> Case:
    """The cpu engine: one damaged image between good ones."""
    return _image_case("cpu")


def dali(_: Path) -> Case:
    """The dali engine on the CPU: one damaged image or audio file between good ones."""
    decode, mels = transforms.DecodeAudio(_RATE, max_s=1), transforms.MelSpectrogram(n_fft=64, n_mels=8)
    masked = transforms.Pipeline([decode, mels, transforms.AmplitudeToDB(), transforms.SpecAugment(1, 9, 1, 3)])
    cases = _image_case("dali"), _damaged_file(_sounds(), [masked], "dali")
    return lambda chance: chance.choice(cases)(chance)


# ---- audio and arrays ----


def _damaged_file(good: list[bytes], pipelines: list[transforms.Pipeline], kind: EngineName = "cpu") -> Case:
    engines = [make_engine(kind, pipeline, seed=0, max_bytes=MAX_BYTES) for pipeline in pipelines]
    return _damaged_between(engines, [good] * len(engines), lambda chance: damaged(chance, chance.choice(good), good))


def _saved(save: Callable[..., object], *values: Any, **named: Any) -> bytes:
    """Return the bytes that a function writes into a file, its first argument."""
    stream = io.BytesIO()
    save(stream, *values, **named)
    return stream.getvalue()


def _sounds() -> list[bytes]:
    """Make short audio files of all kinds but MP3, whose decoder writes to stderr for each damaged file."""
    import soundfile

    noises = [np.random.default_rng(0).standard_normal((900, channels)) / 8 for channels in (1, 2)]
    return [
        _saved(soundfile.write, noises[number % 2], _RATE, format=kind, subtype=subtype)
        for number, (kind, subtype) in enumerate(_SOUNDS)
    ]


def sound(_: Path) -> Case:
    """Sound of fixed and of variable length: one damaged file between good ones."""
    decode, mels = transforms.DecodeAudio(_RATE, max_s=1), transforms.MelSpectrogram(n_fft=64, n_mels=8)
    cropped = transforms.Pipeline([decode, transforms.RandomCrop(700)])
    return _damaged_file(_sounds(), [cropped, transforms.Pipeline([decode, mels, transforms.SpecAugment(1, 9, 1, 3)])])


def arrays(_: Path) -> Case:
    """Arrays (npy, npz, raw) of fixed and of variable shape: one damaged file between good ones."""
    values = np.arange(600, dtype=np.int16).reshape(10, 20, 3)
    good = [_saved(np.save, each) for each in (values, np.asfortranarray(values), values.astype(">f8"))]
    good += [_saved(zipped, a=values) for zipped in (np.savez, np.savez_compressed)]
    raw = transforms.DecodeArray("raw", dtype="uint8", shape=(None, 2), longest=4000)
    crop = transforms.CropOrPad((4, 30))
    npy, npz = (transforms.Pipeline([each, crop]) for each in (transforms.DecodeArray(), transforms.DecodeArray("npz")))
    return _damaged_file(good, [npy, npz, transforms.Pipeline([raw])])


# ---- decoded samples ----


def _upside_down(values: Any) -> Any:
    return values[::-1]


def decoded(_: Path) -> Case:
    """Containers of decoded samples: one that is damaged, or of another pipeline, between good ones."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(256, size=(2, 48, 40, 3), dtype=np.uint8)
    pngs = [_saved(Image.fromarray(each).save, "PNG") for each in pixels]
    npys = [_saved(np.save, each.astype(np.float32)) for each in pixels]
    image, turn = transforms.DecodeImage(), transforms.Map(_upside_down, deterministic=True)
    flip, crop = transforms.RandomHorizontalFlip(), transforms.RandomResizedCrop(24)
    steps: list[list[transforms.Transform]] = [
        [image, crop, flip],
        [image, transforms.Resize(30), transforms.CenterCrop(24), flip],
        [image, turn, transforms.Resize((30, 20)), crop],
        [transforms.DecodeImage(max_pixels=4000), transforms.Resize(30), transforms.ColorJitter(0.4)],
        [transforms.DecodeArray(), transforms.RandomCrop((24, 20))],
        [transforms.DecodeArray(shape=(None, None, 3), longest=9000), turn, transforms.SpecAugment(1, 9, 1, 3)],
    ]
    pipelines = [transforms.Pipeline(each) for each in steps]
    engines = [make_engine("cpu", each, seed=0, max_pixels=1 << 18, max_bytes=MAX_BYTES) for each in pipelines]
    kept = [
        _containers(engine, pngs if isinstance(pipeline.decoder, transforms.DecodeImage) else npys)
        for engine, pipeline in zip(engines, pipelines, strict=True)
    ]
    all_kept = [container for containers in kept for container in containers]

    def damage(chance: Random) -> bytes:
        data = damaged(chance, chance.choice(all_kept), all_kept) if chance.random() < 0.9 else chance.choice(all_kept)
        if chance.random() < 0.8 and len(data) >= HEADER_BYTES:  # otherwise no case would get past the checksum
            head = data[: HEADER_BYTES - 4]
            data = head + zlib.crc32(head).to_bytes(4, "little") + data[HEADER_BYTES:]
        return data

    return _damaged_between(engines, kept, damage)


def _containers(engine: Any, files: list[bytes]) -> list[bytes]:
    keep, count = DecodedRows(range(len(files)), MAX_BYTES), len(files)
    done = engine.prepare(Batch(files, np.arange(count), 0, {}), engine.field(files[0], "", {}).empty(count), keep)
    assert not done.bad, done.bad
    _, lengths, packed = keep.taken()
    ends = np.cumsum(lengths).tolist()
    return [packed[end - length : end].tobytes() for length, end in zip(lengths.tolist(), ends, strict=True)]
