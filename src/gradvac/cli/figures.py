"""`gradvac figures`: the paper's figures for one or more runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradvac.cli.common import Distances, Families, Runs, needs
from gradvac.utils.hints import nearest


@needs("report")
def figures(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path(
        "figures"
    ),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="pdf, svg, png; default: all.")
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option("--pair", help="Two tasks to follow over steps, as in en-fr,en-es."),
    ] = None,
    distances: Distances = "genealogy",
    families: Families = None,
) -> None:
    """Draw the paper's figures for some runs, and say what the missing ones would need."""
    from gradvac.analysis.figures import FORMATS, write_figures
    from gradvac.lab.languages.known import load_runs, sizes_of

    loaded = load_runs(runs, distances=distances, families=families)
    tasks = [task for run in loaded for task in run.tasks]
    chosen = None if pairs is None else [_pair(pair, tasks) for pair in pairs]
    kinds = formats or FORMATS
    ending = kinds[0] if len(kinds) == 1 else f"{{{','.join(kinds)}}}"  # as a shell expands it
    done = write_figures(
        loaded,
        out,
        kinds,
        sizes=sizes_of(loaded),
        pairs=chosen,
        on_written=lambda name: print(f"{out / name}.{ending}", flush=True),
    )
    for name, reason in done.missing.items():
        print(f"{name}: not drawn, {reason}")


def _pair(text: str, tasks: Sequence[str]) -> tuple[str, str]:
    first, comma, second = text.partition(",")
    if not comma or not first or not second:
        raise ValueError(f"--pair: give two tasks as in en-fr,en-es; got {text!r}.")
    pair = first.strip(), second.strip()
    for task in pair:
        if task not in tasks:
            hint = nearest(task, dict.fromkeys(tasks))
            raise ValueError(f"--pair: {task!r} is not a task of these runs; {hint}")
    return pair
