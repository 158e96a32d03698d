"""Similarity of tasks along a translation run: its checkpoints on a multi-way aligned set.

All tasks see the same lines: those whose sentence in the common language (English, as a rule) is in
the set of every pair.
"""

# T tasks

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradvac.analysis import Similarities
from gradvac.lab.recipes.common.measuring import MeasuredSet, measure_run
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.stream import Numbers, TaskData, gather_batch
from gradvac.tasks import parse

GRANULARITIES = ("all_layer", "enc_dec", "whole_model")
_FEWEST_LINES = 10


def measure_translation(run: str | Path, **options: Any) -> tuple[Similarities, ...]:
    """Measure the similarity of all tasks; `measure_run` lists the options."""
    return measure_run(run, NmtConfig, _open_set, **{"granularities": GRANULARITIES, **options})


def _open_set(settings: NmtConfig, run: Path, split: str, num_lines: int | None) -> MeasuredSet:
    tasks = settings.data.all_tasks()
    prepared = PreparedCorpus.require(settings.data, run)
    prepared.check_vocabulary_of(run)
    lines = aligned_lines(prepared, split, tasks, num_lines)
    data = [TaskData.open(prepared, split, task) for task in tasks]
    rows = [lines[task] for task in tasks]

    def losses(model: nn.Module, chosen: Sequence[Numbers]) -> tuple[Tensor, Any]:
        batch = gather_batch(data, chosen)
        return model(batch.to(next(model.parameters()).device)), batch.tasks

    lengths = [of_task.lengths(numbers) for of_task, numbers in zip(data, rows, strict=True)]
    return MeasuredSet(
        tasks,
        settings.model.build(len(prepared.vocabulary)),
        rows,
        losses,
        prepared.signature,
        np.max(lengths, axis=(0, 1)),
        lambda longest: settings.batch.tokens // longest,
    )


def aligned_lines(
    prepared: PreparedCorpus, split: str, tasks: Sequence[str], num_lines: int | None = None
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
