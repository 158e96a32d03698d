"""Tagged sentences from Hugging Face datasets, on the hub or in a folder."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradvac.lab.recipes.tagging.sentences import Reading

_COLUMNS = ("ner_tags", "upos", "pos_tags")


def read_dataset(name: str, root: Path) -> Reading:
    """Read `hf:NAME:CONFIG:SPLIT`."""
    parts = name.split(":")
    if len(parts) != 4:
        raise ValueError(f"data: {name} must be hf:NAME:CONFIG:SPLIT (CONFIG may be empty).")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"data: {name} needs the package `datasets`; pip install datasets."
        ) from None
    rows = _load_rows(datasets, name, root)
    column = next((tag for tag in _COLUMNS if tag in rows.features), None)
    if column is None or "tokens" not in rows.features:
        raise ValueError(
            f"data: {name} has the columns {', '.join(rows.features)}; it needs tokens and one of "
            f"{', '.join(_COLUMNS)}."
        )
    inner = getattr(rows.features[column], "feature", None)
    names = getattr(inner, "names", None)
    reading = Reading()
    for row in rows:
        tags = [_tag_name(tag, names, name) for tag in row[column]]
        if len(tags) != len(row["tokens"]):
            raise ValueError(
                f"data: {name} has a row with {len(row['tokens'])} tokens and {len(tags)} tags."
            )
        reading.add(list(row["tokens"]), tags)
    return reading


def _tag_name(tag: Any, names: Sequence[str] | None, dataset: str) -> str:
    if names is None:
        return str(tag)
    if not 0 <= tag < len(names):  # hidden labels are -1, which would be the last name
        raise ValueError(
            f"data: {dataset} has the tag {tag}, which has no name; there are {len(names)}. Choose "
            "a split with labels."
        )
    return str(names[tag])


def _load_rows(datasets: Any, name: str, root: Path) -> Any:
    """A split of a dataset, from a folder that `save_to_disk` wrote or from the hub."""
    _, dataset, config, split = name.split(":")
    folder = root / dataset
    if not folder.is_dir():
        try:
            return datasets.load_dataset(dataset, config or None, split=split)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"data: {name} cannot be loaded ({reason}); give a folder that save_to_disk wrote, "
                "or a name on the hub if it can be reached."
            ) from error
    rows = datasets.load_from_disk(str(folder))
    splits = list(rows) if isinstance(rows, dict) else [""]
    if split not in splits:
        there = ", ".join(splits) if splits != [""] else "no splits: write hf:FOLDER::"
        raise ValueError(f"data: {name}: there is no split {split!r}; there are {there}.")
    return rows[split] if split else rows
