"""Task "audio": audio classification from the mel spectrogram of one second of each file.

Generated files are half WAV and half FLAC, like ESC-50 (Piczak, 2015) but shorter. The cost of decoding and resampling
depends on length, rate and compressibility, so pure tones would not do. Each file is two to four seconds of a harmonic
sound of varying loudness, with room noise: 16 bits, one channel, 44,100 Hz. The same arguments give the same samples.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError
from mbaas.samples.fields import Field
from mbaas.tools.bench.tasks.base import Data, FolderTask, Report, made_once, write_files
from mbaas.transforms import AmplitudeToDB, DecodeAudio, MelSpectrogram, Pipeline, RandomCrop, SpecAugment

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

EXTENSIONS = (
    ".wav", ".wave", ".bwf", ".rf64", ".w64", ".flac", ".mp3", ".mp2", ".mpga", ".ogg", ".oga", ".opus",
    ".aif", ".aiff", ".aifc", ".caf", ".au", ".snd", ".voc", ".sph", ".nist", ".sf", ".ircam",
    ".avr", ".fap", ".iff", ".paf", ".pvf", ".sds", ".svx", ".8svx", ".wve", ".xi",
)  # fmt: skip
RATE = 16_000
WINDOW, HOP, MELS = 512, 160, 64
TOP_DB = 80.0
TIME_MASKS, FREQ_MASKS = (2, 20), (2, 8)
"""SpecAugment masks over time and frequency: (number of masks, exclusive maximum width)."""

FILE_RATE = 44_100
SECONDS = (2.0, 4.0)
CLASSES = {"hum": 80.0, "voice": 160.0, "horn": 320.0, "bird": 1280.0, "alarm": 2560.0}
"""Lowest pitch of each class in Hz; the highest is an octave above."""


class Audio(FolderTask):
    """Audio files in one folder per class."""

    name = "audio"
    things = "recordings"
    work = f"resampled to {RATE // 1000} kHz, a random second, {MELS} log-mel bands, SpecAugment"
    extensions = EXTENSIONS
    kinds = "WAV, FLAC or other files of sound"
    made = Field("audio", (1 + RATE // HOP, MELS), "float32")

    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        return Data(make_sounds(cache_dir, count, seed=seed, report=report))

    def dataset(self, data: Data) -> Dataset:
        from mbaas.dataset import read_audio

        return read_audio(data.folder)

    def pipeline(self, variant: int = 0) -> Pipeline:  # noqa: ARG002
        return Pipeline(
            [
                DecodeAudio(RATE),
                RandomCrop(RATE),
                MelSpectrogram(n_fft=WINDOW, hop_length=HOP, n_mels=MELS),
                AmplitudeToDB(top_db=TOP_DB),
                SpecAugment(*TIME_MASKS, *FREQ_MASKS),
            ]
        )


def make_sounds(root: Path, count: int, *, seed: int = 0, report: Report = print) -> Path:
    """Generate or find a class-per-folder tree of ``count`` audio files under ``root``; return the tree's folder.

    ``report`` is called with one line if the tree is generated. Raises DatasetError if soundfile is not installed.
    """
    folder = root / f"sounds-v1-n{count}-s{seed}"
    return made_once(folder, partial(_write_tree, count, seed), f"{count} recordings", report)


def _write_tree(count: int, seed: int, folder: Path) -> None:
    try:
        import soundfile
    except ModuleNotFoundError:
        raise DatasetError("the benchmark's recordings are written by soundfile: pip install soundfile") from None

    def write(file: Path, index: int, rng: np.random.Generator) -> None:
        sound = draw_sound(pitches[index % len(pitches)], rng)
        suffix = (".wav", ".flac")[index // len(pitches) % 2]  # both in each class
        soundfile.write(file.with_suffix(suffix), sound, FILE_RATE, subtype="PCM_16")

    pitches = [*CLASSES.values()]
    write_files(folder, count, seed, [*CLASSES], write)


def draw_sound(pitch: float, rng: np.random.Generator) -> NDArray[Any]:
    """Draw random audio of a class: float64 [time], within -1 and 1."""
    time = np.arange(round(rng.uniform(*SECONDS) * FILE_RATE)) / FILE_RATE
    pitch = pitch * 2 ** rng.random()
    sound = sum(np.sin(2 * np.pi * pitch * k * time + rng.uniform(0, 6)) / k for k in range(1, 7))
    sound *= 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(0.5, 3) * time + rng.uniform(0, 6))
    white = rng.standard_normal(len(time) + 16)
    noise = np.convolve(white, np.full(16, 1 / 4), "valid")[: len(time)]  # mostly low frequencies, as in a room
    sound = rng.uniform(0.05, 0.2) * sound + rng.uniform(0.005, 0.05) * noise
    return np.clip(sound, -1.0, 1.0)
