"""The settings of a run: [train], [sampling] and the sections every recipe has.

Also what follows from them: the signature that goes with every number, and how a trained run is
opened from its folder.
"""

import hashlib
import math
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

import gradvac
from gradvac import Aligner
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import config
from gradvac.lab.training.align import AlignConfig
from gradvac.lab.training.config import Section
from gradvac.lab.training.environment import choose_device
from gradvac.lab.training.optimizer import OptimizerConfig
from gradvac.lab.training.writers import writer_class
from gradvac.sampling import TaskEpochs, TaskSampler

# [train] keys that do not change the weights of a given step, and those that only say where
# training ends or how steps run; a run may be continued with other values. The first are not in the
# config hash.
TECHNICAL = (
    "log_every",
    "record_every",
    "checkpoint_every",
    "keep",
    "pause_at",
    "device",
    "threads",
    "parallel",
    "writers",
    "project",
)
EXTENSIBLE = (
    "max_steps",
    "validate_every",
    "patience",
    "average_last",
    "max_bad_steps",
    "cuda_graph",
)
TECHNICAL_ELSEWHERE = ("decoding.cuda_graph", "decoding.memory")  # of sections that recipes have

_OF_TRAINING = ("align", "optimizer", "sampling")  # sections that a trained model never asks

Temperature = Annotated[float, Field(gt=0, allow_inf_nan=True)]


class TrainConfig(Section):
    """The loop.

    Attributes:
        max_steps: Optimizer steps of the whole run.
        log_every: Steps between log entries; only then does the loop wait for the device.
        record_every: Steps between entries of `record.bin`, which holds similarities, targets and
            weights for the report; 0: none. Costs no host-device synchronisation.
        validate_every: Steps between validations; 0: never. The last step is always validated.
        checkpoint_every: Steps between checkpoints; the last step is always saved.
        keep: How many checkpoints stay on disk.
        metric: The validation score that decides which weights are best.
        higher_is_better: Whether `metric` should grow (BLEU, F1) or fall (loss).
        patience: Stop after this many validations in a row without a better score; 0: never.
        pause_at: Stop after this many steps, as a signal would: the run is saved, and continues
            with another value; 0: never.
        average_last: At the end, average the weights of this many last checkpoints; 0: do not.
        max_bad_steps: Stop after this many steps in a row with a loss or gradient that is not
            finite. Such steps are skipped.
        seed: Seed of everything random that has no seed of its own.
        precision: "bf16" runs forward passes under autocast; parameters stay in float32.
        cuda_graph: Record a step as a CUDA graph and replay it: "auto", the default of translation,
            does so in one process on a GPU if all batches have one size (`batch.fixed`), true
            insists on it, false saves the memory that a recorded step holds. If recording fails,
            training says so and continues without.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1". With several processes,
            each takes a GPU of its own.
        threads: CPU threads; 0: torch's choice.
        parallel: What each of several processes (torchrun) keeps of the model: "ddp" all of it,
            "fsdp" its share of parameters, gradients and moments (FSDP2).
        writers: Where metrics go in addition to `metrics.jsonl`: "tensorboard", "wandb", "trackio",
            or a `gradvac.lab.training.Writer` of your own: "module:Class" or "file.py:Class".
        project: Project name of the run in wandb and trackio.
    """

    max_steps: PositiveInt = 10_000
    log_every: PositiveInt = 50
    record_every: NonNegativeInt = 10
    validate_every: NonNegativeInt = 1000
    checkpoint_every: PositiveInt = 1000
    keep: PositiveInt = 3
    metric: str = "dev/loss"
    higher_is_better: bool = False
    patience: NonNegativeInt = 0
    pause_at: NonNegativeInt = 0
    average_last: NonNegativeInt = 0
    max_bad_steps: PositiveInt = 20
    seed: int = Field(default=0, ge=0, lt=2**63)  # what torch takes
    precision: Literal["fp32", "bf16"] = "fp32"
    cuda_graph: bool | Literal["auto"] = False
    device: str = "auto"
    threads: int = Field(default=0, ge=0, le=1024)  # too many would crash the process
    parallel: Literal["ddp", "fsdp"] = "ddp"
    writers: list[str] = Field(default_factory=lambda: ["tensorboard"])
    project: str = "gradvac"

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f'must be "auto", "cpu", "cuda" or "cuda:1", got {device!r}')
        return device

    @field_validator("writers")
    @classmethod
    def _are_writers(cls, writers: list[str]) -> list[str]:
        for name in writers:
            if ":" not in name:  # whoever only reads a run need not have its own ones
                writer_class(name)
        return writers

    @model_validator(mode="after")
    def _no_contradiction(self) -> "TrainConfig":
        if self.patience and not self.validate_every:
            raise ValueError("patience needs validations, but validate_every is 0")
        if self.average_last > self.keep:
            raise ValueError(
                f"average_last = {self.average_last} needs as many checkpoints, but keep is "
                f"{self.keep}"
            )
        return self

    def check_metric(self, kinds: Mapping[str, bool], tasks: Iterable[str], hint: str = "") -> None:
        """Refuse a metric that validation does not produce, before hours of training.

        Args:
            kinds: Kind of score, such as "loss" -> whether higher is better.
            tasks: Task names; every kind of score also exists for each task.
            hint: What to do about it.
        """
        every = list(tasks)
        better = {
            name: more_is_better
            for kind, more_is_better in kinds.items()
            for name in (f"dev/{kind}", *(f"dev/{kind}/{task}" for task in every))
        }
        if self.metric not in better:
            raise ValueError(
                f"train.metric = {self.metric!r} is not measured; there are {', '.join(better)}"
                f"{hint}"
            )
        if self.higher_is_better != better[self.metric]:
            right = str(better[self.metric]).lower()
            raise ValueError(f"train.higher_is_better must be {right} for {self.metric!r}")


