"""Which engine runs a pipeline, and how to get it."""

from __future__ import annotations

from mbaas.errors import ConfigError
from mbaas.messages import EngineName
from mbaas.prep.engine import DEFAULT_MAX_PIXELS, Engine
from mbaas.transforms import Pipeline


def resolve_engine(kind: str, pipeline: Pipeline, *, gpus: int) -> EngineName:
    """Choose the engine that runs ``pipeline``: "auto" is DALI where there is a GPU and DALI can run it, else cpu.

    Args:
        kind: "auto", "cpu" or "dali". DALI runs without a GPU too, but is then slower than cpu.
        gpus: how many GPUs prep may use.

    Raises:
        ConfigError: another kind, or DALI asked for with a Map or a change of hue in the pipeline.
    """
    if kind not in ("auto", "cpu", "dali"):
        raise ConfigError(f"engine must be 'auto', 'cpu' or 'dali', got {kind!r}")
    cpu_only = pipeline.cpu_only
    if kind == "dali" and cpu_only:
        reason = "runs neither a Map nor ColorJitter's hue"
        raise ConfigError(f"engine 'dali' {reason}; use 'cpu' or 'auto' for a pipeline with {cpu_only!r}")
    if kind == "cpu" or cpu_only or (kind == "auto" and gpus == 0):
        return "cpu"
    return "dali"


def make_engine(
    kind: EngineName,
    pipeline: Pipeline,
    *,
    seed: int,
    threads: int = 1,
    device_id: int | None = None,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Engine:
    """Make an engine for ``pipeline``, ready to prepare.

    Args:
        kind: what ``resolve_engine`` returned.
        seed: of the feed, in [0, 2**63).
        threads: that work on one block.
        device_id: the GPU, for DALI; None runs DALI on the CPU.
        max_pixels: an image that claims more is refused from its header, before memory is allocated.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    if max_pixels < 1:
        raise ConfigError(f"max_pixels must be at least 1, got {max_pixels}")
    if kind == "cpu":
        from mbaas.prep.cpu import CpuEngine  # here, as DALI below: a process loads the libraries of one engine only

        return CpuEngine(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
    resolve_engine(kind, pipeline, gpus=0)  # for its error: DALI's own would come with the first block
    from mbaas.prep.dali import DaliEngine

    return DaliEngine(pipeline, seed=seed, threads=threads, device_id=device_id, max_pixels=max_pixels)
