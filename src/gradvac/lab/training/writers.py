"""Writers: where metrics go beside `metrics.jsonl`: TensorBoard, trackers, and your own.

A writer of your own is named in `train.writers` as "module:Class" or "file.py:Class":

    class Lines(Writer):
        def __init__(self, run, settings, *, step):
            self.file = open(run / "lines.txt", "a")

        def write(self, step, values):
            print(step, dict(values), file=self.file)
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.runs import RunFolder
from gradvac.utils.hints import nearest
from gradvac.utils.plugins import plugin_class

if TYPE_CHECKING:
    from gradvac.lab.training.settings import RunConfig

logger = logging.getLogger(__name__)


class Writer(ABC):
    """A destination for metrics.

    Args:
        run: The run folder.
        settings: All settings of the run.
        step: The step that training continues from; 0 for a new run. What a killed process wrote
            beyond it comes again.
    """

    def __init__(self, run: Path, settings: RunConfig, *, step: int) -> None:  # noqa: B027
        ...

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of an optimizer step; those of training and of validation come apart."""

    def draw(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:  # noqa: B027
        """Show a picture, `[height, width, 3]`; most writers have curves only."""

    def close(self) -> None:  # noqa: B027
        """Write what is left, and close."""


class TensorBoard(Writer):
    """Event files in `RUN/tensorboard`; entries after `step` of a killed run are hidden."""

    def __init__(self, run: Path, settings: RunConfig, *, step: int) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(RunFolder(run).tensorboard), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def draw(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Record a picture, where Pillow is installed."""
        with suppress(ModuleNotFoundError):
            self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Tracker(Writer):
    """wandb, or trackio, which has the same three functions. A resumed run keeps its page."""

    module_name = "wandb"

    def __init__(self, run: Path, settings: RunConfig, *, step: int) -> None:  # noqa: ARG002
        self._module: Any = importlib.import_module(self.module_name)
        options: dict[str, Any] = {"name": run.name, "resume": "allow"}
        if self.module_name == "wandb":  # trackio finds a run by its name, wandb by an id
            digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
            identity = re.sub("[^A-Za-z0-9._-]", "-", f"{run.name}-{digest}")
            options |= {"id": identity, "dir": str(run)}
        dumped = settings.model_dump(mode="json")
        self._module.init(project=settings.train.project, config=dumped, **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars."""
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._module.finish()


class Trackio(Tracker):
    """trackio."""

    module_name = "trackio"


_WRITERS: dict[str, type[Writer]] = {
    "tensorboard": TensorBoard,
    "wandb": Tracker,
    "trackio": Trackio,
}


def writer_class(name: str) -> type[Writer]:
    """The class of a writer by its name in `train.writers`.

    Raises:
        ValueError: There is none.
    """
    if ":" in name:
        return plugin_class(name, Writer, "train.writers")  # type: ignore[type-abstract]
    if name not in _WRITERS:
        raise ValueError(f"got {name!r}; {nearest(name, _WRITERS)}")
    return _WRITERS[name]


def open_writers(run: Path, settings: RunConfig, *, step: int) -> list[Writer]:
    """The writers the config names.

    TensorBoard, which is on by default, may be missing; a writer that was asked for may not.
    """
    writers: list[Writer] = []
    for name in settings.train.writers:
        try:
            writers.append(writer_class(name)(run, settings, step=step))
        except ModuleNotFoundError as error:
            if name != "tensorboard":
                raise ValueError(
                    f"train.writers: {name!r} is not installed ({error}); install it, or leave it "
                    "out."
                ) from error
            logger.info("TensorBoard is not installed; metrics go to metrics.jsonl only.")
    return writers