class TemperaturePhase(Section):
    """Another temperature, from some optimizer step on.

    Attributes:
        from_step: The first step of the phase, counted from 0.
        temperature: Its temperature.
    """

    from_step: NonNegativeInt
    temperature: Temperature


class SamplingConfig(Section):
    """How tasks are drawn.

    Attributes:
        temperature: 1 follows the data, larger is flatter, `inf` is uniform. "auto": between 1 and
            5, from the sizes of the tasks and the length of training, because rows that are seen
            often teach less (`gradvac.sampling.shares`).
        high_first: Part of training, from its beginning, in which only tasks with at least as many
            rows as the average one are drawn.
        thin: Train on every n-th row of every task alone. `gradvac sweep --proxy` sets it, so that
            shorter runs repeat rows as often as long ones.
        schedule: Later phases ("cooldown"), in order.
        most_epochs: No task is seen more often than this on average; the excess goes to the
            others. With `temperature = inf` this is UniMax. Unset: no cap.
        slots: Draw this many tasks for a batch, and divide its rows among them; unset: every row
            draws its own task. With as many slots as processes (or twice as many), each process
            gets the rows of one task (or two), and sends less. In translation, a chunk of batches
            (`batch.chunk`) shares its slots.
        seed: Seed of the draws; unset: `train.seed`.
    """

    temperature: Temperature | Literal["auto"] = 5.0
    high_first: float = Field(default=0.0, ge=0, lt=1)
    thin: PositiveInt = 1
    schedule: list[TemperaturePhase] = Field(default_factory=list)
    most_epochs: PositiveFloat | None = None
    slots: PositiveInt | None = None
    seed: NonNegativeInt | None = None

    @field_validator("schedule")
    @classmethod
    def _in_order(cls, schedule: list[TemperaturePhase]) -> list[TemperaturePhase]:
        starts = [phase.from_step for phase in schedule]
        if starts != sorted(set(starts)):
            raise ValueError(f"from_step must increase from phase to phase, got {starts}")
        return schedule

    def thinned(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The rows of every task that are trained on: 0, `thin`, 2 `thin`, ..."""
        return {task: -(-size // self.thin) for task, size in sizes.items()}

    def build(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int = 0,
        num_rows: float | None = None,
        num_steps: int | None = None,
    ) -> TaskSampler:
        """A sampler at its first draw.

        Args:
            sizes: Task -> number of sentences.
            seed: Used where the section has none.
            num_rows: Rows that training draws in all, which `most_epochs` and "auto" need.
            num_steps: Its optimizer steps, which `high_first` needs.
        """
        sizes, high_first = self.thinned(sizes), 0
        if self.high_first:
            if num_steps is None:
                raise ValueError(
                    "sampling.high_first: this kind of run does not know in advance how many steps "
                    "it takes; leave it out."
                )
            high_first = math.ceil(self.high_first * num_steps)
        return TaskSampler(
            sizes,
            self.temperature,
            schedule=[(phase.from_step, phase.temperature) for phase in self.schedule],
            most_epochs=self.most_epochs,
            high_first=high_first,
            slots=self.slots,
            seed=seed if self.seed is None else self.seed,
            num_rows=num_rows,
        )

    def effective_epochs(
        self, sizes: Mapping[str, int], *, num_steps: int, rows_per_step: float
    ) -> list[TaskEpochs]:
        """How often training will see each task's data: see `TaskSampler.effective_epochs`."""
        sampler = self.build(sizes, num_rows=num_steps * rows_per_step, num_steps=num_steps)
        return sampler.effective_epochs(num_steps=num_steps, rows_per_step=rows_per_step)


class RunConfig(Section):
    """What all recipes configure; a recipe adds sections of its own."""

    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingConfig = SamplingConfig()
    align: AlignConfig = AlignConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        if self.align.recompute and self.optimizer.accumulation > 1:
            raise ValueError(
                "align.recompute = true keeps no task gradients to accumulate, but "
                f"optimizer.accumulation is {self.optimizer.accumulation}"
            )
        return self


def shortened(settings: RunConfig, part: float) -> dict[str, Any]:
    """Setting -> value of a training that has a part of the steps, and all that counts in them."""
    schedule = [
        {"from_step": math.ceil(part * phase.from_step), "temperature": phase.temperature}
        for phase in settings.sampling.schedule
    ]
    lengths = {
        "train.max_steps": settings.train.max_steps,
        "train.validate_every": settings.train.validate_every,
        "optimizer.warmup_steps": settings.optimizer.warmup_steps,
    }
    cut: dict[str, Any] = {key: math.ceil(part * steps) for key, steps in lengths.items()}
    return cut | ({"sampling.schedule": schedule} if schedule else {})


def run_signature(
    settings: RunConfig,
    aligner: Aligner | None,
    *,
    tasks: Sequence[str],
    data: str,
    device: torch.device,
    num_processes: int = 1,
) -> dict[str, str]:
    """Everything that determines the weights of a run, by name, and as one line: "signature".

    The line goes with every score, as sacreBLEU's does; two runs with the same line on the same
    kind of device are repetitions of each other.
    """
    several = f"{num_processes}x" if num_processes > 1 else ""
    fields = {
        "rule": settings.align.describe_rule(),
        "granularity": settings.align.granularity,
        "engine": "none" if aligner is None else aligner.engine,
        "tasks": str(len(tasks)),
        "seed": str(settings.train.seed),
        "precision": settings.train.precision,
        "config": config_hash(settings),
        "data": _short_hash(data),
        "device": f"{several}{_device_name(device)}",
        "torch": torch.__version__,
        "version": gradvac.__version__,
    }
    return fields | {"signature": "|".join(f"{name}:{value}" for name, value in fields.items())}


def config_hash(settings: RunConfig) -> str:
    """Hash of all settings except technical ones, such as the device."""
    return _hash_without(settings, TECHNICAL)


def weights_hash(settings: RunConfig) -> str:
    """Hash of the settings that determine the weights of a given step."""
    return _hash_without(settings, (*TECHNICAL, *EXTENSIBLE))


def _hash_without(settings: RunConfig, keys: Sequence[str]) -> str:
    default = type(settings.train)()
    train = settings.train.model_copy(update={key: getattr(default, key) for key in keys})
    return _short_hash(config.dump(settings.model_copy(update={"train": train})))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{platform.machine()}"


def trained_settings(
    settings_class: type[config.Config], run: Path, overrides: Sequence[str]
) -> config.Config:
    """The settings of a run whose training is over, with overrides.

    Raises:
        ConfigError: An override would change nothing, because it is about training.
    """
    for override in overrides:
        section = override.partition(".")[0].strip()
        if section in _OF_TRAINING:
            raise config.ConfigError(
                f"override {override}: [{section}] is about training, and {run} is trained; "
                "leave it out, or train another run with it."
            )
    return config.load(settings_class, RunFolder(run).config, overrides)


class FromRun(ABC):
    """Something that does a trained model's work, such as translating.

    Class attributes:
        settings_class: The settings of such runs.
    """

    settings_class: ClassVar[type[RunConfig]]

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        *,
        weights: str | int = "best",
        device: str = "auto",
        overrides: Sequence[str] = (),
    ) -> Self:
        """Load the model of a run from its folder alone.

        Args:
            run: The run folder.
            weights: "best", "last", "averaged", or a step.
            device: "auto", "cpu", "cuda", ...
            overrides: Overrides of its config, such as "decoding.beams=8".
        """
        run = Path(run)
        settings = trained_settings(cls.settings_class, run, overrides)
        return cls.open(run, settings, weights, choose_device(device))

    @classmethod
    @abstractmethod
    def open(cls, run: Path, settings: Any, weights: str | int, device: torch.device) -> Self:
        """Make it from a run whose settings have been read."""
