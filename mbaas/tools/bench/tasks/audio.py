"""Task "audio": audio classification from the mel spectrogram of one second of each file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mbaas.errors import DatasetError
from mbaas.samples.fields import Field
from mbaas.tools.bench.tasks.base import Data, Report, Samples, Task, checked_folder, files_below
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


class Audio(Task):
    """Audio files in one folder per class."""

    name = "audio"
    things = "recordings"
    work = f"resampled to {RATE // 1000} kHz, a random second, {MELS} log-mel bands, SpecAugment"
    made = Field("audio", (1 + RATE // HOP, MELS), "float32")

    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        from mbaas.tools.bench.sounds import make_sounds

        return Data(make_sounds(cache_dir, count, seed=seed, report=report))

    def find(self, data: Path, image_folder: Path | None) -> Data:  # noqa: ARG002
        folder = checked_folder(data, "data must be a folder with a folder of recordings for each class")
        if not files_below(folder, EXTENSIONS):
            raise DatasetError(f"no WAV, FLAC or other files of sound below the class folders of {folder}")
        return Data(folder)

    def samples(self, data: Data) -> Samples:
        return Samples(files_below(data.folder, EXTENSIONS))

    def dataset(self, data: Data) -> Dataset:
        from mbaas.dataset import read_audio

        return read_audio(data.folder)

    def pipeline(self) -> Pipeline:
        return Pipeline(
            [
                DecodeAudio(RATE),
                RandomCrop(RATE),
                MelSpectrogram(n_fft=WINDOW, hop_length=HOP, n_mels=MELS),
                AmplitudeToDB(top_db=TOP_DB),
                SpecAugment(*TIME_MASKS, *FREQ_MASKS),
            ]
        )
