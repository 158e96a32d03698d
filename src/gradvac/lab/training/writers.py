"""Where metrics go in addition to `metrics.jsonl`: TensorBoard, wandb, trackio; all optional."""

import hashlib
import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.runs import RunFolder
from gradvac.lab.training.settings import RunConfig


class Writer(Protocol):
    """A destination for metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of an optimizer step."""
        ...

    def draw(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Show a picture, `[height, width, 3]`."""
        ...

    def close(self) -> None:
        """Write what is left, and close."""
        ...


class TensorBoard:
    """Event files in `RUN/tensorboard`; entries after `step` of a killed run are hidden."""

    def __init__(self, run: Path, *, step: int) -> None:
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


class Tracker:
    """wandb, or trackio, which has the same three functions. A resumed run keeps its page."""

    def __init__(self, name: str, run: Path, settings: RunConfig) -> None:
        self._module: Any = importlib.import_module(name)
        options: dict[str, Any] = {"name": run.name, "resume": "allow"}
        if name == "wandb":  # trackio finds a run by its name, wandb by an id
            place = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
            identity = re.sub("[^A-Za-z0-9._-]", "-", f"{run.name}-{place}")
            options |= {"id": identity, "dir": str(run)}
        config = settings.model_dump(mode="json")
        self._module.init(project=settings.train.project, config=config, **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars."""
        self._module.log(dict(values), step=step)

    def draw(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Pictures are left out: curves only."""

    def close(self) -> None:
        """Finish the run."""
        self._module.finish()


def open_writers(
    run: Path, settings: RunConfig, *, step: int, say: Callable[[str], None]
) -> list[Writer]:
    """The writers the config names.

    TensorBoard, which is on by default, may be missing; a writer that was asked for may not.
    """
    writers: list[Writer] = []
    for name in settings.train.writers:
        try:
            if name == "tensorboard":
                writers.append(TensorBoard(run, step=step))
            else:
                writers.append(Tracker(name, run, settings))
        except ModuleNotFoundError as error:
            if name != "tensorboard":
                raise ValueError(
                    f"train.writers: {name!r} is not installed ({error}); install it, or leave it "
                    "out."
                ) from error
            say("TensorBoard is not installed; metrics go to metrics.jsonl only.")
    return writers
