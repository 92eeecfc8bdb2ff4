"""Trains a run: the paper's Algorithm 1 with lightning around it. A stopped run resumes."""

import tempfile

import torch
from omegaconf import DictConfig, OmegaConf

from cosinegate.callbacks.kept import KeptCallbacks
from cosinegate.callbacks.wandb_end import ending_wandb
from cosinegate.config.checks import validate
from cosinegate.config.choices import Validation
from cosinegate.config.identity import run_folder
from cosinegate.data.folder import read_images
from cosinegate.data.module import ImageData
from cosinegate.hardware.memory import keep_freed_memory
from cosinegate.networks.flops import dense_flops
from cosinegate.runs.folder import own_record
from cosinegate.runs.record import Record
from cosinegate.runs.summary import show_finished, show_record
from cosinegate.terminal import console
from cosinegate.training.build import build_module
from cosinegate.training.initial_weights import load_initial_weights
from cosinegate.training.resume import best_checkpoint
from cosinegate.training.start import go_on, holding, is_finished, name_another_schedule, run_facts
from cosinegate.training.trainer import build_trainer, check_batches, lightning_mistakes, quiet


def train(config: DictConfig, job: str | None = None) -> Record:
    """Trains, evaluates with hard gates, and returns the run's record. A finished run is left as it is.

    `job` names the job among several; then the caller prints the results.
    """
    quiet()
    keep_freed_memory()
    validate(config)
    read_images(config.data)  # a folder's images are a part of what the run is
    if config.trainer.fast_dev_run:
        return try_a_few_batches(config)
    folder, facts = run_folder(config), run_facts(config)
    before = own_record(folder, config, facts)
    if is_finished(before):
        return before if job else show_finished(before, folder)
    config.run_dir = str(folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if job is None and before is None:
        name_another_schedule(config, folder)

    data = ImageData(config.data, config.seed, shuffle=not config.trainer.overfit_batches)
    module = build_module(config)  # the network with its gates, and the objective
    if config.weights is not None:
        facts["weights"] = load_initial_weights(module, config, folder, before)
    dense = dense_flops(module.network, data.image_set.shape)
    kept = KeptCallbacks(config, folder=folder, facts=facts, dense_flops=dense, job=job)
    trainer = build_trainer(config, kept.first, kept.last, kept.metrics)
    check_batches(config, trainer, data, job)
    data.prepare_data()

    with holding(folder, kept.stop, wait=job is not None):
        before = own_record(folder, config, facts)  # another process may have trained it while this one was starting
        if is_finished(before):
            return before if job else show_finished(before, folder)
        checkpoint = go_on(folder, config, before, module, trainer, kept, job)
        with ending_wandb(), lightning_mistakes():
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            held_out = config.data.validation is Validation.holdout
            chosen = best_checkpoint(folder, kept.metrics.rows, module) if held_out else None
            (tested,) = trainer.test(module, datamodule=data, ckpt_path=chosen, weights_only=True, verbose=False)
        record = kept.finish(trainer, tested["test/acc"], test_of="best" if chosen else "last")
    if job is None:
        show_record(record, folder)
    return record


def try_a_few_batches(config: DictConfig) -> Record:
    """Trains, validates and tests a few batches as a run would, in a temporary folder."""
    batches = int(config.trainer.fast_dev_run)
    short = {f"limit_{stage}_batches": batches for stage in ("train", "val", "test")}
    short |= {"fast_dev_run": False, "max_epochs": 1, "max_steps": -1, "overfit_batches": 0}
    short |= {"check_val_every_n_epoch": 1, "profiler": None}
    with tempfile.TemporaryDirectory() as folder:
        tried = OmegaConf.merge(config, {"trainer": short, "run_dir": f"{folder}/run", "runs_dir": folder})
        tried.logger = {}
        record = train(tried, "fast_dev_run")
    what = "a batch" if batches == 1 else f"{batches} batches"
    console.say(f"fast_dev_run: {what} of training, validation and test went through; nothing is kept")
    return record
