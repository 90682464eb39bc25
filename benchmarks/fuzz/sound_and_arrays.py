"""Fuzz targets for sound and arrays: damaged files of all kinds between good ones."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fuzz.mutations import damaged
from benchmarks.fuzz.run import Case
from mbaas import transforms
from mbaas.errors import BadSampleError
from mbaas.prep.engines import Batch, make_engine
from mbaas.samples.fields import Packed
from mbaas.wire.samples import EngineName

MAX_BYTES = 1 << 20
"""Limit of a decoded sample: low, so that unbounded memory use shows."""

_RATE = 8000
_SOUNDS = (
    ("WAV", "PCM_16"),
    ("WAV", "FLOAT"),
    ("WAV", "IMA_ADPCM"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("AIFF", None),
)


def _sounds() -> list[bytes]:
    """Make short audio files of all kinds but MP3, whose decoder writes to stderr for each damaged file."""
    import soundfile

    made: list[bytes] = []
    for kind, subtype in _SOUNDS:
        stream = io.BytesIO()
        noise = np.random.default_rng(0).standard_normal((900, 1 + len(made) % 2)) / 8
        soundfile.write(stream, noise, _RATE, format=kind, subtype=subtype)
        made.append(stream.getvalue())
    return made


def _arrays() -> list[bytes]:
    values = np.arange(600, dtype=np.int16).reshape(10, 20, 3)
    made: list[bytes] = []
    for save, given in ((np.save, values), (np.save, np.asfortranarray(values)), (np.save, values.astype(">f8"))):
        stream = io.BytesIO()
        save(stream, given)
        made.append(stream.getvalue())
    for zipped in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        zipped(stream, a=values)
        made.append(stream.getvalue())
    return made


def sound(_: Path) -> Case:
    """Sound of fixed and of variable length: one damaged file between good ones."""
    decode, mels = transforms.DecodeAudio(_RATE, max_s=1), transforms.MelSpectrogram(n_fft=64, n_mels=8)
    cropped = transforms.Pipeline([decode, transforms.RandomCrop(700)])
    masked = transforms.Pipeline([decode, mels, transforms.SpecAugment(1, 9, 1, 3)])
    return _damaged_between(_sounds(), [cropped, masked])


def dali_sound(_: Path) -> Case:
    """The dali engine for sound on the CPU: one damaged file between good ones."""
    decode, mels = transforms.DecodeAudio(_RATE, max_s=1), transforms.MelSpectrogram(n_fft=64, n_mels=8)
    masked = transforms.Pipeline([decode, mels, transforms.AmplitudeToDB(), transforms.SpecAugment(1, 9, 1, 3)])
    return _damaged_between(_sounds(), [masked], "dali")


def arrays(_: Path) -> Case:
    """Arrays (npy, npz, raw) of fixed and of variable shape: one damaged file between good ones."""
    raw = transforms.DecodeArray("raw", dtype="uint8", shape=(None, 2), longest=4000)
    crop = transforms.CropOrPad((4, 30))
    npy, npz = (transforms.Pipeline([each, crop]) for each in (transforms.DecodeArray(), transforms.DecodeArray("npz")))
    return _damaged_between(_arrays(), [npy, npz, transforms.Pipeline([raw])])


def _damaged_between(good: list[bytes], pipelines: list[transforms.Pipeline], kind: EngineName = "cpu") -> Case:
    engines = [make_engine(kind, pipeline, seed=0, max_bytes=MAX_BYTES) for pipeline in pipelines]
    firsts = []  # for each engine, a file that it can prepare, and its field
    for engine in engines:
        found = ((file, _field_of(engine, file)) for file in good)
        firsts.append(next((file, field) for file, field in found if field is not None))

    def prepared(which: int, block: list[bytes]) -> tuple[list[NDArray[Any]], list[int]]:
        out = firsts[which][1].empty(len(block))
        out[:] = 77
        done = engines[which].prepare(Batch(block, np.arange(len(block)), 0, {}), out)
        if not isinstance(done.made, Packed):
            return list(out), [bad.row for bad in done.bad]
        values, bounds = done.made.own()
        return np.split(values, bounds[1:-1]), [bad.row for bad in done.bad]

    wanted = [prepared(which, [first] * 3)[0] for which, (first, _) in enumerate(firsts)]

    def case(chance: Random) -> None:
        which = chance.randrange(len(engines))
        first = firsts[which][0]
        made, bad = prepared(which, [first, damaged(chance, chance.choice(good), good), first])
        assert bad in ([], [1]), bad
        for row in (0, 2):
            np.testing.assert_array_equal(made[row], wanted[which][row], "a bad sample changed its neighbours")
        assert not bad or not made[1].any(), "a bad row is not zero"

    return case


def _field_of(engine: Any, file: bytes) -> Any:
    try:
        return engine.field(file, "a good file", {})
    except BadSampleError:
        return None
