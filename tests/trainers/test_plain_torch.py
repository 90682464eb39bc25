"""In plain PyTorch, a loader works inside a `DataLoader`, after pickling, and with the attributes trainers read."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch.utils.data import DataLoader
from trainer_feeds import BATCH, EVERY, SAMPLES, STEPS, finished, ids_of, join, read, run_block

import mbaas
from support.waiting import wait_until
from tune_integration import get_loader

pytestmark = pytest.mark.usefixtures("ray_clean")


def test_a_dataloader_around_it_gives_its_minibatches_as_they_are(training):
    with join(training, "wrapped") as loader:
        wrapped = DataLoader(loader, batch_size=None)
        assert len(wrapped) == STEPS
        for epoch in range(2):
            batches = list(wrapped)
            assert [len(batch["label"]) for batch in batches] == [BATCH] * (STEPS - 1) + [SAMPLES % BATCH]
            assert sorted(number for batch in batches for number in ids_of(batch)) == EVERY
            assert batches[0]["image"].shape == (BATCH, 3, 8, 8)
            assert (loader.ledger.epoch, loader.ledger.exact) == (epoch, True)


def test_a_dataloader_around_it_goes_on_where_a_state_was_saved(training):
    with join(training, "wrapped") as loader:
        loop = iter(DataLoader(loader, batch_size=None))
        before = [number for _ in range(5) for number in ids_of(next(loop))]
        state = loader.state_dict()
        del loop
    with join(training, "wrapped", state=state) as loader:
        assert sorted(before + read(DataLoader(loader, batch_size=None))) == EVERY
        assert loader.ledger.exact


def test_a_trainer_of_pairs_reads_each_epoch(training, validating):
    """The program of the page for timm, whose train.py also uses these attributes of a loader."""
    names: dict[str, Any] = {"args": SimpleNamespace(batch_size=25), "get_loader": get_loader}
    changes = {'"train"': repr(training.name), '"validation"': repr(validating.name)}
    run_block("loader_eval", names, changes)
    with names["loader_train"] as loader, names["loader_eval"] as validation:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            sizes = []
            for number, (images, labels) in enumerate(loader):  # noqa: B007
                assert (images.dtype, images.shape[1:], labels.dtype) == (torch.float32, (3, 8, 8), torch.int64)
                sizes.append(len(labels))
            assert number == len(loader) - 1
            assert sizes == [25] * 8 + [3]
            assert loader.ledger.exact
            assert sum(len(labels) for _, labels in validation) == SAMPLES


def test_a_dataloader_may_not_stack_minibatches(training):
    with join(training, "stacked") as loader:
        with pytest.raises(mbaas.ConfigError, match=r"would stack them: use DataLoader\(loader, batch_size=None\)"):
            next(iter(DataLoader(loader, batch_size=4)))
        assert sorted(read(loader)) == EVERY


def test_workers_of_a_dataloader_cannot_read_it_and_it_goes_on_by_itself(training):
    with join(training, "forked") as loader:
        with pytest.raises(mbaas.StateError, match=r"use num_workers=0 in a DataLoader"):
            next(iter(DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")))
        assert sorted(read(loader)) == EVERY


def test_minibatches_cannot_be_had_by_number(training):
    """After joins with format="numpy" only, torch does not recognize a loader, so a DataLoader indexes it by number."""
    with join(training, "numbered", format="numpy") as loader:
        with pytest.raises(
            mbaas.ConfigError, match='not by number, got 0: iterate over it, or join with format="torch"'
        ):
            loader[0]


def test_it_says_what_trainers_ask_a_dataloader_for(training):
    with join(training, "asked", batch_size=50) as loader:
        assert (len(loader), loader.batch_size, loader.drop_last, len(loader.dataset)) == (5, 50, False, SAMPLES)
        assert loader.sampler is loader
        assert list(loader.batch_sampler) == [[0], [1], [2], [3], [4]]
        assert (len(loader.batch_sampler), loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (
            5,
            50,
            False,
        )


# ---- minibatches by number: after a restart, accelerate skips the earlier ones ----


def resumed(loader: mbaas.Loader, first: int) -> DataLoader[Any]:
    """DataLoader as `accelerate.skip_first_batches` builds it."""
    numbers = [number for number in loader.batch_sampler if number[0] >= first]
    options = {"collate_fn": loader.collate_fn, "prefetch_factor": loader.prefetch_factor}
    return DataLoader(loader.dataset, batch_sampler=numbers, **options)  # type: ignore[arg-type]


def test_minibatches_by_number_of_a_loader_that_loaded_its_state_are_the_rest(training):
    with join(training, "numbers") as loader:
        loop = iter(loader)
        before = [number for _ in range(5) for number in ids_of(next(loop))]
        state = loader.state_dict()
        rest = read(loop)
    with join(training, "numbers", state=state) as loader:
        assert read(resumed(loader, 5)) == rest
        assert sorted(before + rest) == EVERY
        assert loader.ledger.exact
        assert sorted(read(loader)) == EVERY


def test_minibatches_by_number_pass_over_those_before_the_first(training):
    with join(training, "numbers") as loader:
        loader_state = loader.state_dict()
        whole = read(loader)
        loader.load_state_dict(loader_state)
        assert read(resumed(loader, 5)) == whole[5 * BATCH :]
        assert loader.ledger.exact


def test_minibatches_before_the_loaded_state_cannot_be_had_by_number(training):
    with join(training, "numbers") as loader:
        loop = iter(loader)
        for _ in range(5):
            next(loop)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(
            mbaas.StateError, match=r"minibatch 3 of the epoch was requested.* continues at minibatch 5"
        ):
            read(resumed(loader, 3))


# ---- `set_epoch` ----


@pytest.mark.parametrize("minibatches", [0, 5, STEPS])
def test_of_a_loaded_state_set_epoch_leaves_what_is_to_come(training, minibatches):
    """In mid-epoch the rest remains. At an epoch's end the next loop reads the next epoch, and is not empty."""
    with join(training, "told") as loader:
        loop = iter(loader)
        before = [number for _ in range(minibatches) for number in ids_of(next(loop))]
        state = loader.state_dict()
        del loop
    with join(training, "told", state=state) as loader:
        loader.set_epoch(0)
        loader.set_epoch(1)
        assert loader.epoch == (minibatches == STEPS)
        assert sorted(read(loader) + before * (minibatches < STEPS)) == EVERY
        assert loader.ledger.exact
        assert loader.epoch == 1 + (minibatches == STEPS)


