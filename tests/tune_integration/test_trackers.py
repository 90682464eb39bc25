"""A trial's reports reach W&B and MLflow through Tune's own callbacks.

Neither package is a test dependency: together they install twenty others, and hold back versions of some of ours. Run
``pip install wandb mlflow-skinny``, then ``pytest -m long tests/tune_integration/test_trackers.py``.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from searching import SAMPLES, OneOfMany, search

from tune_integration import get_loader

pytestmark = pytest.mark.long

EPOCHS = 2

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # trials run without this folder on their path


def trial(config: dict[str, Any]) -> None:
    with get_loader(config["feed"], format="numpy") as loader:
        for epoch in range(EPOCHS):
            for _ in loader:
                pass
            tune.report({"score": epoch})


def names(feed: str) -> set[str]:
    """The mbaas metrics in a trial's report."""
    shares = {f"{kind}stall_share" for kind in ("", "fetch_", "prep_", "peer_")}
    sums = {"wait_s", "delivered_samples", "prepared_samples", "time_to_first_batch_s"}
    costs = {"cpu_s", "dataloader_cpu_s"}
    own = {f"mbaas/{feed}/{name}" for name in shares | sums | costs}
    return {"mbaas/stall_share", "mbaas/cpu_s", *own}


def test_mlflow_has_each_report(feed: OneOfMany, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow writes to files, which needs a flag; a database would need more packages."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    from ray.tune.logger.mlflow import MLflowLoggerCallback

    uri = tmp_path.as_uri()
    callback = MLflowLoggerCallback(tracking_uri=uri, experiment_name="search")
    results = search(trial, feed.name, space={"feed": feed.name}, callbacks=[callback])
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("search").experiment_id])
    assert {name for name in run.data.metrics if name.startswith("mbaas")} == names(feed.name)
    (result,) = results
    assert run.data.metrics["mbaas/stall_share"] == result.metrics["mbaas/stall_share"]
    delivered = client.get_metric_history(run.info.run_id, f"mbaas/{feed.name}/delivered_samples")
    assert [(each.step, each.value) for each in delivered] == [(1, SAMPLES), (2, 2 * SAMPLES)]


def test_wandb_has_each_report(feed: OneOfMany, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, without a network: the data to send is written to a file."""
    pytest.importorskip("wandb", reason="pip install wandb")
    from ray.air.integrations.wandb import WandbLoggerCallback

    monkeypatch.setenv("WANDB_MODE", "offline")  # for the callback, which then needs no key
    callback = WandbLoggerCallback(project="search", mode="offline", dir=str(tmp_path))  # for the run
    results = search(trial, feed.name, space={"feed": feed.name}, callbacks=[callback])
    (result,) = results
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    first, second = wandb_history(file)
    assert {name for name in second if name.startswith("mbaas")} == names(feed.name)
    assert second["mbaas/stall_share"] == result.metrics["mbaas/stall_share"]
    assert [row[f"mbaas/{feed.name}/delivered_samples"] for row in (first, second)] == [SAMPLES, 2 * SAMPLES]


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows that a run logged."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(data) for data in leveldb_records(file.read_bytes()[7:], first=7)]
    items = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in row} for row in items]


def leveldb_records(data: bytes, *, first: int) -> Iterator[bytes]:
    """The records of a LevelDB log whose first block begins with a W&B header of ``first`` bytes."""
    at, record = 0, b""
    while at + 7 <= len(data):
        left = 32768 - (first + at) % 32768
        if left < 7:  # a block ends with zeros if a record header does not fit
            at += left
            continue
        length, kind = struct.unpack("<4xHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of a record
            yield record
            record = b""
