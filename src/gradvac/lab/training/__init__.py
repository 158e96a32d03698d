"""Training: what every recipe needs around the aligner, and nothing specific to one recipe.

A recipe (`recipe.py`) owns a model, batches and a validation. `train` (`loop.py`) is the one loop:
learning rate, micro-batches, aligned backward, clipping, optimizer step, log, validation,
checkpoint. A run is a folder: its config, its signature, its metrics, its checkpoints. Training
into a folder that holds a run continues it, bit for bit on a CPU, wherever it was killed.

    config.py       typed settings from TOML and `section.key=value`; errors that name the key
    _mistakes.py    pydantic's errors in our words
    toml.py         TOML written, and single values read
    settings.py     [train] and what all recipes configure: RunConfig
    align.py        [align]: rule, granularity, engine -> Aligner
    sampling.py     [sampling]: tasks drawn by temperature; effective epochs
    passes.py       every task's rows, in a new random order on every pass
    row_stream.py   batches of rows drawn from tasks, and an endless stream of them
    optimizer.py    [optimizer]: Adam, learning rate, clipping; steps that can be skipped
    ranks.py        the processes that train one run together
    meeting.py      where they meet
    shards.py       a model that is divided among them, and its checkpoints
    plain.py        losses of joint training without an aligner, in one process or several
    result.py       how a training ends
    recipe.py       the protocol between a recipe and the loop
    loop.py         train(recipe, config, run)
    forward.py      what surrounds forward passes: mixed precision, attention of any shape
    step.py         one optimizer step, eager or as a CUDA graph
    ahead.py        batches prepared ahead in a thread
    state.py        the state of a run between two steps, saved and restored as one
    checkpoint.py   atomic checkpoints, best and averaged weights
    weights.py      weights files: written, read, verified
    runlog.py       the run folder: lock, config, metrics
    writers.py      TensorBoard, wandb, trackio
    meters.py       sums between two log entries
    from_run.py     things made from a run folder: a translator, a tagger
    measuring.py    gradient similarity at every checkpoint of a run
    signature.py    what a number depends on, in one line
    processes.py    device, seeds, random state, threads, signals
    display.py      progress bar

A recipe's config extends `RunConfig` with sections of its own:

    class TaggingConfig(RunConfig):
        data: DataConfig

    settings = config.load(TaggingConfig, "ner.toml", ["optimizer.lr=3e-5", "train.seed=2"])
"""

from gradvac.engine import RankError
from gradvac.lab.training import checkpoint, config
from gradvac.lab.training.stream import Ahead
from gradvac.lab.training.align import AlignConfig
from gradvac.lab.training.config import ConfigError, Section
from gradvac.lab.training.log import Display
from gradvac.lab.training.settings import FromRun
from gradvac.lab.training.loop import train
from gradvac.lab.training.optimizer import OptimizerConfig
from gradvac.sampling.epochs import Passes
from gradvac.lab.training.environment import choose_device, seed_everything
from gradvac.lab.training.distributed import WHOLE, Part, join
from gradvac.lab.training.recipe import Batch, BatchStream, Recipe, StepLosses
from gradvac.lab.training.loop import DivergedError, Result
from gradvac.lab.training.stream import RowStream, TensorBatch
from gradvac.lab.training.log import RunLog, read_metrics
from gradvac.sampling.tasks import (
    SamplingConfig,
    TaskSampler,
    TemperaturePhase,
    effective_epochs,
    task_probabilities,
)
from gradvac.lab.training.settings import RunConfig, TrainConfig
from gradvac.lab.training.settings import Signature
from gradvac.lab.training.weights import CheckpointError

__all__ = [
    "WHOLE",
    "Ahead",
    "AlignConfig",
    "Batch",
    "BatchStream",
    "CheckpointError",
    "ConfigError",
    "Display",
    "DivergedError",
    "FromRun",
    "OptimizerConfig",
    "Part",
    "Passes",
    "RankError",
    "Recipe",
    "Result",
    "RowStream",
    "RunConfig",
    "RunLog",
    "SamplingConfig",
    "Section",
    "Signature",
    "StepLosses",
    "TaskSampler",
    "TemperaturePhase",
    "TensorBatch",
    "TrainConfig",
    "checkpoint",
    "choose_device",
    "config",
    "effective_epochs",
    "join",
    "read_metrics",
    "seed_everything",
    "task_probabilities",
    "train",
]