def test_set_epoch_between_epochs_and_in_their_middle_changes_nothing(training):
    with join(training, "told") as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            loop = iter(loader)
            loader.set_epoch(epoch)
            first = ids_of(next(loop))
            loader.set_epoch(epoch)
            assert sorted(first + read(loop)) == EVERY
        assert loader.epoch == 2


# ---- pickles ----


@pytest.mark.parametrize("minibatches", [0, 5, STEPS])
def test_a_pickle_joins_again_and_goes_on_in_its_place(training, minibatches):
    with join(training, "moved", batch_size=BATCH) as loader:
        loop = iter(loader)
        before = [number for _ in range(minibatches) for number in ids_of(next(loop))]
        with pickle.loads(pickle.dumps(loader)) as other:
            assert sorted(before + read(other)) == EVERY
            assert other.ledger.exact
            with pytest.raises(mbaas.StateError, match="'moved' joined again elsewhere"):
                read(loader)
        del loop


@ray.remote(num_cpus=0)
def epoch_of(loader: mbaas.Loader) -> tuple[list[int], str]:
    with loader:  # without `read`: this process cannot import the modules of this folder
        return [int(number) for batch in loader for number in batch["sample_id"]], repr(loader)


def test_a_pickle_joins_in_another_process_as_its_own_consumer_unless_it_has_a_name(training):
    with mbaas.join(training.name, batch_size=50) as loader:
        ids, text = ray.get(epoch_of.remote(loader))
        assert sorted(ids) == EVERY
        assert "batch_size=50" in text
        assert text.partition("consumer=")[2].partition(",")[0] not in repr(loader)
        assert sorted(read(loader)) == EVERY, "it keeps its position"


def test_pickles_of_all_ranks_go_on_together(training):
    loaders = [join(training, "ranks", rank=rank, world_size=2) for rank in range(2)]
    loops = [iter(loader) for loader in loaders]
    seen = [ids_of(next(loop)) for _ in range(5) for loop in loops]
    pickles = [pickle.dumps(loader) for loader in loaders]
    for loader in loaders:
        loader.close()
    others = [pickle.loads(each) for each in pickles]
    loops = [iter(loader) for loader in others]
    for batches in zip(*loops, strict=True):
        seen += map(ids_of, batches)
    assert sorted(number for ids in seen for number in ids) == EVERY
    for loader in others:
        assert loader.ledger.exact
        loader.close()


def test_a_loader_that_is_closed_does_not_pickle(training):
    loader = join(training, "closed")
    loader.close()
    with pytest.raises(mbaas.StateError, match="'closed' is closed; join the feed again"):
        pickle.dumps(loader)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_would_take_its_place_and_is_refused(training, copied):
    with join(training, "one") as loader:
        with pytest.raises(mbaas.StateError, match="a copy would replace consumer 'one'"):
            copied(loader)
        assert sorted(read(loader)) == EVERY


def test_every_ledger_arrives_though_the_loop_never_sees_the_end(training):
    with join(training, "counting") as loader:
        for _ in range(3):
            loop = iter(loader)
            for _ in range(len(loader)):
                next(loop)
        wait_until(lambda: len(finished(training, "counting")) == 3, "the ledgers have arrived")
    assert finished(training, "counting") == [(0, True), (1, True), (2, True)]


def test_a_loader_that_ray_train_prepares_for_ranks_has_a_remedy(training):
    """With several ranks, `ray.train.torch.prepare_data_loader` begins with this attribute."""
    with join(training, "prepared for ranks") as loader:
        assert not hasattr(loader, "worker_init_fn")
        with pytest.raises(AttributeError, match=r"needs no prepare_data_loader: get_loader already divides"):
            _ = loader.worker_init_fn
