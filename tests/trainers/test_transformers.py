"""Loaders serve as train and evaluation DataLoader of the Hugging Face `Trainer`, over stops and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hugging_face import FeedTrainer, Net
from rank_processes import SHARES, notes, run
from trainer_feeds import BATCH, EVERY, SAMPLES, STEPS, finished, join
from transformers import Trainer, TrainerCallback, TrainingArguments

import mbaas
from support.waiting import wait_until
from tune_integration import get_loader

pytestmark = pytest.mark.usefixtures("ray_clean")

EPOCHS = 3


@pytest.fixture
def validation(validating: mbaas.Feed) -> Iterator[mbaas.Loader]:
    with join(validating, "transformers") as loader:
        yield loader


@pytest.fixture
def trainer(tmp_path: Path, validation: mbaas.Loader) -> Callable[..., FeedTrainer]:
    def make(net: Net, loader: mbaas.Loader, *, stop_at: int = 0, **options: Any) -> FeedTrainer:
        quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
        given: dict[str, Any] = {
            "num_train_epochs": EPOCHS,
            "label_names": ["label"],
            "use_cpu": True,
            **quiet,
            **options,
        }
        settings = TrainingArguments(str(tmp_path), per_device_train_batch_size=loader.batch_size, **given)
        return FeedTrainer(loader, validation, model=net, args=settings, stop_at=stop_at)

    return make


def sorted_epochs(*nets: Net) -> list[list[int]]:
    """Sorted sample ids of each epoch, over several runs."""
    minibatches = [ids for net in nets for ids in net.trained]
    return [sorted(chain.from_iterable(minibatches[at : at + STEPS])) for at in range(0, len(minibatches), STEPS)]


def test_each_epoch_is_exact_and_it_counts_samples_right(training, trainer, validation):
    net = Net()
    with join(training, "whole") as loader:
        runs = trainer(net, loader)
        assert runs.num_examples(loader) == SAMPLES
        runs.train()
        assert runs.state.global_step == EPOCHS * STEPS
        wait_until(lambda: len(finished(training, "whole")) == EPOCHS, "the ledgers have arrived")
    assert sorted_epochs(net) == [EVERY] * EPOCHS
    assert all(exact for _, exact in finished(training, "whole"))


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("place", ["middle", "end", "second"])
def test_a_run_resumes_exactly_where_it_was_saved(training, trainer, tmp_path, place, accumulated):
    updates = -(-STEPS // accumulated)
    stop_at = {"middle": 2, "end": updates, "second": updates + 3}[place]
    nets = Net(), Net()
    with join(training, "resumed") as loader:
        trainer(nets[0], loader, stop_at=stop_at, gradient_accumulation_steps=accumulated).train()
    saved = tmp_path / f"checkpoint-{stop_at}"
    with join(training, "resumed") as loader:
        runs = trainer(nets[1], loader, gradient_accumulation_steps=accumulated)
        runs.train(resume_from_checkpoint=str(saved))
        assert runs.state.global_step == EPOCHS * updates
        assert loader.epoch == EPOCHS
        assert loader.ledger.exact
    assert sorted_epochs(*nets) == [EVERY] * EPOCHS
    assert nets[0].trained
    assert nets[1].trained


class StopAfterEpoch(TrainerCallback):
    """Ends a run after its first epoch, including evaluation and checkpoint."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = True


def test_a_run_resumes_between_two_epochs(training, trainer, validation, tmp_path):
    often = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    nets = Net(), Net()
    with join(training, "between") as loader:
        runs = trainer(nets[0], loader, **often)
        runs.add_callback(StopAfterEpoch())
        runs.train()
    saved = tmp_path / f"checkpoint-{STEPS}"
    with join(training, "between") as loader:
        trainer(nets[1], loader, **often).train(resume_from_checkpoint=str(saved))
        assert loader.epoch == EPOCHS
    assert [len(net.trained) for net in nets] == [STEPS, 2 * STEPS]
    assert sorted_epochs(*nets) == [EVERY] * EPOCHS
    assert sorted(net.evaluated for net in nets) == sorted([EVERY, EVERY * 2])


def test_a_run_resumes_from_a_checkpoint_for_ray_tune(training, trainer, tmp_path):
    """As in `hyperparameter_search`, where the Trainer writes such a checkpoint for each report, and calls no hook."""
    nets = Net(), Net()
    with join(training, "tuned") as loader:
        runs = trainer(nets[0], loader, stop_at=STEPS + 3)
        runs.train()
        runs._tune_save_checkpoint(str(tmp_path / "tune"))
    with join(training, "tuned") as loader:
        trainer(nets[1], loader).train(resume_from_checkpoint=str(tmp_path / "tune" / f"checkpoint-{STEPS + 3}"))
        assert loader.epoch == EPOCHS
        assert loader.ledger.exact
    assert sorted_epochs(*nets) == [EVERY] * EPOCHS


