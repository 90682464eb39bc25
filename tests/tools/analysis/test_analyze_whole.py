"""`mbaas analyze` finds the true rates of a known workload and predicts it well. Takes minutes: `pytest -m long`."""

from __future__ import annotations

import threading
import time

import pytest

from mbaas import transforms as T
from mbaas.analysis import Setup, Workload, analyze
from mbaas.dataset import synthetic
from mbaas.settings import FeedOptions
from mbaas.tools.analysis.measuring.effort import Effort
from mbaas.tools.analysis.measuring.service import PacedStep
from mbaas.tools.analysis.measuring.storage import portion

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_clean")]

G, PREP_S, STORAGE_BYTES_PER_S = 400.0, 0.004, 2_000_000
EFFORT = Effort(least=5, most=8, window_s=0.5, budget_s=4.0)


def test_an_analysis_finds_what_is_there_and_its_predictions_come_true() -> None:
    """Steps take 400 samples/s, a worker prepares 250/s without using a core, storage delivers 2 MB/s.

    All three are sleeps, so nothing depends on the machine. Each sleep of prep ends at a fixed time, however long
    decoding took.
    """
    due_s: dict[int, float] = {}

    def doze(image, rng):
        now_s, thread = time.monotonic(), threading.get_ident()
        last_s = due_s.get(thread, 0.0)
        due_s[thread] = (last_s if now_s < last_s + PREP_S else now_s) + PREP_S
        time.sleep(due_s[thread] - now_s)
        return image

    data = portion(synthetic(1501, height=64, width=64), bytes_per_s=STORAGE_BYTES_PER_S)
    workload = Workload(
        dataset=data,
        pipeline=T.Pipeline([T.DecodeImage(), T.Map(doze)]),
        step=PacedStep(G),
        options=FeedOptions(batch_size=32),
    )
    mean_bytes = data.total_bytes / len(data)
    found = analyze(
        workload,
        setup=Setup(prep_workers=2, cache_bytes=data.total_bytes / 2),
        step="paced",
        effort=EFFORT,
        check=True,
    )
    rates = found.rates
    assert rates.step.value == pytest.approx(G, rel=0.05)
    assert rates.prep.rate(1) == pytest.approx(1 / PREP_S, rel=0.05)
    assert rates.storage.rate(4) == pytest.approx(STORAGE_BYTES_PER_S / mean_bytes, rel=0.05)
    assert found.split is not None
    assert found.split.disagreement < 0.1
    assert found.verification is not None
    assert {check.parameter for check in found.verification.checks} == {"cache_bytes", "prep_workers", "trials"}
    print([(c.parameter, c.value, round(c.error, 3), round(c.simulated_error, 3)) for c in found.verification.checks])
    assert found.verification.median_error < 0.05
    assert found.verification.worst_error < 0.10
