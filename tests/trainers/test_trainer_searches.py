"""Trials of a search with Lightning or the Hugging Face Trainer share a feed, and resume in mid-epoch after failures.

The programs are those of docs/how-to/trainers.md.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning
import pytest
import ray
import torch
import trainer_feeds
from ray import tune
from trainer_feeds import BATCH, EVERY, SAMPLES, STEPS, finished, ids_of, loss_of, model, run_block
from transformers import Trainer, TrainerCallback, TrainingArguments

import mbaas
from support.waiting import wait_until
from tune_integration import FeedCallback

pytestmark = pytest.mark.slow

TRIALS = 2

REPORT_AT = STEPS + 5
"""Step of the first report, in the middle of the second epoch; one trial may fail after it."""

for module in (sys.modules[__name__], trainer_feeds):
    ray.cloudpickle.register_pickle_by_value(module)  # trials run without this folder on their path


class EndOfRunError(Exception):
    """Ends a trial after its report."""


@pytest.fixture
def folder(tmp_path: Path, fails: bool) -> Path:
    """A folder where each trial writes the sample ids that it receives; without a file "failed", one trial fails."""
    folder = tmp_path / "seen"
    folder.mkdir()
    if not fails:
        (folder / "failed").touch()
    return folder


class FirstReports(tune.Callback):
    """The first report of each trial."""

    def __init__(self) -> None:
        self.metrics: dict[str, dict[str, Any]] = {}

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        self.metrics.setdefault(trial.trial_id, result)


def feeds(training: mbaas.Feed, validating: mbaas.Feed) -> dict[str, str]:
    """Changes to a program of the page. Trials wait for each other, because their epochs are short."""
    return {
        'get_loader("train"': 'get_loader("train", start="epoch"',
        '"train"': repr(training.name),
        '"validation"': repr(validating.name),
    }


def record(folder: Path, batch: dict[str, Any]) -> None:
    """Append a minibatch's sample ids to the trial's file."""
    with (folder / tune.get_context().get_trial_id()).open("a") as file:
        file.write(f"{json.dumps(ids_of(batch))}\n")


def fail_once(folder: Path, step: int) -> None:
    """Fail in the first trial that has reported, unless that is done."""
    if step == REPORT_AT and not (folder / "failed").exists():
        (folder / "failed").touch()
        raise EndOfRunError


def check(folder: Path, training: mbaas.Feed, reports: FirstReports) -> None:
    """Each trial received every sample once in both epochs; no sample was prepared twice before the first reports."""
    assert (folder / "failed").exists()
    wait_until(lambda: training.status().consumers == (), "the trials have left")
    assert len(reports.metrics) == TRIALS
    for trial in reports.metrics:
        seen = [json.loads(line) for line in (folder / trial).read_text().splitlines()]
        assert [len(ids) for ids in seen] == [*[BATCH] * (STEPS - 1), SAMPLES % BATCH] * 2
        assert [sorted(chain(*seen[at : at + STEPS])) for at in (0, STEPS)] == [EVERY] * 2
        assert finished(training, trial) == [(0, True), (1, True)]
    metrics = [each["mbaas"][training.name] for each in reports.metrics.values()]
    assert [each["delivered_samples"] for each in metrics] == [SAMPLES + 5 * BATCH] * TRIALS
    assert sum(each["prepared_samples"] for each in metrics) == 2 * SAMPLES, "a block has a whole epoch"


class Model(torch.nn.Module):
    """Model for the Hugging Face Trainer."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self._folder = model(), folder

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor, sample_id: torch.Tensor) -> dict[str, Any]:
        if self.training:
            record(self._folder, {"sample_id": sample_id})
        return {"loss": loss_of(self.net, {"image": pixel_values, "label": labels})}


class Fail(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        fail_once(self._folder, state.global_step)


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hyperparameter_search_of_hugging_face(training, validating, folder, tmp_path):
    """Without `ray_clean`, because Ray pins the parameters of `tune.with_parameters` until the driver ends."""
    reports = FirstReports()
    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": REPORT_AT, "save_steps": REPORT_AT}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    options = TrainingArguments(
        str(tmp_path / "out"), num_train_epochs=2, label_names=["labels"], per_device_train_batch_size=BATCH,
        **often, **quiet,
    )  # fmt: skip
    trainer = Trainer(
        args=options,
        model_init=lambda: Model(folder),
        eval_dataset=validating.name,
        callbacks=[mbaas.transformers_callback(), Fail(folder)],
    )
    names = {
        "trainer": trainer,
        "reports": reports,
        "columns": {"pixel_values": "image", "labels": "label", "sample_id": "sample_id"},
        "options": {
            "hp_space": lambda _: {"learning_rate": tune.uniform(0.1, 0.2)},
            "max_failures": 1,
            "storage_path": str(tmp_path / "tune"),
            "verbose": 0,
        },
    }
    search = {"n_trials=8": f"n_trials={TRIALS}, **options", "callbacks=[": "callbacks=[reports, "}
    run_block("trainer.hyperparameter_search", names, {**feeds(training, validating), **search})
    best = names["best"]
    assert 0.1 <= best.hyperparameters["learning_rate"] <= 0.2
    check(folder, training, reports)


class Net(lightning.LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.net, self._folder = model(), config["folder"]

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        fail_once(self._folder, self.global_step)

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        record(self._folder, batch)
        return loss_of(self.net, batch)

    def validation_step(self, batch: dict[str, Any], number: int) -> None:
        self.log("loss", loss_of(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.long
@pytest.mark.parametrize("fails", [True])
def test_lightning_in_trials_of_tune(training, validating, ray_clean, folder, tmp_path):
    reports = FirstReports()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    often = {"val_check_interval": REPORT_AT, "check_val_every_n_epoch": None, "accelerator": "cpu"}
    names = {"lightning": lightning, "Net": Net, "options": {**quiet, **often}}
    changes = {**feeds(training, validating), "max_epochs=2": "max_epochs=2, **options"}
    run_block("TuneReportCheckpointCallback", names, changes)
    results = tune.Tuner(
        names["train"],
        param_space={"folder": folder},
        tune_config=tune.TuneConfig(num_samples=TRIALS),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            callbacks=[reports, FeedCallback(training.name, validating.name)],
            failure_config=tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    ).fit()
    assert results.num_errors == 0
    check(folder, training, reports)
