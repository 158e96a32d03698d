"""SETTINGS"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from gradvac.lab.training.align import AlignConfig
from gradvac.lab.training.config import Section
from gradvac.lab.training.optimizer import OptimizerConfig
from gradvac.sampling.tasks import SamplingConfig
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import torch
from gradvac import Aligner
from gradvac.lab.training import config
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from gradvac.lab.runs import RunFolder
from gradvac.lab.training.environment import choose_device




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
EXTENSIBLE = ("max_steps", "validate_every", "patience", "average_last", "max_bad_steps", "graph")
TECHNICAL_ELSEWHERE = ("decoding.graph", "decoding.memory")  # of sections that recipes have


WriterName = Literal["tensorboard", "wandb", "trackio"]


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
        graph: Record a step as a CUDA graph and replay it: "auto", the default of translation, does
            so in one process on a GPU if all batches have one size (`batch.fixed`), true insists on
            it, false saves the memory that a recorded step holds. If recording fails, training says
            so and continues without.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1". With several processes,
            each takes a GPU of its own.
        threads: CPU threads; 0: torch's choice.
        parallel: What each of several processes (torchrun) keeps of the model: "ddp" all of it,
            "fsdp" its share of parameters, gradients and moments (FSDP2).
        writers: Where metrics go in addition to `metrics.jsonl`.
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
    graph: bool | Literal["auto"] = False
    device: str = "auto"
    threads: int = Field(default=0, ge=0, le=1024)  # too many would crash the process
    parallel: Literal["ddp", "fsdp"] = "ddp"
    writers: list[WriterName] = Field(default_factory=lambda: list[WriterName](["tensorboard"]))
    project: str = "gradvac"

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f'must be "auto", "cpu", "cuda" or "cuda:1", got {device!r}')
        return device

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


@dataclass(frozen=True)
class Signature:
    """Everything that determines the weights of a run.

    `str()` gives the line that goes with every score; two runs with the same line on the same kind
    of device are repetitions of each other.
    """

    fields: Mapping[str, str]

    @classmethod
    def of(
        cls,
        settings: RunConfig,
        aligner: Aligner | None,
        *,
        tasks: Sequence[str],
        data: str,
        device: torch.device,
        num_processes: int = 1,
    ) -> "Signature":
        """The signature of a run.

        Args:
            settings: All settings.
            aligner: Knows the engine that is in use; None for rule "none".
            tasks: Task names.
            data: The recipe's `data_signature()`.
            device: Where it runs.
            num_processes: How many train together, on a device of this kind each.
        """
        several = f"{num_processes}x" if num_processes > 1 else ""
        return cls(
            {
                "rule": settings.align.describe_rule(),
                "granularity": settings.align.granularity,
                "engine": "none" if aligner is None else aligner.engine,
                "tasks": str(len(tasks)),
                "seed": str(settings.train.seed),
                "precision": settings.train.precision,
                "config": config_hash(settings),
                "data": short_hash(data),
                "device": f"{several}{_device_name(device)}",
                "torch": torch.__version__,
                "version": importlib.metadata.version("gradvac"),
            }
        )

    def to_dict(self) -> dict[str, str]:
        """The fields by name."""
        return dict(self.fields)

    def __str__(self) -> str:
        return "|".join(f"{name}:{value}" for name, value in self.fields.items())


def config_hash(settings: RunConfig) -> str:
    """Hash of all settings except technical ones, such as the device."""
    return _hash_without(settings, TECHNICAL)


def weights_hash(settings: RunConfig) -> str:
    """Hash of the settings that determine the weights of a given step."""
    return _hash_without(settings, (*TECHNICAL, *EXTENSIBLE))


def _hash_without(settings: RunConfig, keys: Sequence[str]) -> str:
    default = type(settings.train)()
    train = settings.train.model_copy(update={key: getattr(default, key) for key in keys})
    return short_hash(config.dump(settings.model_copy(update={"train": train})))


def short_hash(text: str) -> str:
    """Eight hex digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{platform.machine()}"


_OF_TRAINING = ("align", "optimizer", "sampling")  # sections that a trained model never asks


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
