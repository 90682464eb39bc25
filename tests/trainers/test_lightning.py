"""In Lightning's `Trainer.fit`, each trainer epoch is one loader epoch, also after a restart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rank_processes import SHARES, notes, run
from trainer_feeds import EVERY, SAMPLES, STEPS, finished, ids_of, join, loss_of, model, run_block

import mbaas
from support.waiting import wait_until

pytestmark = [
    pytest.mark.usefixtures("ray_clean"),
    pytest.mark.filterwarnings("ignore:::lightning"),  # about its own deprecated calls, few workers and rare logging
]

EPOCHS = 3
EXACT = dict.fromkeys(range(EPOCHS), EVERY)


class Net(lightning.LightningModule):
    """Model that records the sample ids of each trainer epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.seen: dict[int, list[int]] = defaultdict(list)
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        self.seen[self.current_epoch] += ids_of(batch)
        return loss_of(self.net, batch)

    def validation_step(self, batch: dict[str, Any], number: int) -> None:
        self.validated += ids_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class EndOfRunError(Exception):
    """Ends a run after its checkpoint."""


class Save(Callback):
    """Callback that saves a checkpoint in a given trainer hook and ends the run."""

    def __init__(self, path: Path, hook: str, epoch: int, number: int = STEPS - 1) -> None:
        self._path, self._at = path, (hook, epoch, number)

    def _reach(self, trainer: lightning.Trainer, hook: str, number: int = STEPS - 1) -> None:
        if (hook, trainer.current_epoch, number) == self._at and not trainer.sanity_checking:
            trainer.save_checkpoint(self._path)
            raise EndOfRunError

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._reach(trainer, "batch", batch_idx)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._reach(trainer, "epoch")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._reach(trainer, "validation", trainer.fit_loop.epoch_loop.batch_idx)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., lightning.Trainer]:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def make(**options: Any) -> lightning.Trainer:
        return lightning.Trainer(
            **{
                "max_epochs": EPOCHS,
                "accelerator": "cpu",
                "devices": 1,
                "default_root_dir": tmp_path,
                **quiet,
                **options,
            }
        )

    return make


@pytest.fixture
def validation(validating: mbaas.Feed) -> Iterator[mbaas.Loader]:
    with join(validating, "lightning") as loader:
        yield loader


def sorted_epochs(*models: Net) -> dict[int, list[int]]:
    """Sorted sample ids of each epoch, over several runs."""
    together: dict[int, list[int]] = defaultdict(list)
    for each in models:
        for epoch, ids in each.seen.items():
            together[epoch] += ids
    return {epoch: sorted(ids) for epoch, ids in together.items()}


def test_each_epoch_is_exact_and_so_is_each_validation(training, validation, trainer):
    net = Net()
    with join(training, "whole") as loader:
        trainer(num_sanity_val_steps=2).fit(net, loader, validation)
        assert loader.epoch == EPOCHS
        wait_until(lambda: len(finished(training, "whole")) == EPOCHS, "the ledgers have arrived")
    assert sorted_epochs(net) == EXACT
    assert all(exact for _, exact in finished(training, "whole"))
    assert sorted(net.validated[-EPOCHS * SAMPLES :]) == sorted(EVERY * EPOCHS), "after two minibatches of the check"


@pytest.mark.parametrize("validates", [False, True], ids=["alone", "validating"])
@pytest.mark.parametrize(
    "place",
    [("batch", 0, 4), ("batch", 1, 0), ("batch", 1, 7), ("batch", 0, STEPS - 1), ("batch", 1, STEPS - 1)],
    ids=["in the middle", "first minibatch", "in the middle of the second", "last minibatch", "last of the second"],
)
def test_a_run_resumes_exactly_where_it_was_saved(training, validation, trainer, tmp_path, place, validates):
    path, nets = tmp_path / "saved.ckpt", (Net(), Net())
    loaders = [validation] if validates else []
    with join(training, "resumed") as loader:
        with pytest.raises(EndOfRunError):
            trainer(callbacks=[Save(path, *place)]).fit(nets[0], loader, *loaders)
    with join(training, "resumed") as loader:
        trainer().fit(nets[1], loader, *loaders, ckpt_path=path)
        assert loader.epoch == EPOCHS
        assert loader.ledger.exact
    assert sorted_epochs(*nets) == EXACT


