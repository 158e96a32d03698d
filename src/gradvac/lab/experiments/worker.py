"""One run of a sweep, in a process of its own: train, score, measure, and say how it went."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradvac.lab.recipes import recipe_named
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.files import write_json
from gradvac.lab.training import RunConfig, config
from gradvac.lab.training.config import write_value

INTERRUPTED = 130  # exit status


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
    measure: Sequence[str],
    result: str,
) -> int:
    """Train, score and measure one run, and write how it ended; an exit status.

    Args:
        recipe: The name of the recipe: "nmt", "tagging", or `MODULE:NAME`.
        base: File of the config that is varied.
        settings: Setting -> value.
        run: The run folder.
        score: Sets to score when it is finished.
        measure: Aligned sets to measure similarities on then.
        result: File to write.
    """
    loaded = load_settings(recipe, base, settings)
    done = recipe_named(recipe).train(loaded, Path(run))
    if done.reason == "interrupted":
        return INTERRUPTED
    if done.reason != "paused":
        folder = RunFolder(Path(run))
        for split in score:
            is_scored = folder.scores_of(split, "best").is_file()
            if not is_scored or not folder.are_scores_current(split, "best"):
                recipe_named(recipe).score(run, split=split, device=loaded.train.device)
                print(f"Scored on the {split} set.", flush=True)
        for split in measure:  # only what is not there yet
            recipe_named(recipe).measure(run, split=split, device=loaded.train.device)
            print(f"Measured on the {split} set.", flush=True)
    facts = {"reason": done.reason, "step": done.step, "seconds": done.seconds}
    write_json(Path(result), facts)
    return 0


def main() -> None:
    """Do what the file says that is named on the command line."""
    sys.exit(work(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


def serve() -> None:
    """Do what files say, one after the other, each in a child of this process.

    To import torch and a recipe takes longer than many a small run, so it is done once, here. This
    process must leave the GPU alone, which children could not use otherwise.

    A line of standard input is a list of two paths: what `main` takes, and a log. The process
    number of the child is printed, and then its exit status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the children's, which save and leave
    for line in sys.stdin:
        task, log = map(Path, json.loads(line))
        recipe_named(json.loads(task.read_text(encoding="utf-8"))["recipe"])
        with warnings.catch_warnings():
            # Python warns of threads: those of NumPy's matrix products, which know what to do.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(_work_in_child(task, log))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _work_in_child(task: Path, log: Path) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for ours, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(ours, standard)
    try:
        return work(**json.loads(task.read_text(encoding="utf-8")))
    except BaseException:  # nothing may go on where the parent's work is
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
