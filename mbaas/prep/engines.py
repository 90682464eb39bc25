"""Which engine runs a pipeline, and how to get it."""

from __future__ import annotations

from mbaas.errors import ConfigError
from mbaas.messages import EngineName
from mbaas.prep.engine import DEFAULT_MAX_BYTES, DEFAULT_MAX_PIXELS, Engine, EngineOf
from mbaas.prep.sound import sound_libraries
from mbaas.transforms import DecodeAudio, Map, MelSpectrogram, Pipeline, Transform


def resolve_engine(kind: str, pipeline: Pipeline, *, gpus: int) -> EngineName:
    """Choose the engine that runs ``pipeline``: "auto" is DALI where there is a GPU and DALI can run it, else cpu.

    Args:
        kind: "auto", "cpu" or "dali". DALI runs without a GPU too, but images are then slower than with cpu.
        gpus: how many GPUs prep may use.

    Raises:
        ConfigError: another kind, or DALI asked for with a transform that only the cpu engine runs.
    """
    if kind not in ("auto", "cpu", "dali"):
        raise ConfigError(f"engine must be 'auto', 'cpu' or 'dali', got {kind!r}")
    cpu_only = pipeline.cpu_only
    if kind == "dali" and cpu_only:
        wanted = f"use 'cpu' or 'auto' for a pipeline with {cpu_only!r}"
        raise ConfigError(f"engine 'dali' {_limit_of_dali(cpu_only, pipeline)}; {wanted}")
    if kind == "cpu" or cpu_only or (kind == "auto" and gpus == 0):
        return "cpu"
    return "dali"


def _limit_of_dali(cpu_only: Transform, pipeline: Pipeline) -> str:
    """Say of a transform that DALI does not run what DALI can do instead."""
    if pipeline.has_images:
        return "runs neither a Map nor ColorJitter's hue"
    if isinstance(cpu_only, Map):
        return "runs no Map after MelSpectrogram"
    if isinstance(cpu_only, MelSpectrogram):
        return "makes spectrograms of an even n_fft from 4 on, and of power 1 or 2"
    return "prepares images, and sound that becomes a MelSpectrogram"


def check_share(dali_share: float, engine: str, pipeline: Pipeline) -> None:
    """Check that DALI may have a part of the samples only.

    Raises:
        ConfigError: the cpu engine was asked for, or the pipeline is not of images.
    """
    if dali_share == 1:
        return
    if engine == "cpu":
        raise ConfigError(f"dali_share must be 1 with engine='cpu', which leaves nothing to DALI, got {dali_share}")
    if not pipeline.has_images:
        raise ConfigError(
            f"dali_share must be 1 for a pipeline that begins with {pipeline.decoder!r}: only images are shared out, "
            f"got {dali_share}"
        )


def workers_per_gpu(pipeline: Pipeline) -> int:
    """Return how many workers of the dali engine work on a GPU, if nobody said how many there are to be.

    Two keep a GPU busy with images, which are decoded there: while one reads headers, and hands in results, the other's
    are decoded. Sound is decoded on CPUs, by several.
    """
    return 2 if pipeline.has_images else 4


def check_packages(pipeline: Pipeline) -> None:
    """Check that this machine has what a pipeline needs: its nodes will lack what it lacks.

    Raises:
        ConfigError: a package of one of mbaas's extras is not installed.
    """
    if isinstance(pipeline.decoder, DecodeAudio):
        sound_libraries()


def make_engine(
    kind: EngineName,
    pipeline: Pipeline,
    *,
    seed: int,
    threads: int = 1,
    device_id: int | None = None,
    is_dalis: EngineOf | None = None,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Engine:
    """Make an engine for ``pipeline``, ready to prepare.

    Args:
        kind: what ``resolve_engine`` returned.
        seed: of the feed, in [0, 2**63).
        threads: that work on one block.
        device_id: the GPU, for DALI; None runs DALI on the CPU.
        is_dalis: which images the dali engine makes with DALI, and which with the cpu engine meanwhile; None: all.
        max_pixels: an image that claims more is refused from its header, before memory is allocated.
        max_bytes: the same for sound and other arrays, once they are decoded.

    Raises:
        ConfigError: a package is not installed that the pipeline needs.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    for name, value in (("max_pixels", max_pixels), ("max_bytes", max_bytes)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    # Each is imported where it is made: a process loads the libraries of one engine only.
    if kind == "cpu" and not pipeline.has_images:
        from mbaas.prep.array_engine import ArrayEngine

        return ArrayEngine(pipeline, seed=seed, threads=threads, max_bytes=max_bytes)
    if kind == "cpu":
        from mbaas.prep.cpu import CpuEngine

        return CpuEngine(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
    resolve_engine(kind, pipeline, gpus=0)  # for its error: DALI's own would come with the first block
    if not pipeline.has_images:
        from mbaas.prep.dali_sound import DaliSoundEngine

        return DaliSoundEngine(pipeline, seed=seed, threads=threads, device_id=device_id, max_bytes=max_bytes)
    from mbaas.prep.dali import DaliEngine

    return DaliEngine(
        pipeline, seed=seed, threads=threads, device_id=device_id, max_pixels=max_pixels, is_dalis=is_dalis
    )
