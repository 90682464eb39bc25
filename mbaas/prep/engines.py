"""Choosing and constructing the engine for a pipeline."""

from __future__ import annotations

from mbaas.errors import ConfigError
from mbaas.messages import EngineName
from mbaas.prep.engine import DEFAULT_MAX_BYTES, DEFAULT_MAX_PIXELS, Engine, EngineOf
from mbaas.prep.sound import sound_libraries
from mbaas.transforms import DecodeAudio, Map, MelSpectrogram, Pipeline, Transform


def resolve_engine(kind: str, pipeline: Pipeline, *, gpus: int) -> EngineName:
    """Return the engine for ``pipeline``. "auto" gives "dali" if there are GPUs and DALI supports the pipeline.

    Args:
        kind: "auto", "cpu" or "dali". DALI also runs without a GPU, but is then slower for images than cpu.
        gpus: number of GPUs available for prep.

    Raises:
        ConfigError: ``kind`` is unknown, or is "dali" for a pipeline with a transform that only the cpu engine runs.
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
    if pipeline.has_images:
        return "runs neither a Map nor ColorJitter's hue"
    if isinstance(cpu_only, Map):
        return "runs no Map after MelSpectrogram"
    if isinstance(cpu_only, MelSpectrogram):
        return "makes spectrograms of an even n_fft from 4 on, and of power 1 or 2"
    return "prepares images, and sound that becomes a MelSpectrogram"


def check_share(dali_share: float, engine: str, pipeline: Pipeline) -> None:
    """Check that the samples may be divided between DALI and the cpu engine.

    Raises:
        ConfigError: ``dali_share`` is below 1, and ``engine`` is "cpu" or the pipeline is not for images.
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
    """Return the default number of dali workers per GPU.

    Images are decoded on the GPU: two workers keep it busy, as one decodes while the other reads headers and hands in
    results. Audio is decoded on CPUs, so it takes more workers.
    """
    return 2 if pipeline.has_images else 4


def check_packages(pipeline: Pipeline) -> None:
    """Raise ConfigError if an optional package that a pipeline needs is missing here; all nodes should be equal."""
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
    """Construct an engine for ``pipeline``.

    Args:
        kind: the result of ``resolve_engine``.
        seed: the feed's seed, in [0, 2**63).
        threads: threads per block.
        device_id: the GPU for DALI; None runs DALI on the CPU.
        is_dalis: selects the images for DALI; the dali engine prepares the others on CPUs at the same time. None: all.
        max_pixels: larger images are rejected by their header, before memory is allocated.
        max_bytes: the same limit for audio and other arrays, in decoded bytes.

    Raises:
        ConfigError: a package needed by the pipeline is missing.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    for name, value in (("max_pixels", max_pixels), ("max_bytes", max_bytes)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    # Import lazily: a process loads the libraries of one engine only.
    if kind == "cpu" and not pipeline.has_images:
        from mbaas.prep.array_engine import ArrayEngine

        return ArrayEngine(pipeline, seed=seed, threads=threads, max_bytes=max_bytes)
    if kind == "cpu":
        from mbaas.prep.cpu import CpuEngine

        return CpuEngine(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
    resolve_engine(kind, pipeline, gpus=0)  # for its error: DALI itself would fail at the first block only
    if not pipeline.has_images:
        from mbaas.prep.dali_sound import DaliSoundEngine

        return DaliSoundEngine(pipeline, seed=seed, threads=threads, device_id=device_id, max_bytes=max_bytes)
    from mbaas.prep.dali import DaliEngine

    return DaliEngine(
        pipeline, seed=seed, threads=threads, device_id=device_id, max_pixels=max_pixels, is_dalis=is_dalis
    )
