"""With accelerate, `prepare` does not change a loader, and checkpoints include the loader's state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from rank_processes import SHARES, notes, run
from torch.utils.data import DataLoader
from trainer_feeds import EVERY, STEPS, ids_of, join, loss_of, model, read

import mbaas

pytestmark = pytest.mark.usefixtures("ray_clean")


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def validation(validating: mbaas.Feed) -> Iterator[mbaas.Loader]:
    with join(validating, "accelerate") as loader:
        yield loader


def test_prepare_neither_shards_nor_shuffles_nor_reads_ahead(training, accelerator):
    with join(training, "prepared") as loader:
        assert accelerator.prepare(loader) is loader
        for number, _ in enumerate(loader, 1):
            assert loader.state_dict()["position"] == min(number * 16, len(EVERY)), "no minibatch is read ahead"
        assert loader.ledger.exact


@pytest.mark.parametrize("minibatches", [0, 5, STEPS])
def test_save_state_and_load_state_go_on_exactly(training, accelerator, tmp_path, minibatches):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with join(training, "saved") as loader:
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        accelerator.register_for_checkpointing(loader)
        loop, before = iter(loader), []
        for _ in range(minibatches):
            batch = next(loop)
            before += ids_of(batch)
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(tmp_path)
        del loop
    with join(training, "saved") as loader:
        again = Accelerator(cpu=True)
        again.prepare(net, optimizer, loader)
        again.register_for_checkpointing(loader)
        again.load_state(tmp_path)
        assert loader.epoch == 0
        rest = read(loader)
        assert sorted(before + rest) == EVERY
        assert loader.ledger.exact
        assert sorted(read(loader)) == EVERY
        assert loader.epoch == 2


def test_accumulated_gradients_step_at_the_end_of_each_epoch(training, validation, accelerator):
    """13 minibatches are 3 steps of 4 and one of 1, even if a validation runs in between."""
    accelerator.gradient_accumulation_steps = 4
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    stepped = []
    with join(training, "accumulating") as loader:
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for _ in range(2):
            for number, batch in enumerate(loader, 1):
                with accelerator.accumulate(net):
                    accelerator.backward(loss_of(net, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                stepped += [number] * accelerator.sync_gradients
                if number in (4, STEPS):
                    assert sorted(read(validation)) == EVERY
            assert loader.ledger.exact
    assert stepped == [4, 8, 12, STEPS] * 2
    assert not accelerator.gradient_state.in_dataloader


def test_an_epoch_that_is_left_half_way_is_no_loop_of_accelerate_any_more(training, accelerator):
    with join(training, "leaving") as loader:
        for _ in loader:
            assert accelerator.gradient_state.in_dataloader
            assert not accelerator.gradient_state.end_of_dataloader
            assert accelerator.gradient_state.remainder == 0
            break
        assert not accelerator.gradient_state.in_dataloader
        loop = iter(loader)
        assert not accelerator.gradient_state.in_dataloader, "nothing was drawn"
        next(loop)
        assert accelerator.gradient_state.in_dataloader
        del loop
        assert not accelerator.gradient_state.in_dataloader


def test_skip_first_batches_of_a_loader_that_loaded_its_state_reads_the_rest(training, accelerator):
    with join(training, "skipping") as loader:
        loop = iter(loader)
        before = [number for _ in range(5) for number in ids_of(next(loop))]
        state = loader.state_dict()
        del loop
    with join(training, "skipping", state=state) as loader:
        skipping = skip_first_batches(loader, 5)
        assert len(skipping) == STEPS - 5
        assert sorted(before + read(skipping)) == EVERY
        assert loader.ledger.exact


def test_a_rank_is_not_shared_out_once_more(training, accelerator):
    """With two processes, `prepare` wraps a DataLoader like this, and both processes read the wrapper."""
    loaders = [join(training, "wrapped", rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        wrapped = prepare_data_loader(
            DataLoader(loader, batch_size=None), num_processes=2, put_on_device=True, dispatch_batches=True
        )
        with pytest.raises(mbaas.StateError, match=r"a rank's share of 2 already.* prepare the loader itself"):
            next(iter(wrapped))
        del wrapped  # accelerate would treat it as a loader in use
    batches = chain.from_iterable(zip(*loaders, strict=True))
    assert sorted(chain.from_iterable(map(ids_of, batches))) == EVERY
    for loader in loaders:
        loader.close()


def test_ranks_share_every_minibatch_once(training):
    """Ranks join as accelerate processes do, with their index and the number of processes."""
    loaders = [join(training, "processes", rank=rank, world_size=2) for rank in range(2)]
    shares: list[list[int]] = [[], []]
    for batches in zip(*loaders, strict=True):
        for share, batch in zip(shares, batches, strict=True):
            share += ids_of(batch)
    assert sorted(shares[0] + shares[1]) == EVERY
    assert abs(len(shares[0]) - len(shares[1])) <= 1
    for loader in loaders:
        assert loader.ledger.exact
        loader.close()


def test_a_loop_in_two_processes_accumulates_saves_and_goes_on(training, validating, tmp_path):
    """It saves after an epoch and 5 minibatches, and finishes epoch two. 13 minibatches are steps of 4, 4, 4 and 1."""
    run("two_processes.py", "own_loop", training.name, validating.name, str(tmp_path))
    first, second = notes(tmp_path, "rank")
    for epoch in range(2):
        minibatches = [seen["epochs"][epoch] for seen in (first, second)]
        assert [[len(ids) for ids in share] for share in minibatches] == SHARES
        assert sorted(chain(*minibatches[0], *minibatches[1])) == EVERY
    for seen in (first, second):
        assert seen["exact"]
        assert seen["stepped"] == [4, 8, 12, STEPS]
        assert sorted(seen["gathered"]) == EVERY, "accelerate cuts nothing off the last minibatch"
    assert first["weights"] == second["weights"]
