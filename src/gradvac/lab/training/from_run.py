"""Things made from a run folder: from its settings, with overrides, and some of its weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import config
from gradvac.lab.training.processes import choose_device
from gradvac.lab.training.settings import RunConfig

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