def test_a_run_that_so_many_steps_ended_goes_on_in_the_middle_of_its_epoch(training, trainer, tmp_path):
    nets, steps = (Net(), Net()), STEPS + 3
    with join(training, "counted") as loader:
        trainer(nets[0], loader, max_steps=steps, stop_at=steps).train()
    saved = tmp_path / f"checkpoint-{steps}"
    with join(training, "counted") as loader:
        trainer(nets[1], loader, max_steps=2 * STEPS).train(resume_from_checkpoint=str(saved))
        assert loader.epoch == 2
        assert loader.ledger.exact
    assert [len(net.trained) for net in nets] == [steps, 2 * STEPS - steps]
    assert sorted_epochs(*nets) == [EVERY] * 2


def test_trials_of_an_optuna_study_join_one_after_the_other(training, validating, tmp_path):
    """In one process, so that a trial's loader takes the place of the one before."""
    from optuna.samplers import GridSampler  # imported here because it takes a second

    nets: list[Net] = []

    def make() -> Net:
        nets.append(Net())
        return nets[-1]

    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    options = TrainingArguments(
        str(tmp_path), num_train_epochs=2, label_names=["label"], eval_strategy="epoch", **quiet
    )
    trainer = Trainer(args=options, model_init=make, eval_dataset=validating.name)
    trainer.get_train_dataloader = lambda: get_loader(training.name, batch_size=trainer.args.train_batch_size)
    trainer.get_eval_dataloader = lambda feed: get_loader(feed)
    sizes = [16, 21]
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"per_device_train_batch_size": trial.suggest_categorical("size", sizes)},
        backend="optuna",
        n_trials=2,
        sampler=GridSampler({"size": sizes}),
    )
    assert best.hyperparameters["size"] in sizes
    trained = [net for net in nets if net.trained]
    assert sorted(len(net.trained[0]) for net in trained) == sizes
    for net in trained:
        steps = len(net.trained) // 2
        assert [sorted(chain.from_iterable(part)) for part in (net.trained[:steps], net.trained[steps:])] == [EVERY] * 2
        assert sorted(net.evaluated) == sorted(EVERY * 2)
    for loader in (trainer.callback_handler.train_dataloader, trainer.callback_handler.eval_dataloader):
        loader.close()


def test_it_trains_twice_on_the_same_loader(training, trainer):
    net = Net()
    with join(training, "twice") as loader:
        runs = trainer(net, loader, num_train_epochs=1)
        runs.train()
        runs.train()
        assert loader.epoch == 2
    assert sorted_epochs(net) == [EVERY] * 2


def test_it_evaluates_every_few_steps_with_a_second_feed(training, trainer, validation):
    net = Net()
    with join(training, "evaluating") as loader:
        runs = trainer(net, loader, eval_strategy="steps", eval_steps=5, num_train_epochs=1)
        runs.train()
    assert sorted_epochs(net) == [EVERY]
    assert sorted(net.evaluated) == sorted(EVERY * 3), "after 5 steps, after 10 and at the end"
    assert validation.ledger.exact


def test_metrics_by_the_minibatch_are_summed_up_at_the_end_of_an_evaluation(training, trainer):
    sizes: list[int] = []

    def metrics(minibatch: Any, compute_result: bool) -> dict[str, int]:
        sizes.append(len(minibatch.label_ids))
        return {"all": sum(sizes)} if compute_result else {}

    with join(training, "summing") as loader:
        runs = trainer(Net(), loader, batch_eval_metrics=True)
        runs.compute_metrics = metrics
        assert runs.evaluate()["eval_all"] == SAMPLES


def test_a_run_of_so_many_steps_ends_in_the_middle_of_an_epoch(training, trainer):
    net = Net()
    with join(training, "counted") as loader:
        trainer(net, loader, max_steps=STEPS + 3).train()
        assert loader.state_dict()["position"] == 3 * BATCH
        assert loader.epoch == 1
    assert sorted_epochs(net)[0] == EVERY
    assert len(net.trained) == STEPS + 3


@pytest.mark.long
def test_two_processes_share_each_epoch_evaluate_save_and_go_on(training, validating, tmp_path):
    """Train an epoch and 5 minibatches of the next, then resume, finish the second epoch and evaluate."""
    run("two_processes.py", "trainer", training.name, validating.name, str(tmp_path))
    ranks = notes(tmp_path, "rank")
    for epoch in range(2):
        minibatches = [seen["trained"][epoch * STEPS : (epoch + 1) * STEPS] for seen in ranks]
        assert [[len(ids) for ids in share] for share in minibatches] == SHARES
        assert sorted(chain(*minibatches[0], *minibatches[1])) == EVERY
    assert [len(seen["trained"]) for seen in ranks] == [2 * STEPS] * 2
    assert sorted(ranks[0]["evaluated"] + ranks[1]["evaluated"]) == EVERY
    assert [(seen["exact"], seen["samples"]) for seen in ranks] == [(True, SAMPLES)] * 2