@pytest.mark.parametrize("place", [("epoch", 0), ("epoch", 1), ("validation", 0), ("validation", 1)], ids=str)
def test_a_run_resumes_between_two_epochs(training, validation, trainer, tmp_path, monkeypatch, place):
    """Lightning loads no loader state from a checkpoint of `on_train_epoch_end`; the guide passes it to `join`."""
    path, nets = tmp_path / "last.ckpt", (Net(), Net())
    with join(training, "between") as loader:
        with pytest.raises(EndOfRunError):
            trainer(callbacks=[Save(path, *place)]).fit(nets[0], loader, validation)
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    run_block("last.ckpt", names, {'"train"': repr(training.name)})
    with names["loader"] as loader:
        trainer().fit(nets[1], loader, validation, ckpt_path=path)
        assert loader.epoch == EPOCHS
    assert sorted_epochs(*nets) == EXACT


def test_a_run_resumes_after_a_validation_in_the_middle_of_an_epoch(training, validation, trainer, tmp_path):
    path, nets, often = tmp_path / "saved.ckpt", (Net(), Net()), {"val_check_interval": 5}
    with join(training, "often") as loader:
        with pytest.raises(EndOfRunError):
            trainer(callbacks=[Save(path, "validation", 1, 4)], **often).fit(nets[0], loader, validation)
    with join(training, "often") as loader:
        trainer(**often).fit(nets[1], loader, validation, ckpt_path=path)
    assert sorted_epochs(*nets) == EXACT


def test_accumulated_gradients_step_at_the_end_of_each_epoch(training, trainer):
    net = Net()
    with join(training, "accumulating") as loader:
        runs = trainer(accumulate_grad_batches=4)
        runs.fit(net, loader)
    assert sorted_epochs(net) == EXACT
    assert runs.global_step == EPOCHS * -(-STEPS // 4)


def test_a_run_resumes_between_two_steps_of_accumulated_gradients(training, trainer, tmp_path):
    """The checkpoint follows the sixth minibatch: 4 are in a step, and 2 are not yet."""
    path, nets = tmp_path / "saved.ckpt", (Net(), Net())
    with join(training, "gathering") as loader:
        with pytest.raises(EndOfRunError):
            trainer(callbacks=[Save(path, "batch", 1, 5)], accumulate_grad_batches=4).fit(nets[0], loader)
    with join(training, "gathering") as loader:
        trainer(accumulate_grad_batches=4).fit(nets[1], loader, ckpt_path=path)
        assert loader.ledger.exact
    assert sorted_epochs(*nets) == EXACT


def test_epochs_that_are_limited_begin_anew_each_time(training, validation, trainer):
    """The trainer uses 5 minibatches of each loader epoch and abandons the rest."""
    net = Net()
    with join(training, "limited") as loader:
        trainer(limit_train_batches=5, limit_val_batches=2, num_sanity_val_steps=0).fit(net, loader, validation)
        assert loader.state_dict()["epoch"] == EPOCHS - 1
        assert loader.state_dict()["position"] == 5 * 16
    assert {epoch: len(set(ids)) for epoch, ids in net.seen.items()} == dict.fromkeys(range(EPOCHS), 5 * 16)
    assert net.validated == EVERY[: 2 * 16] * EPOCHS


def test_a_run_of_so_many_steps_ends_in_the_middle_of_an_epoch_and_the_next_one_begins_a_whole_one(training, trainer):
    net = Net()
    with join(training, "counted") as loader:
        trainer(max_steps=STEPS + 3).fit(net, loader)
        assert {epoch: len(ids) for epoch, ids in net.seen.items()} == {0: SAMPLES, 1: 3 * 16}
        assert loader.state_dict()["position"] == 3 * 16
        again = Net()
        trainer(max_epochs=1).fit(again, loader)
        assert sorted_epochs(again) == {0: EVERY}
        assert loader.epoch == 3, "one whole, one left, one whole"


@pytest.mark.long
def test_two_processes_share_each_epoch_and_go_on_in_its_middle(training, tmp_path):
    """Train two epochs with a checkpoint after minibatch 5 of the second, then resume there and finish a third."""
    run("lightning_processes.py", training.name, str(tmp_path))
    first, second = notes(tmp_path, "first"), notes(tmp_path, "second")
    assert all(seen["exact"] for seen in first + second)
    heads, tails = ([seen["epochs"]["1"] for seen in ranks] for ranks in (first, second))
    went_on = [head[:5] + tail for head, tail in zip(heads, tails, strict=True)]
    for minibatches in ([seen["epochs"]["0"] for seen in first], heads, went_on, [s["epochs"]["2"] for s in second]):
        assert [[len(ids) for ids in share] for share in minibatches] == SHARES
        assert sorted(chain(*minibatches[0], *minibatches[1])) == EVERY
