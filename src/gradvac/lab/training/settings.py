"""[train], and the sections every recipe has."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from gradvac.lab.training.align import AlignConfig
from gradvac.lab.training.config import Section
from gradvac.lab.training.optimizer import OptimizerConfig
from gradvac.lab.training.sampling import SamplingConfig

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
