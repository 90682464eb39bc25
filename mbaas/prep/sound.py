"""Decodes sound: libsndfile reads, soxr resamples, and what is damaged or too long is refused."""

from __future__ import annotations

import io
import math
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.prep.header import UndecodableError
from mbaas.transforms import DecodeAudio
from mbaas.units import exact, size

_QUALITY = "HQ"
"""soxr's, which is its default, and librosa's: 20 bits."""


def sound_libraries() -> tuple[Any, Any]:
    """Return soundfile and soxr.

    Raises:
        ConfigError: they are not installed.
    """
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: soundfile is there, and libsndfile is not
        raise ConfigError(
            f'DecodeAudio needs soundfile and soxr on every node: pip install "mbaas[audio]" ({error})'
        ) from error
    return soundfile, soxr


class _Encoded(io.BytesIO):
    """The bytes of a file, for libsndfile, which may be told by a damaged one to go to a place before its beginning."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; stay where it is none. An exception would be printed, and go no further than libsndfile."""
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()  # from which libsndfile sees that it was none


class SoundDecoder:
    """Turns the bytes of recordings into sound, float32 [time] or [time, channels]. Threads may share it.

    Args:
        decode: what it is to make.
        max_bytes: of one recording, decoded; one that claims more is refused from its header.

    Raises:
        ConfigError: soundfile or soxr is not installed.
    """

    def __init__(self, decode: DecodeAudio, max_bytes: int) -> None:
        self._soundfile, self._soxr = sound_libraries()
        self._to, self._max_bytes = decode, max_bytes

    def __call__(self, encoded: memoryview) -> NDArray[np.float32]:
        """Decode one recording.

        Raises:
            UndecodableError: it is damaged, of too many channels, or too long.
        """
        begins = f"; it starts with {bytes(encoded[:12])!r}" if len(encoded) else "; the file is empty (0 bytes)"
        try:
            with self._soundfile.SoundFile(_Encoded(encoded)) as file:
                begins = ""  # of a file of sound its first bytes say nothing
                sound, rate = self._read(file), int(file.samplerate)
        except self._soundfile.LibsndfileError as error:
            said = error.error_string.removeprefix("Error : ").rstrip(".")
            raise UndecodableError(f"libsndfile cannot decode it: {said}{begins}") from error
        sound = self._mixed(sound)
        if rate != self._to.rate:
            sound = cast("NDArray[np.float32]", self._soxr.resample(sound, rate, self._to.rate, quality=_QUALITY))
        if not len(sound):
            raise UndecodableError("it has no sound (0 samples)")
        return sound

    def _read(self, file: Any) -> NDArray[np.float32]:
        """Read all that a file has: float32 [time, channels]."""
        seconds, most_s = file.frames / file.samplerate, self._to.max_s
        if most_s is not None and seconds > most_s:
            raise UndecodableError(f"it is {exact(seconds)} s long, over the limit of {exact(most_s)} s (max_s)")
        longer = max(file.frames, math.ceil(seconds * self._to.rate))
        nbytes = longer * max(file.channels, self._to.channels) * np.dtype(np.float32).itemsize
        if nbytes > self._max_bytes:
            raise UndecodableError(
                f"it is {exact(seconds)} s of {file.samplerate} Hz in {file.channels} channels, {size(nbytes)} once it "
                f"is decoded, over the limit of {size(self._max_bytes)}"
            )
        file.seek(0)  # as soundfile.read does: the MP3 decoder rounds in another way after it
        sound: NDArray[np.float32] = file.read(dtype="float32", always_2d=True)
        # Of a file that breaks off libsndfile gives what is there, and no error.
        if len(sound) < file.frames:
            raise UndecodableError(f"it breaks off after {len(sound):,} of {file.frames:,} samples")
        if not np.isfinite(sound).all():
            raise UndecodableError("it has numbers that are not finite")
        return sound

    def _mixed(self, sound: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the channels that are wanted of [time, channels]."""
        there, wanted = sound.shape[1], self._to.channels
        if wanted == 1:
            return sound[:, 0] if there == 1 else sound.mean(axis=1, dtype=np.float32)
        if there not in (1, wanted):
            raise UndecodableError(f"it has {there} channels, and DecodeAudio makes {wanted} of as many, or of one")
        return np.repeat(sound, wanted, axis=1) if there == 1 else sound
