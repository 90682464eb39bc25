"""Cost of prep on a GPU that also trains: both are measured at the same time."""

from __future__ import annotations

import time

import ray

from mbaas.analysis.measuring.decoded import decoded
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.prep import ANSWER_S, PrepProcessActor, Raw, Seen, prep_rate
from mbaas.analysis.measuring.service import EPOCH_S, Workload, training
from mbaas.fields import Field
from mbaas.model.rates import GpuRates, OnGpu, Rates
from mbaas.prep.engines import workers_per_gpu


def gpu_rates(
    workload: Workload,
    rates: Rates,
    raw: Raw,
    kept: Raw | None,
    made: Field,
    effort: Effort,
    *,
    gpus: int,
    gpu: int | None = 0,
) -> GpuRates:
    """Measure the GPU rates of this machine on one of its GPUs. Requires Ray.

    Args:
        rates: rates measured without prep on a GPU.
        raw, kept: samples in memory, and decoded for the dali engine (None if it caches none).
        made: field of a prepared sample.
        gpus: number of GPUs.
        gpu: index of the GPU to measure; None for CPUs, to test this module.
    """
    decode, left = beside_training(workload, rates, raw, made, effort, gpu=gpu)
    resize = None if kept is None else beside_training(workload, rates, kept, made, effort, gpu=gpu)[0]
    cpu_s, decoded_cpu_s = (
        None if samples is None else prep_rate(samples, workload.pipeline, effort, workers=[1]).cpu_s.value
        for samples in (raw, decoded(raw, workload.pipeline, seed=workload.options.seed))
    )
    return GpuRates(
        gpus=gpus,
        memory_bytes=None if gpu is None else left,
        decode=decode,
        resize=resize,
        cpu_s=cpu_s,
        decoded_cpu_s=decoded_cpu_s,
    )


def beside_training(
    workload: Workload, rates: Rates, raw: Raw, made: Field, effort: Effort, *, gpu: int | None
) -> tuple[OnGpu, int]:
    """Measure one worker of the dali engine while a trial trains on synthetic minibatches.

    Returns the rates of both, and the GPU memory that training leaves free, including the worker's.
    """
    seed, threads = workload.options.seed, workload.options.threads.prep
    worker = PrepProcessActor.options(num_gpus=0).remote(
        ray.put(raw), workload.pipeline, "dali", seed, made, 1.0, threads, 0, gpu
    )
    seen: list[Seen] = []

    def prepare() -> None:
        asked = worker.run.remote(time.monotonic(), effort.window_s)
        seen.append(ray.get(asked, timeout=ANSWER_S + effort.window_s))

    try:
        prepare()  # builds the graph; without training, the GPU memory taken is the worker's alone
        memory_bytes: int = ray.get(worker.taken_gpu_bytes.remote(), timeout=ANSWER_S)
        with training(workload, made, [workload.options.batch_size], effort) as ended:
            while not ray.wait([ended], timeout=0)[0]:
                prepare()
            left: int = ray.get(worker.free_gpu_bytes.remote(), timeout=ANSWER_S)
            (step,) = ray.get(ended, timeout=EPOCH_S)
    finally:
        ray.kill(worker)
    # The first steps warm up, and training has ended before the end of the last window.
    beside = seen[len(seen) // 2 : -1] or seen[-1:]
    samples = sum(window.samples for window in beside)
    found = OnGpu(
        per_s=sum(window.samples / window.seconds for window in beside) / len(beside),
        # A step that shares the GPU is not faster: more is noise.
        step_per_s=min(step.rate.value, rates.step.value),
        cpu_s=sum(window.cpu_s for window in beside) / samples,
        memory_bytes=memory_bytes * workers_per_gpu(workload.pipeline),
    )
    return found, left + memory_bytes
