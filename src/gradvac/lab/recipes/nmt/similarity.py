"""Similarity of tasks along a translation run: its checkpoints on a multi-way aligned set.

Gradients are those of the plain cross-entropy, without dropout and smoothing, in float32. All tasks
see the same lines: those whose sentence in the common language (English, as a rule) is in the set
of every pair. Lines of like length are dealt in turn to two halves, which tell how reliable the
cosines are; `gradvac.analysis.measure` explains what is computed and how much memory it takes.
"""

# T tasks, N lines

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from torch import Tensor, nn

from gradvac.analysis import Similarities
from gradvac.lab.recipes.nmt.data_settings import DEV
from gradvac.lab.recipes.nmt.prepared import Prepared, require_prepared
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.stream import Numbers, TaskData, gather_batch
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import choose_device, config
from gradvac.lab.training.measuring import measure_checkpoints
from gradvac.lab.training.settings import trained_settings, weights_hash
from gradvac.tasks import parse

ENGINES = ("per_task", "one_backward")
GRANULARITIES = ("all_layer", "enc_dec", "whole_model")
_FEWEST_LINES = 10


def measure_run(
    run: str | Path,
    *,
    split: str = DEV,
    num_lines: int | None = 1000,
    weights: Sequence[str | int] = (),
    granularities: Sequence[str] = GRANULARITIES,
    engine: str = "per_task",
    offload: bool = False,
    device: str = "auto",
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> tuple[Similarities, ...]:
    """Measure the similarity of all tasks at every checkpoint that a run kept, but the untrained.

    Writes RUN/similarity.npz after every checkpoint. Called again, it measures only what is not
    there yet.

    Args:
        run: The run folder.
        split: The aligned set: "dev", "test", or an extra set of the config.
        num_lines: Only the first so many lines that all tasks have; None: all.
        weights: Instead of all checkpoints: "best", "last", or steps.
        granularities: Which parameters share a component; all from the same gradients.
        engine: "per_task", or "one_backward": all tasks in one batch, fewer and larger steps.
        offload: Keep task gradients in host memory.
        device: "auto", "cpu", "cuda", ...
        overrides: Of the run's config, such as "data.prepared=..." or "batch.tokens=8192".
        console: Where progress is shown; None: nowhere.

    Raises:
        ValueError: There is no checkpoint, no aligned set, a single task, or similarities that
            were measured otherwise.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: must be {' or '.join(ENGINES)}, got {engine!r}.")
    if num_lines is not None and num_lines < 2:
        raise ValueError(f"lines: two halves need at least 2 lines, got {num_lines}.")
    run = Path(run)
    folder = RunFolder(run)
    settings = trained_settings(NmtConfig, run, overrides)
    tasks = settings.data.all_tasks()
    if len(tasks) < 2:
        raise ValueError(f"{run}: has the single task {tasks[0]}; similarity is between tasks.")
    prepared = require_prepared(settings.data, run)
    prepared.require_vocabulary_of(run)
    model = settings.model.build(len(prepared.vocabulary)).to(choose_device(device)).eval()
    lines = aligned_lines(prepared, split, tasks, num_lines)
    data = [TaskData.open(prepared, split, task) for task in tasks]
    return measure_checkpoints(
        run,
        model,
        _Plan(data, [lines[task] for task in tasks], settings.batch.tokens, engine),
        granularities,
        tasks=tasks,
        weights=weights,
        about={
            "set": split,
            "lines": len(lines[tasks[0]]),
            "data": prepared.signature,
            "weights": weights_hash(config.load(NmtConfig, folder.config)),
        },
        engine=engine,
        offload=offload,
        console=console or Console(quiet=True),
    )


def aligned_lines(
    prepared: Prepared, split: str, tasks: Sequence[str], num_lines: int | None = None
) -> dict[str, Numbers]:
    """Lines of a set that say the same thing in all tasks.

    Args:
        prepared: The data.
        split: Name of the set.
        tasks: The tasks.
        num_lines: Only the first so many.

    Returns:
        Task -> numbers of its lines; the n-th of all tasks belong together.
    """
    pairs = list(dict.fromkeys(prepared.pair_of(task) for task in tasks))
    common = [code for code in parse(pairs[0]) if all(code in parse(p) for p in pairs)]
    if common:
        texts = {p: prepared.text(split, p)[parse(p).index(common[0])] for p in pairs}
        places = {p: {text: n for n, text in reversed(list(enumerate(texts[p])))} for p in pairs}
        shared = [t for t in places[pairs[0]] if all(t in of_pair for of_pair in places.values())]
        shared.sort(key=places[pairs[0]].__getitem__)
        numbers = {p: [places[p][text] for text in shared[:num_lines]] for p in pairs}
    else:
        sizes = {p: len(prepared.text(split, p)[0]) for p in pairs}
        size = min(sizes.values()) if len(set(sizes.values())) == 1 else 0
        numbers = {p: list(range(size))[:num_lines] for p in pairs}
    fewest = min(_FEWEST_LINES, num_lines or _FEWEST_LINES)
    if len(numbers[pairs[0]]) < max(2, fewest):
        raise ValueError(
            f"set: {split!r} is not aligned over all tasks; only {len(numbers[pairs[0]])} lines "
            "are in all pairs. Choose another one with --set, such as an extra set "
            "(data.extra) with the same sentences in every language."
        )
    return {task: np.array(numbers[prepared.pair_of(task)], dtype=np.int64) for task in tasks}


class _Plan:
    """Batches of the same lines for all tasks, in turn for one half and the other.

    Args:
        data: The tasks' sentence pairs.
        lines: Numbers of the aligned lines, for every task, `[T][N]`.
        tokens: Most tokens of either side of a batch.
        engine: "one_backward" puts all tasks into one batch.
    """

    def __init__(
        self, data: list[TaskData], lines: list[Numbers], tokens: int, engine: str
    ) -> None:
        self._data, self._mixed = data, engine == "one_backward"
        lengths = np.max(
            [d.lengths(numbers) for d, numbers in zip(data, lines, strict=True)], axis=(0, 1)
        )
        order = np.argsort(-lengths, kind="stable")
        order = order[: len(order) // 2 * 2]  # two halves of one size
        rows = len(data) if self._mixed else 1
        self._chosen: list[list[Numbers]] = []  # batch -> task -> lines
        while len(order):
            size = 2 * max(1, tokens // (int(lengths[order[0]]) * rows))
            for half in (0, 1):
                self._chosen.append([numbers[order[half:size:2]] for numbers in lines])
            order = order[size:]

    @property
    def num_batches(self) -> int:
        """Batches of a whole measurement."""
        return len(self._chosen) * (1 if self._mixed else len(self._data))

    def batches(
        self, model: nn.Module
    ) -> dict[str, list[Callable[[], Tensor]]] | list[Callable[[], tuple[Tensor, Tensor]]]:
        """What `measure` takes."""
        device = next(model.parameters()).device

        def one_task(task: int, chosen: list[Numbers]) -> Tensor:
            losses: Tensor = model(gather_batch([self._data[task]], [chosen[task]]).to(device))
            return losses.sum()

        def all_tasks(chosen: list[Numbers]) -> tuple[Tensor, Tensor]:
            batch = gather_batch(self._data, chosen)
            return model(batch.to(device)), batch.tasks

        if self._mixed:
            return [partial(all_tasks, chosen) for chosen in self._chosen]
        return {
            data.name: [partial(one_task, task, chosen) for chosen in self._chosen]
            for task, data in enumerate(self._data)
        }
