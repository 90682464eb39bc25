"""Lightning in two Ray Train workers: three epochs, then resumed to five. python examples/train_ray_lightning.py"""

import tempfile
from contextlib import nullcontext

import torch
from digit_feeds import digit_feeds
from lightning import Trainer
from ray import train
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from train_lightning import Classifier

import mbaas
from tune_integration import get_loader


def work(config):  # in each worker
    saved = train.get_checkpoint()  # of rank 0, whose loader has the same position as all others
    with saved.as_directory() if saved else nullcontext() as folder:
        path = folder and f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}"
        state = path and torch.load(path)["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        with get_loader("train", state=state) as loader, get_loader("validation") as validation:
            ranks = {"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()], "accelerator": "cpu"}
            report = [RayTrainReportCallback()]
            trainer = Trainer(
                max_epochs=config["epochs"], callbacks=report, logger=False, enable_checkpointing=False, **ranks
            )
            prepare_trainer(trainer).fit(Classifier(), loader, validation, ckpt_path=path)


with tempfile.TemporaryDirectory() as folder, digit_feeds():
    run = train.RunConfig(name="me", storage_path=folder)  # a run of the same name resumes from its last checkpoint
    workers = train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    for epochs in (3, 5):
        end = TorchTrainer(work, train_loop_config={"epochs": epochs}, scaling_config=workers, run_config=run).fit()
        inexact = mbaas.connect("train").status().inexact_epochs
        print(f"after {epochs} epochs: {end.metrics['right']:.1%} right, epochs that were not exact: {inexact}")
