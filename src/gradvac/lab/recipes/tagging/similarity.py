"""Similarity of languages over a tagging run: its checkpoints on the sentences of a set.

Gradients are of the plain cross-entropy, without dropout, in float32. Every language contributes as
many windows as the smallest set has. The sentences differ between languages, unless the set is
aligned, as it is for the constructed languages: then the n-th sentences correspond.
"""

# T tasks

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from torch import Tensor, nn

from gradvac.analysis import Similarities
from gradvac.lab.recipes.tagging.batch import make_batch
from gradvac.lab.recipes.tagging.encoding import Numbers, Windows
from gradvac.lab.recipes.tagging.preparation import require_prepared
from gradvac.lab.recipes.tagging.recipe import row_losses
from gradvac.lab.recipes.tagging.settings import DEV, TaggingConfig
from gradvac.lab.recipes.tagging.tagger import (
    load_run_model,
    load_run_tokenizer,
    logits_of,
    pad_token,
)
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import choose_device, config
from gradvac.lab.training.measuring import measure_checkpoints
from gradvac.lab.training.settings import trained_settings, weights_hash

GRANULARITIES = ("all_layer", "whole_model")
_FEWEST = 10  # windows of a language
_ROWS = 64


def measure_run(
    run: str | Path,
    *,
    split: str = DEV,
    num_lines: int | None = 1000,
    weights: Sequence[str | int] = (),
    granularities: Sequence[str] = GRANULARITIES,
    offload: bool = False,
    device: str = "auto",
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> tuple[Similarities, ...]:
    """Measure the similarity of all languages at every checkpoint that a run kept.

    Writes RUN/similarity.npz after every checkpoint. Called again, it measures only what is not
    there yet.

    Args:
        run: The run folder.
        split: "dev" or "test".
        num_lines: Maximum number of windows per language; None: as many as the smallest set has.
        weights: Instead of all checkpoints: "best", "last", or steps.
        granularities: Which parameters share a component; all from the same gradients.
        offload: Keep task gradients in host memory.
        device: "auto", "cpu", "cuda", ...
        overrides: Overrides of the run's config, such as "data.prepared=...".
        console: Where progress is shown; None: nowhere.

    Raises:
        ValueError: There is no checkpoint, only one language, too few sentences, or there are
            similarities measured in another way.
    """
    run = Path(run)
    folder = RunFolder(run)
    settings = trained_settings(TaggingConfig, run, overrides)
    tasks = settings.data.languages
    if len(tasks) < 2:
        raise ValueError(f"{run}: has the single language {tasks[0]}; similarity is between tasks.")
    prepared = require_prepared(settings, run)
    windows = {task: prepared.windows(split, task) for task in tasks}
    smallest = min(tasks, key=lambda task: len(windows[task]))
    most = len(windows[smallest]) if num_lines is None else num_lines
    num = min(most, len(windows[smallest])) // 2 * 2
    if num < min(_FEWEST, max(2, most)):
        raise ValueError(
            f"set: {smallest} has {len(windows[smallest])} windows in {split}, too few to compare "
            "gradients; choose another set with --set."
        )
    model = load_run_model(run).to(choose_device(device)).eval()
    return measure_checkpoints(
        run,
        model,
        _Plan(windows, num, pad_token(load_run_tokenizer(run))),
        granularities,
        tasks=tasks,
        weights=weights,
        about={
            "set": split,
            "lines": num,
            "data": prepared.signature,
            "weights": weights_hash(config.load(TaggingConfig, folder.config)),
        },
        engine="per_task",
        offload=offload,
        console=console or Console(quiet=True),
    )


class _Plan:
    """Batches of equally many windows per language, alternately for one half and the other.

    Args:
        windows: Language -> its windows.
        num: How many of each, an even number: the first ones.
        pad: The padding token.
    """

    def __init__(self, windows: dict[str, Windows], num: int, pad: int) -> None:
        self._windows, self._pad = windows, pad
        lengths = np.max([of_language.lengths[:num] for of_language in windows.values()], axis=0)
        order = np.argsort(-lengths, kind="stable")
        self._chosen: list[Numbers] = []
        for first in range(0, num, 2 * _ROWS):
            part = order[first : first + 2 * _ROWS]
            self._chosen += [part[0::2], part[1::2]]

    @property
    def num_batches(self) -> int:
        """Batches of a whole measurement."""
        return len(self._chosen) * len(self._windows)

    def batches(self, model: nn.Module) -> dict[str, list[Callable[[], Tensor]]]:
        """What `measure` takes."""
        device = next(model.parameters()).device

        def loss(task: str, numbers: Numbers) -> Tensor:
            batch = make_batch([self._windows[task]], [numbers], pad=self._pad).to(device)
            return row_losses(logits_of(model, batch), batch.labels).sum()

        return {
            task: [partial(loss, task, numbers) for numbers in self._chosen]
            for task in self._windows
        }
