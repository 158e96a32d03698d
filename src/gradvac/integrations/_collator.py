"""Batches of Hugging Face's Trainer that carry the task of every row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import default_data_collator

TASKS_OF_ROWS = "tasks_of_rows"


class TaskCollator:
    """A data collator that adds the task of every example to the batch of another collator.

    Args:
        collator: Makes a batch of the examples without their tasks.
        column: Name of the column that holds the tasks.
        is_grouped: Group the examples by task, which saves the aligner from regrouping every
            layer's rows; for training, where the order within a batch does not matter.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any] = default_data_collator,
        column: str = "task",
        *,
        is_grouped: bool = False,
    ) -> None:
        self.collator, self.column, self.is_grouped = collator, column, is_grouped

    @property
    def tokenizer(self) -> Any:
        """The other collator's, which a Trainer saves with its checkpoints."""
        return self.collator.tokenizer  # type: ignore[attr-defined]

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate, and put the tasks under "tasks_of_rows".

        Examples for evaluation need no task.
        """
        missing = [number for number, one in enumerate(features) if self.column not in one]
        if len(missing) == len(features) and not self.is_grouped:
            return dict(self.collator(list(features)))
        if missing:
            raise ValueError(
                f"train_dataset: example {missing[0]} of the batch has no column {self.column!r} "
                f"with its task; its columns are {', '.join(features[missing[0]])}."
            )
        if self.is_grouped:
            places = {one[self.column]: place for place, one in enumerate(features)}
            features = sorted(features, key=lambda one: places[one[self.column]])
        tasks = [one[self.column] for one in features]
        rest = [{k: v for k, v in one.items() if k != self.column} for one in features]
        return {**self.collator(rest), TASKS_OF_ROWS: tasks}


def refuse_other_numbers(dataset: Any, column: str, tasks: Sequence[str]) -> None:
    """Refuse a column of numbers (`ClassLabel`) that name the tasks in another order."""
    feature = (getattr(dataset, "features", None) or {}).get(column)
    names = getattr(feature, "names", None)
    if names is not None and list(names) != list(tasks)[: len(names)]:
        raise ValueError(
            f"tasks: the numbers in column {column!r} of train_dataset stand for {list(names)}, "
            f"but tasks are {list(tasks)}; give them in the same order."
        )
