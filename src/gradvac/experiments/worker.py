"""One run of a sweep, in a process of its own: train, score, and say how it went."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradvac.runs import RunFolder
from gradvac.runs.files import write_json
from gradvac.training import Result, RunConfig, config
from gradvac.training._toml import write_value

INTERRUPTED = 130  # exit status


class Recipe(NamedTuple):
    """What a sweep needs of a recipe."""

    settings: type[RunConfig]
    train: Callable[[Any, Path], Result]
    score: Callable[..., object]


def recipe_named(name: str) -> Recipe:
    """The recipe of that name; imports it."""
    if name == "nmt":
        from gradvac import nmt

        return Recipe(nmt.NmtConfig, nmt.train_translation, nmt.score_run)
    from gradvac import tagging

    return Recipe(tagging.TaggingConfig, tagging.train_tagging, tagging.score_run)


def load_settings(recipe: str, base: str | Path, settings: dict[str, Any]) -> RunConfig:
    """The config of a run.

    Raises:
        ConfigError: With one line for each mistake.
    """
    overrides = [f"{key}={write_value(value)}" for key, value in settings.items()]
    return config.load(recipe_named(recipe).settings, base, overrides)


def work(
    *,
    recipe: str,
    base: str,
    settings: dict[str, Any],
    run: str,
    score: Sequence[str],
    result: str,
) -> int:
    """Train and score one run, and write how it ended; an exit status.

    Args:
        recipe: "nmt" or "tagging".
        base: File of the config that is varied.
        settings: Setting -> value.
        run: The run folder.
        score: Sets to score when it is finished.
        result: File to write.
    """
    loaded = load_settings(recipe, base, settings)
    done = recipe_named(recipe).train(loaded, Path(run))
    if done.reason == "interrupted":
        return INTERRUPTED
    if done.reason != "paused":
        for split in score:
            if not RunFolder(Path(run)).scores_of(split, "best").is_file():
                recipe_named(recipe).score(run, split=split, device=loaded.train.device)
                print(f"Scored on the {split} set.", flush=True)
    facts = {"reason": done.reason, "step": done.step, "seconds": done.seconds}
    write_json(Path(result), facts)
    return 0


def main() -> None:
    """Do what the file says that is named on the command line."""
    sys.exit(work(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
