"""Training: what every recipe needs around the aligner, and nothing specific to one recipe.

A workload (`workload.py`) has a model, batches and a validation. `train` (`loop.py`) is the loop:
learning rate, micro-batches, aligned backward, clipping, optimizer step, log, validation,
checkpoint. A run is a folder: its config, its signature, its metrics, its checkpoints. Training
into a folder that holds a run continues it, bit for bit on a CPU, wherever it was killed.

    config.py       typed settings from TOML and `section.key=value`; errors that name the key
    settings.py     [train], [sampling], RunConfig; the signature of a run; opening a trained run
    align.py        [align]: rule, granularity, engine -> Aligner
    optimizer.py    [optimizer]: Adam, learning rate, clipping; steps that can be skipped
    workload.py     what a recipe gives to the loop
    stream.py       batches of rows drawn from tasks, of one size or any; prefetched in a thread
    loop.py         train(workload, config, run)
    step.py         one optimizer step, eager or as a CUDA graph
    state.py        the state of a run between two steps, saved and restored as one
    checkpoint.py   atomic checkpoints; best, averaged, last weights by name
    weights.py      weights on disk: one file, or shards
    log.py          metrics, sums between entries, the progress bar
    writers.py      where metrics go too: TensorBoard, trackers, your own
    environment.py  device, precision, random state, threads, signals
    job.py          the processes that train one run together
    parallel.py     a model replicated in them, or divided among them

A recipe's config extends `RunConfig` with sections of its own:

    class TaggingConfig(RunConfig):
        data: DataConfig

    settings = config.load(TaggingConfig, "ner.toml", ["optimizer.lr=3e-5", "train.seed=2"])
"""

from gradvac.engine import RankError
from gradvac.lab.training import checkpoint, config
from gradvac.lab.training.align import AlignConfig
from gradvac.lab.training.config import ConfigError, Section
from gradvac.lab.training.environment import choose_device, seed_everything
from gradvac.lab.training.job import join
from gradvac.lab.training.log import Display
from gradvac.lab.training.loop import DivergedError, Result, train
from gradvac.lab.training.settings import FromRun, RunConfig, SamplingConfig, TrainConfig
from gradvac.lab.training.stream import Prefetch, RowBatch, RowStream, TaskStream, TensorBatch
from gradvac.lab.training.weights import CheckpointError
from gradvac.lab.training.workload import FULL_BATCH, BatchSlice, StepLosses, Workload
from gradvac.lab.training.writers import Writer

__all__ = [
    "FULL_BATCH",
    "AlignConfig",
    "BatchSlice",
    "CheckpointError",
    "ConfigError",
    "Display",
    "DivergedError",
    "FromRun",
    "Prefetch",
    "RankError",
    "Result",
    "RowBatch",
    "RowStream",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "StepLosses",
    "TaskStream",
    "TensorBatch",
    "TrainConfig",
    "Workload",
    "Writer",
    "checkpoint",
    "choose_device",
    "config",
    "join",
    "seed_everything",
    "train",
]
